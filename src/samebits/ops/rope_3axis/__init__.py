"""The operator ``rope_3axis``. Start with spec.py (the contract), then reference.py (the bits), then the kernels."""
