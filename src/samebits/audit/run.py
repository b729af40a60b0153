"""Run an audit: of our operators, or of foreign files. Everything asked for is in the result, read or not."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from samebits.audit import compile as compiling
from samebits.audit import judge, sass, targets
from samebits.audit.code import AuditError, Function, Module, Resources
from samebits.audit.compilers import compilers
from samebits.audit.fingerprint import fingerprint
from samebits.audit.limits import Limits
from samebits.audit.listing import Job, Unlisted, jobs_of, work
from samebits.audit.rules import Finding

WORKERS = os.cpu_count() or 1
PROCESSES_FROM = 100
"""Compilations that are worth the seconds which starting processes takes; fewer run in threads."""

Progress = Callable[[int, int, str], None]
"""Called with (done, all, what)."""


@dataclass(frozen=True)
class Report:
    """The audit of one build for one architecture, or of one foreign file."""

    label: str
    arch: str
    sources: tuple[str, ...]
    """What was judged: ``ptx``, ``sass`` or both."""
    findings: tuple[Finding, ...]
    op: str = ""
    backend: str = ""
    contracts: tuple[str, ...] = ()
    resources: Resources | None = None
    opcodes: tuple[tuple[str, int], ...] = ()
    """Histogram of the SASS; for a foreign file over all of its functions."""
    fingerprint: str = ""
    """Of what was compiled, see :mod:`samebits.audit.fingerprint`; empty for foreign files and where nothing came out."""

    @property
    def clean(self) -> bool:
        return not self.findings

    @property
    def verdict(self) -> str:
        """``clean``, or the worst of the findings: error, fail, suspect."""
        found = {finding.verdict for finding in self.findings}
        return next((v for v in ("error", "fail", "suspect") if v in found), "clean")

    @property
    def key(self) -> str:
        """Unique among our builds, and the name in the lock."""
        return f"{self.op}/{self.backend}/{self.label} {self.arch}"

    def to_json(self) -> dict[str, Any]:
        return {
            "op": self.op,
            "backend": self.backend,
            "kernel": self.label,
            "arch": self.arch,
            "contracts": list(self.contracts),
            "sources": list(self.sources),
            "verdict": self.verdict,
            "resources": asdict(self.resources) if self.resources else None,
            "opcodes": dict(self.opcodes),
            "findings": [finding.to_json() for finding in self.findings],
        }


@dataclass(frozen=True)
class Result:
    reports: tuple[Report, ...]
    compilers: tuple[tuple[str, str], ...] = ()
    """Versions of the compilers that built our kernels; empty for foreign files."""

    @property
    def clean(self) -> bool:
        return all(report.clean for report in self.reports)

    def to_json(self) -> dict[str, Any]:
        return {
            "clean": self.clean,
            "compilers": dict(self.compilers),
            "reports": [report.to_json() for report in self.reports],
        }


def audit_operators(
    ops: Iterable[str] | None = None, arches: Iterable[str] = compiling.ARCHES, progress: Progress | None = None
) -> Result:
    """Compile and judge every kernel of the named operators (all by default). ValueError: unknown name or arch."""
    numbers = [f"sm_{compiling.capability(arch)}" for arch in arches]
    listed = jobs_of(ops)
    failed = [job for job in listed if isinstance(job, Unlisted)]
    return audit_work(work(listed, numbers), failed, progress)


def audit_jobs(listed: Iterable[Job], arches: Iterable[str] = compiling.ARCHES) -> Result:
    """As :func:`audit_operators`, of builds given by hand."""
    return audit_work(work(listed, [f"sm_{compiling.capability(arch)}" for arch in arches]))


def audit_work(
    todo: Sequence[tuple[Job, str]], failed: Iterable[Unlisted] = (), progress: Progress | None = None
) -> Result:
    """Compile and judge each build for its architecture, on all cores."""
    from samebits.audit.pool import in_processes

    reports = [_failed(f.op, f.backend, f.label, "", f.why) for f in failed]
    many = WORKERS > 1 and len(todo) >= PROCESSES_FROM
    results = in_processes(todo, WORKERS) if many else _in_threads(todo)
    for done, ((job, arch), report) in enumerate(zip(todo, results, strict=True), 1):
        reports.append(report)
        if progress:
            progress(done, len(todo), f"{job.op} {job.build.backend} {arch}")
    return Result(tuple(reports), tuple(sorted(compilers().items())))


def _in_threads(todo: Sequence[tuple[Job, str]]) -> Iterator[Report]:
    """Triton compiles in this thread, as its own caches expect; NVRTC and the disassembler run in the pool."""
    with ThreadPoolExecutor(WORKERS) as pool:
        futures = [pool.submit(audit_build, job, arch) if job.build.backend == "cuda" else None for job, arch in todo]
        for (job, arch), future in zip(todo, futures, strict=True):
            yield future.result() if future is not None else audit_build(job, arch)


def audit_path(path: Path, limits: Limits, progress: Progress | None = None) -> Result:
    """Judge a foreign cubin, PTX file or folder. ValueError if there is no code to judge."""
    found = targets.find(path)
    reports = []
    with ThreadPoolExecutor(WORKERS) as pool:
        for done, report in enumerate(pool.map(lambda target: _audit_target(target, limits), found), 1):
            reports.append(report)
            if progress:
                progress(done, len(found), report.label)
    return Result(tuple(reports))


def audit_build(job: Job, arch: str) -> Report:
    """Compile and judge one build; what fails is in the report."""
    build = job.build
    name, contracts = compiling.arch_name(build, arch), job.contracts or build.contracts
    try:
        before = fingerprint(job, arch)  # a source that changes meanwhile must not vouch for the older code
        read = compiling.read(compiling.compile_build(build, arch))
        kernel = read.kernel
    except AuditError as error:
        return _failed(job.op, build.backend, build.label, name, str(error), contracts)
    return Report(
        label=build.label,
        arch=name,
        sources=("ptx", "sass"),
        findings=judge.judge(read.ptx, read.sass, job.limits),
        op=job.op,
        backend=build.backend,
        contracts=contracts,
        resources=kernel.resources,
        opcodes=tuple(sass.histogram(kernel).items()),
        fingerprint=before,
    )


def _audit_target(target: targets.Target, limits: Limits) -> Report:
    try:
        text, code = target.read()
    except AuditError as error:
        return _failed("", "", target.label, "", str(error))
    kernels = [f for f in (code.functions if code else ()) if f.entry]
    return Report(
        label=target.label,
        arch=(code or text or Module("", ())).arch,
        sources=tuple(_sources(text, code)),
        findings=judge.judge(text, code, limits),
        resources=kernels[0].resources if len(kernels) == 1 else None,
        opcodes=_all_opcodes(code.functions if code else ()),
    )


def _sources(text: Module | None, code: Module | None) -> Iterator[str]:
    if text is not None:
        yield "ptx"
    if code is not None:
        yield "sass"


def _all_opcodes(functions: Iterable[Function]) -> tuple[tuple[str, int], ...]:
    total: dict[str, int] = {}
    for function in functions:
        for opcode, count in sass.histogram(function).items():
            total[opcode] = total.get(opcode, 0) + count
    return tuple(sorted(total.items()))


def _failed(op: str, backend: str, label: str, arch: str, message: str, contracts: tuple[str, ...] = ()) -> Report:
    finding = Finding("unreadable", "error", "", "file", 1, (message,))
    return Report(label, arch, (), (finding,), op, backend, contracts)
