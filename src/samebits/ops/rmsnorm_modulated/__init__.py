"""The operator ``rmsnorm_modulated``. Start with spec.py (the contract), then reference.py (the bits), then the kernels."""
