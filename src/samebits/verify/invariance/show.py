"""The findings as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from samebits.verify.drift.show import places
from samebits.verify.invariance.run import Invariance


def lines(result: Invariance) -> Iterator[str]:
    for finding in result.findings:
        yield f"{finding.change:13} {finding.status:15} {finding.name}; {finding.error or f'{finding.compared} calls compared'}"
        for phase in finding.phases:
            first = finding.drift.first(phase) if finding.drift is not None else None
            if first is not None and finding.status == "fail":
                made = first.judgement in ("origin", "unclear")
                yield f"    first in {phase}: {first.name}" + ("" if made else ", whose inputs differ already")
                yield f"        {places(first)}"
    yield {
        0: "every row keeps its bits",
        1: "rows depend on the batch",
        2: "not every change could be compared",
    }[result.exit_code]
