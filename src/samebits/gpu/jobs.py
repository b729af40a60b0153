"""Run processes in groups, within a time that is shared out; one that fails or hangs does not stop the others."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

TAIL = 15
ENDING = 12.0
"""Seconds before its limit at which a job that watches the clock begins nothing more."""


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
    watches: bool = False
    """It takes ``--seconds``, and ends by itself when they are over."""


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
    command = [*job.command, *(("--seconds", f"{max(limit - ENDING, 1):.0f}") if job.watches else ())]
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
