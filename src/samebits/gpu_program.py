"""Everything that needs a GPU, in one command: ``python3 -m samebits.gpu_program`` (``make gpu``), from a checkout.

Tests, checks, goldens, benchmarks and the memory checkers run one after another as processes of their own. A part that
fails or runs out of time is recorded and the others still run; the exit code says whether all of them passed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from samebits import environment

SECONDS = 570.0
SANITIZERS = ("memcheck", "racecheck", "initcheck")
BACKENDS = ("cuda", "triton", "reference")
REFERENCE_ROWS = 33
"""The reference runs thousands of small kernels per call; a short batch is enough to check it."""
OTHER_ROWS = (8192,)
TAIL = 15
ENDING = 12.0
"""Seconds before its limit at which a part that watches the clock begins nothing more."""


@dataclass(frozen=True)
class Job:
    """One process. ``least`` is the time that earlier parts must leave for it, ``most`` what it may take."""

    part: str
    name: str
    command: tuple[str, ...]
    least: float
    most: float
    settings: tuple[tuple[str, str], ...] = ()
    """Environment variables for it alone."""
    missing: str = ""
    """Why it cannot be started at all."""


@dataclass
class Outcome:
    part: str
    name: str
    verdict: str
    seconds: float
    detail: str = ""
    log: str = ""
    tail: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return self.verdict == "passed"


PARTS = ("tests", "check", "golden", "accept", "model", "bench", "sanitizer")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    root = environment.checkout()
    if root is None:
        print(
            "error: the GPU program runs from a checkout (it writes tests/golden and benchmarks/results)",
            file=sys.stderr,
        )
        return 2
    out = Path(options.out).resolve() if options.out else root / "build" / "gpu"
    out.mkdir(parents=True, exist_ok=True)
    from samebits import registry

    strange = sorted(set(options.ops) - set(registry.names()))
    if strange:
        print(f"error: --ops {strange[0]}: choose from {', '.join(registry.names())}", file=sys.stderr)
        return 2
    ops = tuple(options.ops) or registry.names()
    if options.sanitizer_target:
        return _sanitizer_target(options.device, ops)
    if options.part == "check":
        return _check_part(root, out, options.device, options.seconds, ops)
    if options.part == "golden":
        return _golden_part(root, out, options.device, ops)
    unknown = [name for name in options.only if name not in PARTS]
    if unknown:
        print(f"error: --only {unknown[0]}: choose from {', '.join(PARTS)}", file=sys.stderr)
        return 2
    if not _gpu_here():
        print("error: the GPU program needs an NVIDIA GPU that torch can use", file=sys.stderr)
        return 2
    asked = ([job for job in group if job.part in options.only] for group in plan(root, out, tuple(options.ops)))
    groups = [group for group in asked if group]
    started = time.monotonic()
    outcomes = run(groups, root, out, options.seconds)
    _copy_results(root, out)
    return _summarise(outcomes, out, time.monotonic() - started)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="samebits.gpu_program", description=__doc__)
    parser.add_argument(
        "--only", type=lambda text: text.split(","), default=list(PARTS), help=f"some of {','.join(PARTS)}"
    )
    parser.add_argument("--ops", type=lambda text: text.split(","), default=[], help="some operators (default all)")
    parser.add_argument("--out", help="folder for logs and copies of the results (default build/gpu)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time for everything together")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--part", choices=("check", "golden"), help=argparse.SUPPRESS)
    parser.add_argument(
        "--sanitizer-target", action="store_true", help="the launches that the memory checkers watch, nothing else"
    )
    return parser


def _gpu_here() -> bool:
    import torch

    return torch.cuda.is_available()


# --- what runs --------------------------------------------------------------------------------------------------------


def plan(root: Path, out: Path, ops: tuple[str, ...] = ()) -> list[list[Job]]:
    """Groups in order; the jobs of one group run side by side. Benchmarks have the GPU for themselves.

    ``ops``: only these operators, and of the tests only theirs; none named: everything.
    """
    from samebits import registry

    chosen = ("--ops", ",".join(ops)) if ops else ()
    here = (sys.executable, "-m", "samebits.gpu_program", "--out", str(out), *chosen)
    results = root / "benchmarks" / "results"
    folders = [str(path) for op in ops for path in sorted((root / "tests" / "ops").glob(f"test_{op}*.py"))] or ["tests"]
    tests = (sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "--durations=8", *folders)
    # Nothing here is timed, and most of the time goes into launching small kernels: side by side costs no truth.
    several = ("-n", "14", "--dist", "loadgroup") if importlib.util.find_spec("xdist") else ()
    groups = [
        [
            Job("tests", "pytest -m gpu", (*tests, *several), least=120, most=200),
            Job("check", "checks", (*here, "--part", "check"), least=120, most=200),
            Job("golden", "goldens", (*here, "--part", "golden"), least=120, most=200),
            *([] if ops else _model_jobs(results)),
        ]
    ]
    for name in ops or registry.names():
        line = (sys.executable, "-m", "samebits.cli", "bench", name, "--quick", "--out", str(results / f"{name}.jsonl"))
        groups.append([Job("bench", f"bench {name}", line, least=20, most=130)])
    if not ops:
        boundary = (sys.executable, "-m", "samebits.models.deepseek_v4.boundary_bench")
        groups.append(
            [Job("bench", "bench deepseek_v4", (*boundary, "--out", str(results / "deepseek_v4.jsonl")), 60, 130)]
        )
    groups.append([_sanitizer(tool, out, chosen) for tool in SANITIZERS])
    for name in ops or registry.names():
        groups += [[job] for job in _other_sizes(name, results)]
    return groups


def _model_jobs(results: Path) -> list[Job]:
    """What spans several operators: acceptance of our providers, and a layer of the real model."""
    accept = (sys.executable, "-m", "samebits.cli", "accept", "deepseek-v4", "--device", "cuda", "--provider")
    model = (sys.executable, "-m", "samebits.models.deepseek_v4", "--device", "cuda")
    return [
        Job("accept", "accept cuda", (*accept, "cuda", "--write-golden"), least=120, most=200),
        Job("accept", "accept triton", (*accept, "triton"), least=120, most=200),
        Job(
            "model",
            "model deepseek_v4",
            (*model, "--out", str(results / "deepseek_v4_layer.json")),
            least=120,
            most=200,
        ),
    ]


def _other_sizes(name: str, results: Path) -> list[Job]:
    """The tuned sizes that no target names, at a few rows: worth having, and the first thing to go when time is short."""
    from samebits import registry
    from samebits.bench import targets

    spec = registry.spec(name)
    targeted = {size for target in targets.of(name) for size in target.sizes}
    jobs = []
    for axis, tuned in spec.tuned:
        for size in sorted(set(tuned) - {value for key, value in targeted if key == axis}):
            rows = [part for count in OTHER_ROWS for part in ("--rows", str(count))]
            line = (sys.executable, "-m", "samebits.cli", "bench", name, *rows, "--size", f"{axis}={size}")
            out = ("--out", str(results / f"{name}_{axis}{size}.jsonl"))
            jobs.append(Job("bench", f"bench {name} {axis}={size}", (*line, *out), least=1, most=40))
    return jobs


def _sanitizer(tool: str, out: Path, chosen: tuple[str, ...]) -> Job:
    found = sanitizer_path()
    target = (sys.executable, "-m", "samebits.gpu_program", "--out", str(out), *chosen, "--sanitizer-target")
    options = ["--tool", tool, "--error-exitcode", "9", "--print-limit", "20", "--target-processes", "application-only"]
    if tool == "memcheck":  # the bindings look for functions of newer drivers, and not finding one is no error
        options += ["--report-api-errors", "no"]
    missing = (
        "" if found else "compute-sanitizer is not installed: not on PATH, in CUDA_HOME/bin or in /usr/local/cuda/bin"
    )
    # Without torch's cache every tensor is its own allocation, so one that is overrun has an end that can be seen.
    settings = (("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),)
    return Job("sanitizer", tool, (found or "compute-sanitizer", *options, *target), 60, 170, settings, missing)


def sanitizer_path() -> str | None:
    folders = [os.environ.get(name, "") for name in ("CUDA_HOME", "CUDA_PATH")] + ["/usr/local/cuda"]
    places = [str(Path(folder) / "bin") for folder in folders if folder]
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=os.pathsep.join(places))


# --- running ----------------------------------------------------------------------------------------------------------


def run(groups: Sequence[Sequence[Job]], root: Path, out: Path, seconds: float) -> list[Outcome]:
    """Each group in turn, within the time that is left when the least of every later group is set aside."""
    outcomes: list[Outcome] = []
    deadline = time.monotonic() + seconds
    for index, group in enumerate(groups):
        later = sum(max(job.least for job in rest) for rest in groups[index + 1 :])
        left = deadline - time.monotonic()
        limit = min(max(job.most for job in group), max(left - later, min(left, group[0].least)))
        if limit <= 1:
            outcomes += [Outcome(job.part, job.name, "not run", 0.0, "no time was left") for job in group]
            continue
        outcomes += _group(group, root, out, limit)
    return outcomes


@dataclass
class _Running:
    job: Job
    process: subprocess.Popen[bytes]
    log: Path
    started: float
    ended: float | None = None


def _group(group: Sequence[Job], root: Path, out: Path, limit: float) -> list[Outcome]:
    found: dict[str, Outcome] = {}
    running: list[_Running] = []
    for job in group:
        print(f"[gpu] {job.name} (at most {limit:.0f} s)", flush=True)
        if job.missing:
            found[job.name] = Outcome(job.part, job.name, "failed", 0.0, job.missing)
            continue
        try:
            running.append(_start(job, root, out, limit))
        except OSError as error:
            found[job.name] = Outcome(job.part, job.name, "failed", 0.0, f"could not be started: {error}")
    end = time.monotonic() + limit
    while any(member.ended is None for member in running):
        for member in running:
            if member.ended is None and member.process.poll() is not None:
                member.ended = time.monotonic()
        if time.monotonic() > end:
            break
        time.sleep(0.05)
    for member in running:
        found[member.job.name] = _finish(member, limit)
    for job in group:
        outcome = found[job.name]
        print(f"[gpu] {job.name}: {outcome.verdict} in {outcome.seconds:.1f} s  {outcome.detail}", flush=True)
    return [found[job.name] for job in group]


def _start(job: Job, root: Path, out: Path, limit: float) -> _Running:
    log = out / f"{''.join(c if c.isalnum() else '_' for c in job.name)}.log"
    settings = dict(os.environ) | dict(job.settings)
    source = str(root / "src")
    settings["PYTHONPATH"] = os.pathsep.join(p for p in (source, os.environ.get("PYTHONPATH", "")) if p)
    settings["PYTHONUNBUFFERED"] = "1"
    watches = "--part" in job.command or (job.part == "bench" and "samebits.cli" in job.command)
    command = [*job.command, *(("--seconds", f"{max(limit - ENDING, 1):.0f}") if watches else ())]
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, cwd=root, env=settings, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True
        )
    return _Running(job, process, log, time.monotonic())


def _finish(member: _Running, limit: float) -> Outcome:
    late = member.process.poll() is None
    if late:
        os.killpg(member.process.pid, signal.SIGKILL)
        member.process.wait()
    seconds = (member.ended or time.monotonic()) - member.started
    lines = [line for line in member.log.read_text(errors="replace").splitlines() if line.strip()]
    code = member.process.returncode
    verdict = "out of time" if late else ("passed" if code == 0 else "failed")
    last = lines[-1].strip()[:150] if lines else "(no output)"
    detail = (
        last
        if verdict == "passed"
        else (f"stopped after {limit:.0f} s; {last}" if late else f"exit code {code}; {last}")
    )
    tail = [] if verdict == "passed" else lines[-TAIL:]
    return Outcome(member.job.part, member.job.name, verdict, round(seconds, 1), detail, member.log.name, tail)


# --- parts that are ours ----------------------------------------------------------------------------------------------


def _check_part(root: Path, out: Path, device: str, seconds: float, ops: Sequence[str]) -> int:
    """Every operator, contract and backend. Written after each, so that what was found survives a time-out."""
    from samebits import registry, verify

    reports: list[dict[str, Any]] = []
    failed: list[str] = []
    started = time.monotonic()
    place = root / "benchmarks" / "results" / f"check_{_arch(device)}.json"
    for backend in BACKENDS:
        for name in ops:
            for contract in registry.spec(name).contracts:
                title = f"{name}/{contract.name}/{backend}"
                if (device == "cpu" and backend != "reference") or not registry.spec(name).keeps(
                    backend, contract.name
                ):
                    continue
                if time.monotonic() - started > seconds:
                    failed.append(f"{title}: not run, no time was left")
                    continue
                rows = REFERENCE_ROWS if backend == "reference" else None
                try:
                    report = verify.check(name, contract=contract.name, backend=backend, device=device, rows=rows)
                except Exception as error:  # recorded; the other candidates still get their turn
                    failed.append(f"{title}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
                    print(failed[-1], flush=True)
                    continue
                reports.append(report.to_json())
                bad = [c for c in report.checks if c.status in ("fail", "not run")]
                print(
                    f"{title}: {'passed' if report.passed else 'FAILED'} ({time.monotonic() - started:.0f} s)",
                    flush=True,
                )
                for check in bad:
                    failed.append(f"{title}: {check.name}: {check.summary}")
                    for failure in check.failures[:3]:
                        print(f"    {check.name}: {failure.result}, {failure.label}: {failure.what}", flush=True)
                    print(f"    {check.name}: {check.summary}", flush=True)
                _write_json(out / place.name, reports)
    if device != "cpu" and reports:
        _write_json(place, reports)
    return _end(failed, f"{len(reports)} candidates checked")


def _golden_part(root: Path, out: Path, device: str, ops: Sequence[str]) -> int:
    """Digests of this architecture, from every backend, which must agree with each other and with ``portable.json``.

    A digest that changed since the last record fails the part; the new file is written all the same, so the change is a diff.
    """
    from samebits.verify import goldens

    folder = root / "tests" / "golden"
    place = folder / f"{_arch(device)}.json"
    found: dict[str, dict[str, str]] = {}
    trouble: list[str] = []
    for backend in ("reference",) if device == "cpu" else BACKENDS:
        for name in ops:
            try:
                found.setdefault(backend, {}).update(goldens.compute(device, backend, [name]))
            except Exception as error:  # one broken backend must not hide what the others give
                trouble.append(f"{name}/{backend}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
    if not found:
        return _end(trouble, "no digests")
    first, digests = next(iter(found.items()))
    for backend, values in found.items():
        trouble += [f"{backend} differs from {first}: {key}" for key in values if values[key] != digests.get(key)]
    portable = _of_operators(json.loads((folder / "portable.json").read_text())["digests"], ops)
    here = {key: value for key, value in digests.items() if goldens.is_portable(key)}
    trouble += [f"not the portable bits: {line}" for line in goldens.differences(portable, here)]
    if place.exists():
        everything = json.loads(place.read_text())["digests"]
        stored = _of_operators(everything, ops)
        awaiting = goldens.AWAITING_GPU.get(place.stem, ())
        due = {key: value for key, value in digests.items() if key in stored or goldens.is_proven(key, place.stem)}
        trouble += [f"changed since the last record: {line}" for line in goldens.differences(stored, due, awaiting)]
        digests = {key: value for key, value in everything.items() if key not in stored} | digests
    content = {"backend": first, "device": device, "made_on": environment.collect().to_json(), "digests": digests}
    _write_json(out / place.name, content)
    if device != "cpu":
        _write_json(place, content)
    return _end(trouble, f"{len(digests)} digests, {', '.join(found)}")


def _of_operators(digests: dict[str, str], ops: Sequence[str]) -> dict[str, str]:
    return {key: value for key, value in digests.items() if key.split("/")[0] in ops}


def _sanitizer_target(device: str, ops: Sequence[str]) -> int:
    import torch

    from samebits.bench.exercise import exercise

    backends = ("reference",) if device == "cpu" else None
    for name in ops:
        print(f"{name}: {exercise(name, torch.device(device), backends)} calls", flush=True)
    return 0


def _arch(device: str) -> str:
    return "cpu" if device == "cpu" else environment.collect().arch


def _end(trouble: Sequence[str], done: str) -> int:
    for line in trouble:
        print(line)
    print(done + (f", {len(trouble)} FAILED" if trouble else ", all passed"))
    return 1 if trouble else 0


def _write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


# --- summary ----------------------------------------------------------------------------------------------------------


def _copy_results(root: Path, out: Path) -> None:
    """Everything that a commit should carry, laid out as in the checkout."""
    for folder, pattern in (("benchmarks/results", "*.json*"), ("tests/golden", "*.json")):
        for path in sorted((root / folder).glob(pattern)):
            target = out / "checkout" / folder / path.name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


def _targets_lines(root: Path) -> list[str]:
    from samebits.bench import results, targets

    lines: list[str] = []
    files = sorted((root / "benchmarks" / "results").glob("*.jsonl"))
    verdicts, unheard = targets.judge(results.read(files))
    for v in verdicts:
        word = {True: "met", False: "MISSED", None: "not measured"}[v.met]
        row = v.row
        value = "-" if v.value is None else f"{v.value:.3g}"
        grads = " fp32-grads" if "float32" in row["dtype"] else ""
        case = f"{row['op']} {row['direction']} T={row['shape']['T']} {row['contract']}{grads}"
        lines.append(
            f"{case:62} {v.target.text:34} {value:>7} {word:12} {row['us']:9.2f} us  {v.over_floor:.2f}x floor"
        )
    return lines + [f"no measured row: {text}" for text in unheard]


def _summarise(outcomes: Sequence[Outcome], out: Path, seconds: float) -> int:
    root = environment.checkout()
    assert root is not None
    for outcome in outcomes:
        if outcome.tail:
            print(f"--- {outcome.name}: end of {outcome.log}")
            print("\n".join(f"    {line[:220]}" for line in outcome.tail))
    if any(outcome.part == "bench" for outcome in outcomes):
        print("--- targets")
        print("\n".join(_attempt(lambda: _targets_lines(root))))
    print(f"--- GPU program, {seconds:.0f} s, commit {environment.collect().commit}, {environment.collect().gpu}")
    for outcome in outcomes:
        print(f"{outcome.verdict:12} {outcome.seconds:7.1f} s  {outcome.name:24} {outcome.detail[:110]}")
    failed = [outcome.name for outcome in outcomes if not outcome.passed]
    print(f"FAILED: {', '.join(failed)}" if failed else "all parts passed")
    _write_json(out / "summary.json", {"seconds": seconds, "parts": [asdict(o) for o in outcomes]})
    return 1 if failed else 0


def _attempt(read: Callable[[], list[str]]) -> list[str]:
    try:
        return read()
    except (OSError, ValueError) as error:
        return [f"cannot be judged: {error}"]


if __name__ == "__main__":
    sys.exit(main())
