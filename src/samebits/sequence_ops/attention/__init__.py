"""The operator ``attention``. Start with contracts.py, then reference.py (the bits), then triton.py and triton_backward.py."""
