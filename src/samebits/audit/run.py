"""Run an audit: of our operators, or of foreign files. Everything asked for is in the result, read or not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from samebits.audit import compile as compiling
from samebits.audit import judge, sass, targets
from samebits.audit.build import Build
from samebits.audit.code import AuditError, Function, Module, Resources
from samebits.audit.limits import Limits, of_contracts
from samebits.audit.rules import Finding
from samebits.runtime import nvrtc

WORKERS = 2

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


@dataclass(frozen=True)
class Job:
    """One build with its operator's name and what its contracts allow."""

    op: str
    build: Build
    limits: Limits


def jobs_of(op: str) -> tuple[Job | Report, ...]:
    """Every build of an operator's compiled backends; a backend that cannot be loaded is a report with an error."""
    from samebits import registry

    operator = registry.operator(op)
    jobs: list[Job | Report] = []
    for backend in operator.spec.backends:
        if backend.name == "reference":
            continue
        try:
            builds: tuple[Build, ...] = operator.backend(backend.name).builds()
        except (ImportError, AttributeError) as error:
            jobs.append(_failed(op, backend.name, "(all kernels)", "", f"cannot list its kernels: {error}"))
            continue
        if not builds:
            jobs.append(_failed(op, backend.name, "(all kernels)", "", "lists no kernel, so nothing was audited"))
        seen: set[str] = set()
        for build in builds:
            if build.label in seen:
                jobs.append(_failed(op, backend.name, build.label, "", "listed twice: the lock cannot tell them apart"))
                continue
            seen.add(build.label)
            limits = of_contracts(operator.spec.contract(name) for name in build.contracts)
            jobs.append(Job(op, build, limits))
    return tuple(jobs)


def audit_operators(
    ops: Iterable[str] | None = None, arches: Iterable[str] = compiling.ARCHES, progress: Progress | None = None
) -> Result:
    """Compile and judge every kernel of the named operators (all by default). ValueError: unknown name or arch."""
    from samebits import registry

    listed = [job for op in (registry.names() if ops is None else ops) for job in jobs_of(op)]
    return audit_jobs(listed, arches, progress)


def audit_jobs(
    listed: Iterable[Job | Report], arches: Iterable[str] = compiling.ARCHES, progress: Progress | None = None
) -> Result:
    """As :func:`audit_operators`, of builds given by hand."""
    numbers = [compiling.capability(arch) for arch in arches]
    failed = [job for job in listed if isinstance(job, Report)]
    work = [(job, f"sm_{number}") for job in listed if isinstance(job, Job) for number in numbers]
    reports = [*failed]
    # Triton compiles in this thread, as its own caches expect; NVRTC and the disassembler run in the pool.
    with ThreadPoolExecutor(WORKERS) as pool:
        futures: list[Future[Report]] = []
        for job, arch in work:
            if job.build.backend == "triton":
                _quietly(job.build, arch)
            futures.append(pool.submit(_audit_build, job, arch))
        for done, ((job, arch), future) in enumerate(zip(work, futures, strict=True), 1):
            reports.append(future.result())
            if progress:
                progress(done, len(work), f"{job.op} {job.build.backend} {arch}")
    return Result(tuple(reports), tuple(sorted(compilers().items())))


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


def compilers() -> dict[str, str]:
    """The versions that decide the machine code of our kernels."""
    from importlib import metadata

    versions = {"nvrtc": nvrtc.version()}
    for key, packages in {"nvrtc": ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"), "triton": ("triton",)}.items():
        for package in packages:
            try:
                exact = metadata.version(package)
            except metadata.PackageNotFoundError:
                continue
            if key != "nvrtc" or exact.startswith(versions["nvrtc"]):
                versions[key] = exact
    return versions


def _quietly(build: Build, arch: str) -> None:
    with contextlib.suppress(AuditError):  # the worker meets the same error and reports it
        compiling.compile_build(build, arch)


def _audit_build(job: Job, arch: str) -> Report:
    build = job.build
    name = compiling.arch_name(build, arch)
    try:
        read = compiling.read(compiling.compile_build(build, arch))
        kernel = read.kernel
    except AuditError as error:
        return _failed(job.op, build.backend, build.label, name, str(error), build.contracts)
    return Report(
        label=build.label,
        arch=name,
        sources=("ptx", "sass"),
        findings=judge.judge(read.ptx, read.sass, job.limits),
        op=job.op,
        backend=build.backend,
        contracts=build.contracts,
        resources=kernel.resources,
        opcodes=tuple(sass.histogram(kernel).items()),
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
