"""Every kernel of ours, for every audited architecture: clean by its contracts, and the code that the lock records.

The lock records only clean code, with the fingerprint of all that it follows from. So every build is checked by its
fingerprint, and a sample is compiled and compared, to see that the lock tells the truth.
"""

from __future__ import annotations

from pathlib import Path

from samebits import environment
from samebits.audit import listing, lock, run, sample
from samebits.audit.compile import ARCHES
from samebits.audit.listing import Job

WRITE = "after a change that is meant: samebits audit --write-lock"


def path() -> Path:
    root = environment.checkout()
    assert root is not None
    return root / "tests" / "golden" / "audit.lock.json"


def jobs() -> list[Job]:
    return [one for one in listing.everything() if isinstance(one, Job)]


def test_every_build_is_recorded_as_it_is_now() -> None:
    listed = listing.everything()
    assert listed == tuple(jobs()), [one for one in listed if not isinstance(one, Job)]
    comparison = lock.check_inputs(path(), listed, ARCHES)
    assert comparison.status == "same", "\n".join((WRITE, *comparison.lines[:40], f"{len(comparison.lines)} in all"))


def test_a_sample_compiles_to_the_clean_code_that_is_recorded() -> None:
    chosen = sample.choose(jobs(), ARCHES)
    assert {job.entry for job, _ in chosen} == {job.entry for job in jobs()}, "every kernel must be in it"
    assert {arch for _, arch in chosen} == set(ARCHES)
    result = run.audit_work(chosen)
    broken = [(one.key, found.rule, found.examples[:2]) for one in result.reports for found in one.findings]
    assert not broken, broken
    comparison = lock.compare(path(), result, None, ARCHES, sample=True)
    assert comparison.status == "same", "\n".join((WRITE, *comparison.lines))
