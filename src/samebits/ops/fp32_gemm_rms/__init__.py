"""The operator ``fp32_gemm_rms``. Start with spec.py (the contract), then reference.py (the bits), then the kernels."""
