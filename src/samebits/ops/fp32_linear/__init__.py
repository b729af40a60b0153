"""The operator ``fp32_linear``. Start with spec.py (the contract), then reference.py (the bits), then the kernels."""
