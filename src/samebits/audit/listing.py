"""All kernels of ours, each once: under the operator whose folder holds its source, with every contract it serves.

An operator also launches kernels of others (``mhc_pre`` those of ``fp32_gemm_rms`` and ``h_aggregate``). Such a kernel must
keep the contracts of all that launch it, so its limits are read from the declaration of each of them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from samebits.audit.build import Build
from samebits.audit.compile import arch_name, capability
from samebits.audit.limits import Limits, of_contracts

Served = set[tuple[str, str]]
"""(operator, contract) pairs."""


@dataclass(frozen=True)
class Job:
    """One build under its owner's name, and what the contracts it serves allow."""

    op: str
    build: Build
    limits: Limits
    contracts: tuple[str, ...] = ()
    """Those contracts, for people: ``fast`` of the owner, ``mhc_pre fast`` of another operator."""

    @property
    def entry(self) -> str:
        """The kernel as it is written: all builds of one source have the same."""
        return f"{self.op}/{self.build.backend}/{self.build.entry}"

    def key(self, arch: str) -> str:
        """Unique among our builds, and the name in the lock."""
        return f"{self.op}/{self.build.backend}/{self.build.label} {arch_name(self.build, arch)}"


@dataclass(frozen=True)
class Unlisted:
    """Kernels that cannot be audited, which is never passed over in silence."""

    op: str
    backend: str
    label: str
    why: str


Owned = dict[tuple[str, str], dict[object, tuple[Build, Served]]]
"""By owner and backend: its kernels, each with whom it serves."""


@functools.cache
def everything() -> tuple[Job | Unlisted, ...]:
    """Every kernel of every operator. Asking all planners takes seconds, so this happens once per process.

    ValueError, which says what to install: a compiler is missing.
    """
    from samebits import catalogue
    from samebits.runtime import device

    for compiler in ("cuda", "triton"):
        if why := device.missing(compiler):
            raise ValueError(why)
    owned: Owned = {}
    failed: list[Unlisted] = []
    for lister in catalogue.names():
        for backend in catalogue.declared(lister).backends:
            if backend.name != "reference":
                failed += _collect(lister, backend.name, owned)
    jobs: list[Job | Unlisted] = [*failed]
    for (op, name), found in sorted(owned.items()):
        labels: set[str] = set()
        for build, served in found.values():
            if build.label in labels:
                why = "two kernels have this name: the lock cannot tell them apart"
                jobs.append(Unlisted(op, name, build.label, why))
                continue
            labels.add(build.label)
            jobs.append(Job(op, build, _limits(served), _names(op, served)))
    return tuple(jobs)


def jobs_of(ops: Iterable[str] | None = None) -> tuple[Job | Unlisted, ...]:
    """The kernels in the folders of these operators (None: all), and what of theirs cannot be listed. ValueError: unknown."""
    from samebits import catalogue

    chosen = None if ops is None else {catalogue.declared(op).name for op in ops}
    return tuple(job for job in everything() if chosen is None or job.op in chosen)


def work(listed: Iterable[Job | Unlisted], arches: Sequence[str]) -> list[tuple[Job, str]]:
    """What is compiled of ``listed`` for these architectures: each build for those where it is launched."""
    names = [(capability(arch), arch) for arch in arches]
    jobs = (job for job in listed if isinstance(job, Job))
    return [(job, arch) for job in jobs for number, arch in names if job.build.launched_on(number)]


def lenders(op: str) -> tuple[str, ...]:
    """The other operators whose kernels this one launches too."""
    return tuple(dict.fromkeys(j.op for j in everything() if isinstance(j, Job) and j.op != op and _serves(j, op)))


def _serves(job: Job, op: str) -> bool:
    return any(name.startswith(f"{op} ") for name in job.contracts)


def _collect(lister: str, backend: str, owned: Owned) -> list[Unlisted]:
    from samebits import catalogue

    whole = "(all kernels)"
    try:
        builds = catalogue.builds(lister, backend)
    except (ImportError, AttributeError) as error:
        return [Unlisted(lister, backend, whole, f"cannot list its kernels: {error}")]
    if not builds:
        return [Unlisted(lister, backend, whole, "lists no kernel, so nothing was audited")]
    failed: list[Unlisted] = []
    seen: set[tuple[str, str]] = set()
    for build in builds:
        if build.owner not in catalogue.names():
            failed.append(
                Unlisted(lister, backend, build.label, f"its source is in no operator's folder: {build.owner}")
            )
            continue
        if (build.owner, build.label) in seen:
            failed.append(Unlisted(lister, backend, build.label, "listed twice: the lock cannot tell them apart"))
            continue
        seen.add((build.owner, build.label))
        known = owned.setdefault((build.owner, build.backend), {})
        before, served = known.setdefault(build.kernel, (build, set()))
        served.update((lister, name) for name in build.contracts)
        known[build.kernel] = (replace(before, arches=_either(before, build)), served)
    return failed


def _either(one: Build, other: Build) -> tuple[int, ...]:
    """Where one of the two is launched."""
    return tuple(sorted({*one.arches, *other.arches})) if one.arches and other.arches else ()


def _limits(served: Served) -> Limits:
    from samebits import catalogue

    return of_contracts(catalogue.declared(op).contract(name) for op, name in sorted(served))


def _names(owner: str, served: Served) -> tuple[str, ...]:
    own = sorted(name for op, name in served if op == owner)
    return (*own, *(f"{op} {name}" for op, name in sorted(served) if op != owner))
