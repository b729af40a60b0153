"""Every kernel of ours, for every audited architecture: clean by its contracts, and the code that the lock records."""

from __future__ import annotations

import pytest

from samebits import environment, registry
from samebits.audit import lock
from samebits.audit.compile import ARCHES
from samebits.audit.run import audit_operators


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("operator", registry.names())
def test_kernels_are_clean_and_locked(operator: str, arch: str) -> None:
    result = audit_operators([operator], (arch,))
    broken = [
        (report.key, finding.rule, finding.examples[:2]) for report in result.reports for finding in report.findings
    ]
    assert not broken, broken
    root = environment.checkout()
    assert root is not None
    comparison = lock.compare(root / "tests" / "golden" / "audit.lock.json", result, [operator], (arch,))
    assert comparison.status == "same", comparison.lines
