"""The operator ``hc_split_sinkhorn``. Start with spec.py (the contract), then reference.py (the bits), then the kernels."""
