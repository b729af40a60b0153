"""``python -m samebits.emulate OP``: emulate every CUDA kernel of an operator and compare its bits with the reference.

Exit code 0: the same bits everywhere; 1: a finding, which is printed; 2: wrong use, or no C++ compiler.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from samebits import registry
from samebits.cli import arguments as parsing
from samebits.cli.errors import UserError
from samebits.emulate import build, cases
from samebits.emulate.judge import findings
from samebits.verify.inputs import PATTERNS


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        reports = [_emulate(op, options) for op in options.ops or _operators()]
    except (UserError, build.NoCompiler) as error:
        print(f"samebits.emulate: {error}", file=sys.stderr)
        return 2
    if options.json:
        options.json.write_text(json.dumps(reports, indent=2) + "\n")
    return int(any(report["findings"] for report in reports))


def _operators() -> list[str]:
    return [name for name in registry.names() if _has_cuda(name)]


def _has_cuda(op: str) -> bool:
    return any(backend.name == "cuda" for backend in registry.spec(op).backends)


def _emulate(op: str, options: argparse.Namespace) -> dict[str, Any]:
    if op not in _operators():
        raise UserError(f"{op}: choose from {', '.join(_operators())}")
    spec = registry.spec(op)
    sizes, free = parsing.sizes(options.size), [axis for axis, _, _ in spec.size_limits]
    for axis in sizes:
        if axis not in free:
            raise UserError(
                f"--size {axis}={sizes[axis]}: the axes of {op} that have no fixed size are {', '.join(free)}"
            )
    rows = parsing.rows(options.rows) or cases.ROWS
    if 0 in rows:
        raise UserError("--rows 0: a call without rows launches no kernel")
    found = cases.chosen(cases.candidates(spec, rows, sizes, options.most))
    if not found:
        raise UserError(f"{op}: no call of that size with at most {options.most} of work; --most allows more")
    kernels = {kernel for case in found for kernel in case.kernels}
    started = time.perf_counter()
    build.prepare(kernels)
    compiled = time.perf_counter()
    wrong = []
    for case in found:
        for finding in findings(case, layout=options.layout, pattern=options.pattern):
            wrong.append(str(finding))
            print(finding, flush=True)
    ran = time.perf_counter() - compiled
    print(
        f"{op}: {len(kernels)} kernels in {len(found)} calls, {len(wrong)} findings "
        f"(compiled in {compiled - started:.1f} s, ran for {ran:.1f} s)",
        flush=True,
    )
    left_out = cases.gpu_only(spec)
    for entry in left_out:
        print(
            f"{op}: {entry} was NOT run: nothing here models its instructions, a GPU alone shows what it does",
            flush=True,
        )
    return {
        "op": op,
        "kernels": sorted(k.name for k in kernels),
        "calls": len(found),
        "not_emulated": list(left_out),
        "findings": wrong,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m samebits.emulate", description=__doc__)
    parser.add_argument("ops", nargs="*", metavar="OP", help="default: every operator that has CUDA kernels")
    parser.add_argument("--rows", type=int, action="append", default=[], help=f"repeatable; default {cases.ROWS}")
    parser.add_argument(
        "--size", action="append", default=[], metavar="AXIS=N", help="repeatable; default: those of the sweep"
    )
    parser.add_argument(
        "--most", type=int, default=cases.MOST, help="rows times elements of a call (default %(default)s)"
    )
    parser.add_argument("--layout", choices=tuple(cases.LAYOUTS), default="", help="of every input")
    parser.add_argument("--pattern", choices=PATTERNS, default="normal", help="of the values")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
