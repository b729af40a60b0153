"""``python3 -m samebits.gpu``: run what is not on record, and record what passed."""

from __future__ import annotations

import argparse
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from samebits import catalogue, environment
from samebits.gpu import jobs, ledger, parts, tested
from samebits.gpu.jobs import Outcome
from samebits.gpu.plan import PARTS, SANITIZERS, SPANNING, Setup, plan

SECONDS = 570.0
RECORDS = "records.tar.gz"
"""Everything that a commit should carry, laid out as in the checkout."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    root = environment.checkout()
    if root is None:
        return _refuse("the GPU program runs from a checkout: it writes tests/golden and benchmarks/results")
    for given, known, name in ((options.ops, catalogue.names(), "--ops"), (options.only, PARTS, "--only")):
        for word in given:
            if word not in known:
                return _refuse(f"{name} {word}: choose from {', '.join(known)}")
    out = Path(options.out).resolve() if options.out else root / "build" / "gpu"
    out.mkdir(parents=True, exist_ok=True)
    ops = tuple(options.ops) or catalogue.names()
    if options.exercise:
        from samebits.bench.exercise import exercise_on

        return exercise_on(options.exercise, options.device, not options.no_long_rows)
    if options.part:
        return parts.run(options.part, root, out, options.device, ops, options.seconds)
    book = ledger.Ledger(root / "tests" / "golden" / f"gpu.{options.arch or environment.collect().arch}.json")
    setup = Setup(root, out, book, ops, bool(options.ops), options.all)
    if options.merge:
        return _end(setup, [], 0.0)
    if not options.list and not _gpu_here():
        return _refuse("the GPU program needs an NVIDIA GPU that torch can use")
    groups = plan(setup, options.only or PARTS)
    if options.list:
        print("\n".join(_left(setup)) or "everything is on record for this code")
        return 0
    for name in (ledger.LOG, tested.RECORD):
        (out / name).unlink(missing_ok=True)
    started = time.monotonic()
    outcomes = jobs.run(groups, root, out, options.seconds)
    return _end(setup, outcomes, time.monotonic() - started)


def _parser() -> argparse.ArgumentParser:
    def words(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(prog="samebits.gpu", description=__doc__)
    parser.add_argument("--only", type=words, default=[], help=f"some of {','.join(PARTS)}")
    parser.add_argument("--ops", type=words, default=[], help="some operators (default all, and what spans operators)")
    parser.add_argument("--out", help="folder for logs and records (default build/gpu)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time for everything together")
    parser.add_argument("--all", action="store_true", help="do again what is on record")
    parser.add_argument("--list", action="store_true", help="say what is not on record, and do nothing; needs no GPU")
    parser.add_argument("--merge", action="store_true", help="record what a stopped run left in --out; needs no GPU")
    parser.add_argument("--arch", help="with --list or --merge: whose record, e.g. sm_90")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--part", choices=("check", "golden", *SANITIZERS), help=argparse.SUPPRESS)
    parser.add_argument("--exercise", metavar="OP", help="the launches that the memory checkers watch, nothing else")
    parser.add_argument("--no-long-rows", action="store_true", help="with --exercise: leave very long rows out")
    return parser


def _refuse(why: str) -> int:
    print(f"error: {why}", file=sys.stderr)
    return 2


def _gpu_here() -> bool:
    import torch

    return torch.cuda.is_available()


def _end(setup: Setup, outcomes: Sequence[Outcome], seconds: float) -> int:
    """Record what passed, say what did not and what is left, and pack what a commit should carry."""
    _record(setup, outcomes)
    failed_tests = tested.failures(setup.out / tested.RECORD)
    for outcome in outcomes:
        if outcome.tail and not (outcome.part == "tests" and failed_tests):
            print(f"--- {outcome.name}: end of {outcome.log}")
            print("\n".join(f"    {line[:220]}" for line in outcome.tail))
    if failed_tests:
        print(f"--- {len(failed_tests)} tests failed")
        print("\n".join(f"    {line}" for line in failed_tests[:40]))
    if any(outcome.part == "bench" for outcome in outcomes):
        print("--- targets")
        print("\n".join(_attempt(lambda: _targets_lines(setup.results))))
    _pack(setup)
    print(f"--- GPU program, {seconds:.0f} s, commit {environment.collect().commit}, {environment.collect().gpu}")
    for outcome in outcomes:
        print(f"{outcome.verdict:12} {outcome.seconds:7.1f} s  {outcome.name:24} {outcome.detail[:110]}")
    left = _left(setup)
    print("--- left for another run\n" + "\n".join(left) if left else "--- everything is on record for this code")
    content = {"seconds": seconds, "parts": [asdict(o) for o in outcomes], "failed_tests": failed_tests, "left": left}
    parts.write_json(setup.out / "summary.json", content)
    return 1 if failed_tests or any(not outcome.passed for outcome in outcomes) else 0


def _record(setup: Setup, outcomes: Sequence[Outcome]) -> None:
    found = ledger.noted(setup.out)
    record = setup.out / tested.RECORD
    found += [
        replace(parts.entry(key, tested.fingerprint(setup.root, key), count), **tested.where(record))
        for key, count in tested.passed(record).items()
    ]
    for outcome in outcomes:
        if outcome.passed and outcome.part in ("accept", "model", "bench"):
            op = outcome.name.split("/")[1]
            known = outcome.part == "bench" and op in catalogue.names()
            found.append(parts.entry(outcome.name, ledger.of_operator(op) if known else ledger.of_everything()))
    print(f"--- {setup.book.record(found)} entries recorded")


def _left(setup: Setup) -> list[str]:
    """What is not on record for the code as it is, in words."""
    lines = []
    for part in ("golden", "check", "bench", *SANITIZERS):
        todo = setup.todo(part)
        if todo:
            lines.append(f"{part}: {', '.join(todo)}")
    lines += [f"tests: {name}" for name in tested.left(setup.root, setup.out, setup.book)]
    lines += [key for key in SPANNING if setup.lacks(key)]
    return lines


def _pack(setup: Setup) -> None:
    with tarfile.open(setup.out / RECORDS, "w:gz") as archive:
        for folder, pattern in (("benchmarks/results", "*.json*"), ("tests/golden", "*.json")):
            for path in sorted((setup.root / folder).glob(pattern)):
                archive.add(path, f"{folder}/{path.name}")


def _targets_lines(results: Path) -> list[str]:
    from samebits.bench import results as rows
    from samebits.bench import targets

    lines: list[str] = []
    verdicts, unheard = targets.judge(rows.read(sorted(results.glob("*.jsonl"))))
    for v in verdicts:
        word = {True: "met", False: "MISSED", None: "not measured"}[v.met]
        row = v.row
        value = "-" if v.value is None else f"{v.value:.3g}"
        grads = " fp32-grads" if rows.has_fp32_gradients(row) else ""
        case = f"{row['op']} {row['direction']} T={row['shape']['T']} {row['contract']}{grads}"
        lines.append(
            f"{case:62} {v.target.text:34} {value:>7} {word:12} {row['us']:9.2f} us  {v.over_floor:.2f}x floor"
        )
    return lines + [f"no measured row: {text}" for text in unheard]


def _attempt(read: Callable[[], list[str]]) -> list[str]:
    try:
        return read()
    except (OSError, ValueError) as error:
        return [f"cannot be judged: {error}"]


if __name__ == "__main__":
    sys.exit(main())
