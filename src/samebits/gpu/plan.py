"""What a run of the GPU program does: everything that is not on record for the code as it is."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from samebits import catalogue, registry
from samebits.gpu import ledger, tested
from samebits.gpu.jobs import Job

PARTS = ("tests", "golden", "check", "accept", "model", "bench", "sanitizer")
SANITIZERS = ("memcheck", "racecheck", "initcheck")
MODEL_BENCHES = {
    "deepseek_v4": "deepseek_v4.boundary_bench",
    "minimax_h3": "minimax_h3.nodes_bench",
    "minimax_h3_block": "minimax_h3.block_bench",
}
SPANNING = (
    "accept/cuda",
    "accept/triton",
    *(f"{part}/{model}" for part in ("model", "bench") for model in MODEL_BENCHES),
)
"""What is not of one operator."""
OTHER_ROWS = (8192,)
WORKERS = 14
"""Of the tests, for each GPU."""
WATCHERS = 4
"""Processes of each memory checker: most of its time goes into one core each."""
SHARED = (("OMP_NUM_THREADS", "1"), ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"))
"""For processes side by side: threads of each on every core would wait for one another, and so would cached memory."""


@dataclass(frozen=True)
class Setup:
    """One run: where, on which operators, and what counts as done."""

    root: Path
    out: Path
    book: ledger.Ledger
    ops: tuple[str, ...]
    chosen: bool
    """Operators were named: only what belongs to them runs."""
    everything: bool
    """Do again what is on record."""

    @property
    def results(self) -> Path:
        return self.root / "benchmarks" / "results"

    def todo(self, part: str) -> list[str]:
        """The operators whose part is not on record."""
        done: Callable[[str], bool] = lambda op: self.book.has(f"{part}/{op}", ledger.of_operator(op))  # noqa: E731
        return [op for op in self.ops if self.everything or not done(op)]

    def lacks(self, key: str) -> bool:
        """Whether something that spans operators is not on record."""
        return self.everything or not self.book.has(key, ledger.of_everything())


def plan(setup: Setup, parts: Iterable[str] = PARTS) -> list[list[Job]]:
    """Groups in order; the jobs of one group run side by side. Benchmarks have the GPU for themselves."""
    chosen = set(parts)
    groups = [
        [*_tests(setup), *_by_operator(setup, "golden"), *_by_operator(setup, "check")],
        _spanning(setup),
        *([job] for job in _benches(setup)),
        _sanitizers(setup),
        *([job] for job in _other_sizes(setup)),
    ]
    kept = ([job for job in group if job.part in chosen] for group in groups)
    return [group for group in kept if group]


def _tests(setup: Setup) -> list[Job]:
    """Nothing is timed, and most of the time goes into launching small kernels: side by side costs no truth."""
    done = [] if setup.everything else tested.proven(setup.root, setup.book)
    (setup.out / tested.PROVEN).write_text(json.dumps(done))
    places = [path for path in tested.files(setup.root) if not setup.chosen or tested.operator_of(path) in setup.ops]
    if not places:
        return []
    line = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "-p", "gpu_record"]
    line += ["--proven", str(setup.out / tested.PROVEN), "--record", str(setup.out / tested.RECORD)]
    if importlib.util.find_spec("xdist"):
        line += ["-n", str(_workers()), "--dist", "loadgroup"]
    line += [str(path.relative_to(setup.root)) for path in places]
    return [Job("tests", "pytest -m gpu", tuple(line), least=60, most=540, settings=SHARED)]


def _workers() -> int:
    import torch

    return max(1, min(WORKERS * max(1, torch.cuda.device_count()), (os.cpu_count() or 2) - 2))


def _by_operator(setup: Setup, part: str) -> list[Job]:
    todo = setup.todo(part)
    if not todo:
        return []
    line = (sys.executable, "-m", "samebits.gpu", "--out", str(setup.out), "--part", part, "--ops", ",".join(todo))
    return [Job(part, part, line, least=60, most=540, settings=SHARED, watches=True)]


def _spanning(setup: Setup) -> list[Job]:
    """Acceptance of our providers, and a layer of the real model."""
    if setup.chosen:
        return []
    accept = (sys.executable, "-m", "samebits.cli", "accept", "deepseek-v4", "--device", "cuda", "--provider")
    layer = (sys.executable, "-m", "samebits.models.deepseek_v4", "--device", "cuda")
    replay = (sys.executable, "-m", "samebits.cli", "replay", "minimax-h3", "--backward", "--stage")
    lines = {
        "accept/cuda": (*accept, "cuda", "--write-golden"),
        "accept/triton": (*accept, "triton"),
        "model/deepseek_v4": (*layer, "--out", str(setup.results / "deepseek_v4_layer.json")),
        "model/minimax_h3": (*replay, "conditioning", "--json", str(setup.results / "minimax_h3_replay.json")),
        "model/minimax_h3_block": (*replay, "block", "--json", str(setup.results / "minimax_h3_block_replay.json")),
    }
    jobs = [Job(name.partition("/")[0], name, line, 60, 300, SHARED) for name, line in lines.items()]
    return [job for job in jobs if setup.lacks(job.name)]


def _benches(setup: Setup) -> list[Job]:
    jobs = []
    for op in setup.todo("bench"):
        out = str(setup.results / f"{op}.jsonl")
        line = (sys.executable, "-m", "samebits.cli", "bench", op, "--quick", "--out", out)
        jobs.append(Job("bench", f"bench/{op}", line, least=20, most=130, watches=True))
    for model, module in MODEL_BENCHES.items():
        if not setup.chosen and setup.lacks(f"bench/{model}"):
            program = (sys.executable, "-m", f"samebits.models.{module}")
            out = str(setup.results / f"{model}.jsonl")
            jobs.append(Job("bench", f"bench/{model}", (*program, "--out", out), least=60, most=130))
    return jobs


def _other_sizes(setup: Setup) -> list[Job]:
    """The tuned sizes that no target names, at a few rows: worth having, and the first thing to go when time is short."""
    from samebits.bench import targets

    jobs = []
    for op in setup.todo("bench"):
        if op in catalogue.of_sequences():
            continue
        spec = registry.spec(op)
        targeted = {size for target in targets.of(op) for size in target.sizes}
        for axis, tuned in spec.tuned:
            for size in sorted(set(tuned) - {value for key, value in targeted if key == axis}):
                rows = [part for count in OTHER_ROWS for part in ("--rows", str(count))]
                line = (sys.executable, "-m", "samebits.cli", "bench", op, *rows, "--size", f"{axis}={size}")
                out = ("--out", str(setup.results / f"{op}_{axis}{size}.jsonl"))
                jobs.append(Job("bench", f"bench/{op}/{axis}={size}", (*line, *out), least=1, most=40, watches=True))
    return jobs


def _sanitizers(setup: Setup) -> list[Job]:
    """Each memory checker over the operators it has not seen, in several rows; each operator in a process of its own."""
    jobs = []
    for tool in SANITIZERS:
        todo = setup.todo(tool)
        rows = [tuple(todo[k::WATCHERS]) for k in range(min(WATCHERS, len(todo)))]
        jobs += [sanitizer(tool, ops, setup.out, f" {k}" if k else "") for k, ops in enumerate(rows)]
    return jobs


def sanitizer(tool: str, ops: Sequence[str], out: Path, row: str = "") -> Job:
    found = sanitizer_path()
    line = (sys.executable, "-m", "samebits.gpu", "--out", str(out), "--part", tool, "--ops", ",".join(ops))
    missing = (
        "" if found else "compute-sanitizer is not installed: not on PATH, in CUDA_HOME/bin or in /usr/local/cuda/bin"
    )
    return Job("sanitizer", f"{tool}{row}", line, least=60, most=300, missing=missing, watches=True)


def sanitizer_path() -> str | None:
    folders = [os.environ.get(name, "") for name in ("CUDA_HOME", "CUDA_PATH")] + ["/usr/local/cuda"]
    places = [str(Path(folder) / "bin") for folder in folders if folder]
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=os.pathsep.join(places))
