"""The operator ``qk_rmsnorm``. Start with spec.py (the contract), then reference.py (the bits), then the kernels."""
