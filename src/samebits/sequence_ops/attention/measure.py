"""``samebits bench attention``: times beside those of torch's own attentions."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from samebits.bench import results
from samebits.bench.case import Case, Direction
from samebits.bench.run import Settings
from samebits.bench.targets import quick_cases
from samebits.bench.timing import Failure, Machine, Sample
from samebits.bench.work import Run, Work, through_autograd
from samebits.environment import Environment
from samebits.sequence_ops.attention import api, contracts
from samebits.sequence_ops.attention.evidence import PeerRows, compared, expected, invariance, rows_of_peers, same
from samebits.sequence_ops.attention.peers import DETERMINISTIC, PEERS, TIMED, Attention
from samebits.sequence_ops.attention.subject import Inputs, Kind, Ours
from samebits.sequence_ops.attention.targets import CUDNN, FLASH, SHAPE, STRETCH

ROWS = (1, 16, 64, 264, 925, 3160, 16384)
"""Lengths: queries, and as many keys, of one sequence that is not causal."""
T = TypeVar("T")
SAME_BITS_AS = {"cudnn": CUDNN, "fa2": FLASH}
"""The peer whose bits a contract has, where that peer does not leave them."""


DTYPE = "bfloat16"
"""Of all that is timed."""


def cases(
    quick: bool, directions: Sequence[Direction], rows: Sequence[int], sizes: Mapping[str, int]
) -> tuple[Case, ...]:
    """``quick``: those that the targets speak about. ValueError: an axis that is none."""
    known = dict(SHAPE)
    for axis in sizes:
        if axis not in known:
            raise ValueError(
                f"--size {axis}: {contracts.NAME} can be sized along {', '.join(known)}; rows are its length"
            )
    shape = tuple((known | dict(sizes)).items())
    if quick:
        asked = (case for case in quick_cases(contracts.NAME) if case.sizes == shape)
        return tuple(c for c in asked if c.direction in directions and (not rows or c.rows in rows))
    return tuple(Case(contracts.NAME, direction, count, shape) for direction in directions for count in rows or ROWS)


def run(
    todo: Sequence[Case],
    settings: Settings,
    machine: Machine,
    environment: Environment,
    begin: Callable[[Case], None] = lambda case: None,
) -> Iterator[dict[str, Any]]:
    """Result lines as they come, a ``skipped`` line for everything that could not be measured."""
    started = time.monotonic()
    for case in todo:
        if time.monotonic() - started > settings.seconds:
            yield results.skipped(case, DTYPE, f"no time was left after {settings.seconds:.0f} s")
            continue
        begin(case)
        yield from _measure(case, settings, machine, environment)
        machine.release()


def _measure(case: Case, settings: Settings, machine: Machine, environment: Environment) -> Iterator[dict[str, Any]]:
    given = drawn(case, machine.device)
    ours = {(c, b): Ours(c, b) for c in settings.contracts for b in settings.backends}
    works = {key: ours_of(case, given, one) for key, one in ours.items()}
    others = _peers(case, given) if settings.with_peers else []
    found = machine.measure([*works.values(), *others])
    beside = {other.name: found[other.name] for other in others}
    rows = rows_of_peers(case, given, settings.with_peers)
    for contract in settings.contracts:
        truth: dict[str, Tensor] | None = None
        for backend in settings.backends:
            sample = found[works[contract, backend].name]
            if isinstance(sample, Failure):
                yield results.skipped(case, DTYPE, sample.reason, contract, backend)
                continue
            if truth is None:
                truth = expected(case, given, contract)
            yield line(case, ours[contract, backend], given, sample, beside, rows, truth, machine, environment)


def drawn(case: Case, device: torch.device) -> Inputs:
    """Random numbers of the device: at these sizes others take minutes."""
    sizes = dict(case.sizes)
    kind = Kind(False, sizes["D"], sizes["H"], sizes.get("H_kv", sizes["H"]))
    generator = torch.Generator(device).manual_seed(case.rows)
    shapes = [(1, case.rows, heads, kind.head_dim) for heads in (kind.heads, kind.kv_heads, kind.kv_heads, kind.heads)]
    q, k, v, grad_out = (torch.randn(shape, device=device, generator=generator).bfloat16() for shape in shapes)
    return Inputs(kind, q, k, v, grad_out, {})


# --- what is timed ----------------------------------------------------------------------------------------------------


def _leaves(given: Inputs) -> list[Tensor]:
    return [tensor.detach().requires_grad_() for tensor in (given.q, given.k, given.v)]


def ours_of(case: Case, given: Inputs, ours: Ours) -> Work:
    """Forward and backward through the torch operators, both together through autograd."""
    name = f"{ours.contract}/{ours.backend}"
    options: dict[str, Any] = {"contract": ours.contract, "backend": ours.backend}

    def forward() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return api.attention(given.q, given.k, given.v, **options)

    def prepare() -> Run:
        if case.direction == "fwd":
            return forward
        if case.direction == "bwd":
            tensors = (given.grad_out, given.q, given.k, given.v, *forward())

            def backward() -> tuple[Tensor, ...]:
                with torch.no_grad():
                    return tuple(g for g in api.attention_backward(*tensors, **options) if g is not None)

            return backward
        leaves = _leaves(given)

        def both() -> tuple[Tensor, ...]:
            with torch.enable_grad():
                out, lse = api.attention(leaves[0], leaves[1], leaves[2], **options)
            return (out.detach(), lse, *torch.autograd.grad(out, leaves, given.grad_out))

        return both

    return Work(name, prepare, keep=True)


def _peers(case: Case, given: Inputs) -> list[Work]:
    names = TIMED if case.direction == "fwd" else (*TIMED, DETERMINISTIC)
    return [peer_of(case, given, name, PEERS[name]) for name in names]


def peer_of(case: Case, given: Inputs, name: str, function: Attention) -> Work:
    """Through autograd; what is named so under ``torch.use_deterministic_algorithms``, which counts when it runs."""

    def prepare() -> Run:
        leaves = _leaves(given)
        upstream = [given.grad_out]
        made = through_autograd(name, function, leaves, leaves, upstream, case.direction)
        if name != DETERMINISTIC:
            return made.prepare()
        run = deterministically(made.prepare)
        return lambda: deterministically(run)

    return Work(name, prepare)


def deterministically(function: Callable[[], T]) -> T:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        return function()
    finally:
        torch.use_deterministic_algorithms(before)


# --- lines ------------------------------------------------------------------------------------------------------------


def line(
    case: Case,
    ours: Ours,
    given: Inputs,
    sample: Sample,
    beside: Mapping[str, Sample | Failure],
    rows: PeerRows,
    truth: Mapping[str, Tensor],
    machine: Machine,
    environment: Environment,
) -> dict[str, Any]:
    """With the keys of every result line; beside the peers' times, of a forward, what their rows depend on (``invariant``)."""
    right, scope = compared(sample.outputs, truth)
    extra: dict[str, Any] = {}
    if case.direction == "fwd":
        own = invariance(ours.out, given.q, given.k, given.v)
        extra["invariant"] = own
        if not all(own.values()):
            right, scope = False, f"rows change: {', '.join(name for name, kept in own.items() if not kept)}"
        peer = SAME_BITS_AS[ours.contract]
        if peer in rows.outs:
            extra["same_bits_as"] = {peer: same(sample.outputs[0], rows.outs[peer])}
    moved, written, flops = work_of(case)
    made: dict[str, Any] = {
        "op": case.op,
        "contract": ours.contract,
        "backend": ours.backend,
        "direction": case.direction,
    }
    made |= {"shape": case.shape(), "dtype": results.case_dtype(case, DTYPE)}
    made |= results.timing(sample, beside, moved, (right, scope), machine, environment)
    for name, entry in made["peers"].items():
        if name in rows.invariant:
            entry["invariant"] = rows.invariant[name]
    made["tflops"] = round(flops / sample.us * 1e-6, 1)
    made["output_bytes"] = written
    made["plan"] = str(ours.plan(given, case.direction != "fwd"))
    made["stretch"] = {target.text: target.value(made) for target in STRETCH if target.covers(made)}
    return made | extra


def work_of(case: Case) -> tuple[int, int, int]:
    """Bytes that must be moved, bytes of them that are written, and operations that need be done."""
    heads, head_dim = (dict(case.sizes)[axis] for axis in ("H", "D"))
    tensor, logs = 2 * case.rows * heads * head_dim, 4 * case.rows * heads
    products = 2 * case.rows * case.rows * math.prod((heads, head_dim))
    forward, backward = case.direction != "bwd", case.direction != "fwd"
    moved = forward * (4 * tensor + logs) + backward * (8 * tensor + logs)
    return moved, forward * (tensor + logs) + backward * 3 * tensor, products * (2 * forward + 5 * backward)
