"""The operator ``adaln_row_gather``. Start with spec.py (the contract), then reference.py (the bits), then the kernels."""
