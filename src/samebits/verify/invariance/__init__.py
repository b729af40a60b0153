"""Batch invariance of a whole model: the first module whose rows depend on the batch around them. See ../drift/README.md."""

from samebits.verify.invariance.run import CHANGES, Finding, Invariance, invariance

__all__ = ["CHANGES", "Finding", "Invariance", "invariance"]
