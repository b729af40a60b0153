"""Digests of results, committed: a bit that changes shows as a diff.

``portable.json`` holds what every machine must give (the CPU reference computes it); ``sm_90.json`` and the like hold
all results of one GPU architecture, and their portable part must equal ``portable.json``. Inputs come from the integer
generator. Tensors that a forward saved for the backward (``rstd``) are drawn here instead of computed, so that the
backward is portable where only the forward uses a device function. NaNs are made canonical before hashing.

    python -m samebits.verify.goldens write tests/golden/sm_90.json --device cuda --backend cuda
    python -m samebits.verify.goldens compare tests/golden/sm_90.json
    python -m samebits.verify.goldens compare tests/golden/sm_90.json --device cpu   # the GPU's bits on a laptop
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samebits import catalogue, registry
from samebits.checks import DTYPES
from samebits.contract import OpSpec, Pass, TensorArg
from samebits.exact.bits import canonical_nan, digest
from samebits.exact.elementary import bits_of
from samebits.verify import inputs
from samebits.verify.operators import derived, draw, stream_name
from samebits.verify.report import environment

AWAITING_GPU: dict[str, tuple[str, ...]] = {}
"""Cases that are newer than the record of an architecture. Its file may lack the digests of these cases and no
others; those it has must agree. The next run of the GPU program records them, and then the entry has to go."""


@dataclass(frozen=True)
class Case:
    """Inputs by name. ``sizes`` are those of the free axes."""

    name: str
    rows: int
    sizes: tuple[tuple[str, int], ...]
    pattern: str = "normal"
    seed: int = 0
    second_dtypes: bool = False
    """Inputs that take several dtypes get their last one."""
    grad_dtype: str = "float32"
    started: bool = False
    """The folds over rows start from drawn values instead of zeros."""


def standard_cases(axis: str) -> tuple[Case, ...]:
    """Cases for an operator with one free axis: common widths, odd ones, and every value pattern."""
    return (
        Case("t16_128", 16, ((axis, 128),)),
        Case("t7_17", 7, ((axis, 17),)),
        Case("t2_1", 2, ((axis, 1),)),
        Case("t1_4096", 1, ((axis, 4096),)),
        Case("t3_7168", 3, ((axis, 7168),)),
        Case("t33_136_other_seed", 33, ((axis, 136),), seed=1),
        Case("t16_128_second_dtypes", 16, ((axis, 128),), second_dtypes=True),
        Case("t16_128_bfloat16_gradients", 16, ((axis, 128),), grad_dtype="bfloat16"),
        Case("t16_128_started", 16, ((axis, 128),), started=True),
        *(Case(f"t6_1000_{p}", 6, ((axis, 1000),), pattern=p) for p in inputs.PATTERNS if p != "normal"),
        # One row, because ordinary rows beside it would hide subnormals in a gradient that sums over rows.
        Case("t1_1000_tiny", 1, ((axis, 1000),), pattern="tiny"),
    )


def compute(
    device: str, backend: str | None, only: Sequence[str] = (), architecture: str | None = None
) -> dict[str, str]:
    """``{"op/contract/direction/case/result": digest}`` of the named operators (default all).

    On a CPU: the portable ones, or with ``architecture`` all, as a GPU of that architecture gives them.
    """
    if architecture is not None:
        with bits_of(architecture):
            return _compute(device, backend, only, whole=True)
    return _compute(device, backend, only, whole=device != "cpu")


def _compute(device: str, backend: str | None, only: Sequence[str], whole: bool) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in only or catalogue.names():
        declared = catalogue.declared(name)
        for contract in declared.contracts:
            if backend is not None and not declared.keeps(backend, contract.name):
                continue
            for key, value in _digested(name, contract.name, device, backend, whole):
                if whole or is_portable(key):
                    found[key] = digest(canonical_nan(value))
    return found


def _digested(name: str, contract: str, device: str, backend: str | None, whole: bool) -> Iterator[tuple[str, Tensor]]:
    """Every result of every case of an operator, by its key."""
    cases = catalogue.part(name, "cases")
    if name in catalogue.of_sequences():
        if not whole and not _portable_results(name):
            return  # minutes of work for nothing
        for direction, case, result, value in cases.results(contract, torch.device(device), backend):
            yield f"{name}/{contract}/{direction}/{case}/{result}", value
        return
    for one in cases.CASES:
        yield from _results(name, contract, one, device, backend)


def is_portable(key: str) -> bool:
    """Whether every machine must agree: by the contract's class, or because the operator's cases say so of this result."""
    name, contract, _, _, result = key.split("/")
    return catalogue.declared(name).contract(contract).exactness == "portable" or result in _portable_results(name)


def _portable_results(name: str) -> tuple[str, ...]:
    """Those which every machine gives although the contract as a whole is of one architecture."""
    found: tuple[str, ...] = getattr(catalogue.part(name, "cases"), "PORTABLE", ())
    return found


def _results(name: str, contract: str, case: Case, device: str, backend: str | None) -> Iterator[tuple[str, Tensor]]:
    op = registry.operator(name)
    scalars: dict[str, Any] = {s.name: s.default for s in op.spec.scalars}
    tensors = _inputs(op.spec, contract, op.spec.forward, case, device)
    forward = op.forward(*tensors, contract=contract, backend=backend, **scalars)
    upstream = _inputs(op.spec, contract, op.spec.backward, case, device)
    backward = op.backward(*upstream, contract=contract, backend=backend, grad_dtype=DTYPES[case.grad_dtype], **scalars)
    for direction, declared, values in (
        ("forward", op.spec.forward.results, forward),
        ("backward", op.spec.backward.results, backward),
    ):
        for result, value in zip(declared, values, strict=True):
            if value is not None:
                yield f"{name}/{contract}/{direction}/{case.name}/{result.name}", value


def _inputs(spec: OpSpec, contract: str, direction: Pass, case: Case, device: str) -> list[Tensor]:
    sizes = spec.complete(dict(case.sizes))
    given = [arg for arg in direction.inputs if not arg.derived]
    known = {arg.name: _input(spec, contract, arg, sizes, case).to(device) for arg in given}
    known |= derived(spec, direction, known, sizes)
    return [known[arg.name] for arg in direction.inputs]


def _input(spec: OpSpec, contract: str, arg: TensorArg, sizes: dict[str, int], case: Case) -> Tensor:
    dtype = DTYPES[spec.contract(contract).accepted(arg)[-1 if case.second_dtypes else 0]]
    if any(arg.name == result.name for result in spec.forward.results):
        shape = tuple(sizes[axis] for axis in arg.axes)
        return inputs.row_tensor(stream_name(spec, arg.name), range(case.rows), shape, dtype, case.seed, "positive")
    if arg.name.startswith("start_") and not case.started:
        return torch.zeros([sizes[axis] for axis in arg.axes], dtype=dtype)
    return draw(spec, arg, range(case.rows), sizes, case.seed, dtype, case.pattern)


def write(path: Path, device: str = "cpu", backend: str | None = "reference") -> None:
    """Compute and store. The file says on what it was made."""
    made_on = environment(torch.device(device)) if device != "cpu" else {}
    content = {"backend": backend, "device": device, "made_on": made_on, "digests": compute(device, backend)}
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


def compare(path: Path, device: str | None = None, backend: str | None = None) -> list[str]:
    """What differs from the file when computed now, by default on its own kind of device and backend; empty if nothing does.

    A GPU's file can be compared on a CPU, whose references then have that GPU's elementary functions.
    """
    stored = json.loads(path.read_text())
    elsewhere = device == "cpu" and stored["device"] != "cpu"
    now = compute(
        device or stored["device"],
        backend or ("reference" if elsewhere else stored["backend"]),
        architecture=path.stem if elsewhere else None,
    )
    return differences(stored["digests"], now, AWAITING_GPU.get(path.stem, ()))


def differences(stored: dict[str, str], now: dict[str, str], awaiting: Sequence[str] = ()) -> list[str]:
    """What differs, one line each. A digest that one side lacks is a difference too, unless its case is ``awaiting``."""

    def excused(key: str) -> bool:
        return key.split("/")[3] in awaiting if awaiting else False

    changed = [key for key in sorted(stored.keys() & now.keys()) if stored[key] != now[key]]
    lines = [f"{key}: stored {stored[key][:12]}, now {now[key][:12]}" for key in changed]
    lines += [
        f"{key}: stored, but no longer computed" for key in sorted(stored.keys() - now.keys()) if not excused(key)
    ]
    lines += [f"{key}: computed, but not stored" for key in sorted(now.keys() - stored.keys()) if not excused(key)]
    return lines


def disagreements_with_portable(path: Path, portable: Path) -> list[str]:
    """Portable results for which an architecture's file has other bits than ``portable.json``, or none though it should."""
    arch, everywhere = json.loads(path.read_text())["digests"], json.loads(portable.read_text())["digests"]
    here = {key: value for key, value in arch.items() if is_portable(key)}
    due = {key: value for key, value in everywhere.items() if key in here or is_proven(key, path.stem)}
    return differences(due, here, AWAITING_GPU.get(path.stem, ()))


def is_proven(key: str, arch: str) -> bool:
    """Whether the contract names ``arch`` among the places where it was proven: then its digests must be on record there."""
    name, contract, *_ = key.split("/")
    return any(proof.arch == arch for proof in catalogue.declared(name).contract(contract).proofs)


def main() -> int:
    parser = argparse.ArgumentParser(description="Golden digests of the operators.")
    parser.add_argument("action", choices=("write", "compare"))
    parser.add_argument("path", type=Path)
    parser.add_argument("--device", default=None)
    parser.add_argument("--backend", default=None)
    given = parser.parse_args()
    if given.action == "write":
        write(given.path, given.device or "cpu", given.backend or "reference")
        return 0
    lines = compare(given.path, given.device, given.backend)
    print("\n".join(lines) or "every digest is as stored")
    return 1 if lines else 0


if __name__ == "__main__":
    raise SystemExit(main())
