"""The operator ``adaln_projection``. Start with spec.py (the contract), then reference.py (the bits), then the kernels."""
