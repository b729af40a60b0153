"""Our CUDA kernels on a CPU: every thread of every block, in a fixed order, with the bits compared with the reference.

A tool of verification. No operator ever runs this way.
"""
