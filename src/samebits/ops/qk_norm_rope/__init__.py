"""The operator ``qk_norm_rope``. Start with spec.py (the contract), then reference.py (the bits), then the kernels."""
