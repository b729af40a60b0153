"""The operator ``adaln_gate_residual``. Start with spec.py (the contract), then reference.py (the bits), then the kernels."""
