"""Choose the few builds that are really compiled where all of them would take too long: every kernel, and no one by luck."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from samebits.audit.fingerprint import fingerprint
from samebits.audit.listing import Job, work

MOST = 100


def choose(jobs: Iterable[Job], arches: Sequence[str], most: int = MOST) -> tuple[tuple[Job, str], ...]:
    """(build, architecture) pairs: of every kernel one build for one architecture, then for a second, up to ``most``.

    The same source gives the same choice, and any change of a kernel another one. ValueError if ``most`` leaves out kernels.
    """
    by_entry: dict[str, list[Job]] = {}
    for job in jobs:
        by_entry.setdefault(job.entry, []).append(job)
    if len(by_entry) > most:
        raise ValueError(f"{most} compilations cannot cover {len(by_entry)} kernels")
    turns: list[tuple[int, str, Job, str]] = []
    for entry, members in by_entry.items():
        ranked = sorted(
            dict.fromkeys(a for _, a in work(members, arches)), key=lambda a: _hash(entry, a, str(len(members)))
        )
        for turn, arch in enumerate(ranked):
            launched = [job for job, where in work(members, arches) if where == arch]
            chosen = min(launched, key=lambda job: _hash(fingerprint(job, arch)))
            turns.append((turn, _hash(entry, arch), chosen, arch))
    turns.sort(key=lambda one: one[:2])
    return tuple((job, arch) for _, _, job, arch in turns[:most])


def _hash(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
