"""The parts that go operator by operator, each noted as soon as it has passed: checks, golden digests, memory checkers."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from samebits import catalogue, environment
from samebits.gpu import ledger
from samebits.gpu.plan import SANITIZERS, sanitizer_path

BACKENDS = ("cuda", "triton", "reference")
REFERENCE_ROWS = 33
"""The reference runs thousands of small kernels per call; a short batch is enough to check it."""
Part = Callable[[Path, Path, str, str, float], Iterator[str]]
"""(checkout, output folder, device, operator, when to stop on the monotonic clock) -> what went wrong, line by line."""


def run(part: str, root: Path, out: Path, device: str, ops: Sequence[str], seconds: float) -> int:
    """A part for each operator. Exit code 1 if anything failed or was left for another run."""
    deadline = time.monotonic() + seconds
    parts: dict[str, Part] = {"check": check, "golden": golden} | dict.fromkeys(SANITIZERS, _watched(part))
    trouble: list[str] = []
    for op in ops:
        if time.monotonic() > deadline:
            trouble.append(f"{part}/{op}: not run, no time was left")
            print(trouble[-1], flush=True)
            continue
        started = time.monotonic()
        found = [f"{part}/{op}: {line}" for line in parts[part](root, out, device, op, deadline)]
        for line in found:
            print(line, flush=True)
        if not found:
            ledger.note(out, entry(f"{part}/{op}", ledger.of_operator(op)))
        print(f"{part}/{op}: {'passed' if not found else 'FAILED'} in {time.monotonic() - started:.0f} s", flush=True)
        trouble += found
    print(f"{len(ops)} operators" + (f", {len(trouble)} FAILED" if trouble else ", all passed"))
    return 1 if trouble else 0


def entry(key: str, fingerprint: str, tests: int = 1) -> ledger.Entry:
    here = environment.collect()
    return ledger.Entry(key, fingerprint, tests, here.commit, here.gpu, here.torch)


def check(root: Path, out: Path, device: str, op: str, deadline: float) -> Iterator[str]:
    """``samebits check`` of every contract and backend; the reports of all operators are one file."""
    from samebits import verify
    from samebits.verify.quick import quick_folds

    place = root / "benchmarks" / "results" / f"check_{arch(device)}.json"
    for backend in ("reference",) if device == "cpu" else BACKENDS:
        for contract in catalogue.declared(op).contracts:
            title = f"{op}/{contract.name}/{backend}"
            if not catalogue.declared(op).keeps(backend, contract.name):
                continue
            if time.monotonic() > deadline:
                yield f"{contract.name}/{backend}: not run, no time was left"
                continue
            defined = backend == "reference"
            try:
                with contextlib.nullcontext() if defined else quick_folds():
                    rows = REFERENCE_ROWS if defined else None
                    report = verify.check(op, contract=contract.name, backend=backend, device=device, rows=rows)
            except Exception as error:  # recorded; the other candidates still get their turn
                yield f"{contract.name}/{backend}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
                continue
            for one in report.checks:
                if one.status in ("fail", "not run"):
                    yield f"{contract.name}/{backend}: {one.name}: {one.summary}"
                    yield from (f"    {f.result}, {f.label}: {f.what}" for f in one.failures[:3])
            _replace(out / place.name, title, report.to_json())
            if device != "cpu":
                _replace(place, title, report.to_json())


def golden(root: Path, out: Path, device: str, op: str, deadline: float) -> Iterator[str]:
    """Digests of this architecture, from every backend, which must agree with each other and with ``portable.json``.

    A digest that changed since the last record fails the part; the new file is written all the same, so the change is a diff.
    """
    from samebits.verify import goldens

    folder = root / "tests" / "golden"
    place = folder / f"{arch(device)}.json"
    found: dict[str, dict[str, str]] = {}
    for backend in ("reference",) if device == "cpu" else BACKENDS:
        try:
            found[backend] = goldens.compute(device, backend, [op])
        except Exception as error:  # one broken backend must not hide what the others give
            yield f"{backend}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if not found:
        return
    first, digests = next(iter(found.items()))
    for backend, values in found.items():
        yield from (f"{backend} differs from {first}: {key}" for key in values if values[key] != digests.get(key))
    portable = _of(json.loads((folder / "portable.json").read_text())["digests"], op)
    here = {key: value for key, value in digests.items() if goldens.is_portable(key)}
    yield from (f"not the portable bits: {line}" for line in goldens.differences(portable, here))
    everything: dict[str, str] = {}
    if place.exists():
        everything = json.loads(place.read_text())["digests"]
        stored = _of(everything, op)
        again = {key: value for key, value in digests.items() if key in stored}
        yield from (f"changed since the last record: {line}" for line in goldens.differences(stored, again))
    kept = {key: value for key, value in everything.items() if key.split("/")[0] != op}
    content = {
        "backend": first,
        "device": device,
        "made_on": environment.collect().to_json(),
        "digests": kept | digests,
    }
    write_json(out / place.name, content)
    if device != "cpu":
        write_json(place, content)


def _watched(tool: str) -> Part:
    """The launches of an operator under a memory checker."""

    def part(root: Path, out: Path, device: str, op: str, deadline: float) -> Iterator[str]:
        command = [*watcher(tool), sys.executable, "-m", "samebits.gpu", "--out", str(out), "--exercise", op]
        command += ["--no-long-rows"] * (tool == "racecheck")
        # Without torch's cache every tensor is its own allocation, so one that is overrun has an end that can be seen.
        settings = dict(os.environ) | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        left = max(deadline - time.monotonic(), 1)
        try:
            done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=left, cwd=root)
        except subprocess.TimeoutExpired:
            yield f"stopped after {left:.0f} s, no time was left"
            return
        if done.returncode:
            lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
            yield f"exit code {done.returncode}"
            yield from lines[-40:]

    return part


def watcher(tool: str) -> list[str]:
    """The command line of a memory checker, up to what it watches."""
    options = ["--tool", tool, "--error-exitcode", "9", "--print-limit", "20", "--target-processes", "application-only"]
    if tool == "memcheck":  # the bindings look for functions of newer drivers, and not finding one is no error
        options += ["--report-api-errors", "no"]
    return [sanitizer_path() or "compute-sanitizer", *options]


def arch(device: str) -> str:
    return "cpu" if device == "cpu" else environment.collect().arch


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


def _of(digests: dict[str, str], op: str) -> dict[str, str]:
    return {key: value for key, value in digests.items() if key.split("/")[0] == op}


def _replace(place: Path, title: str, report: dict[str, Any]) -> None:
    """Put a report in the place of the last one of the same candidate."""
    stored = json.loads(place.read_text()) if place.exists() else []
    kept = [old for old in stored if _title(old) != title]
    write_json(place, sorted([*kept, report], key=_title))


def _title(report: dict[str, Any]) -> str:
    given = report["options"]
    return f"{report['candidate']}/{given['contract']}/{given['backend']}"
