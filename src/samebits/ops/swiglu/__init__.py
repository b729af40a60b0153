"""The operator ``swiglu``. Start with spec.py (the contract), then reference.py (the bits), then the kernels."""
