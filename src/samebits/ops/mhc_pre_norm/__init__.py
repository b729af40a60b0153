"""The operator ``mhc_pre_norm``. Start with spec.py (the contract), then reference.py (the bits), then the kernels."""
