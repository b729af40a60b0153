"""An operator beside every known peer on identical inputs: bits, batch invariance, repeatability, error, time, memory.

``samebits compare OP`` on the command line; :func:`samebits.compare.run.run` from Python. What the report holds is in README.md.
"""
