"""Is it accurate, is it invariant, and if not, where first: ``samebits.check`` and what it is made of."""

from samebits.verify.check import ONLY, check
from samebits.verify.report import Report
from samebits.verify.subject import UsageError

__all__ = ["ONLY", "Report", "UsageError", "check"]
