"""``samebits bench attention``: times beside torch's own attentions, whose rows are watched too, with bits verified in the same run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samebits.bench import results
from samebits.bench.bits import chosen_rows
from samebits.bench.case import Case, Direction
from samebits.bench.run import Settings
from samebits.bench.targets import quick_cases
from samebits.bench.timing import Failure, Machine, Sample
from samebits.bench.work import Run, Work, through_autograd
from samebits.environment import Environment
from samebits.exact.bits import bits
from samebits.exact.compare import first_difference
from samebits.sequence_ops.attention import api, contracts
from samebits.sequence_ops.attention.peers import PEERS, Attention
from samebits.sequence_ops.attention.subject import Inputs, Kind, Ours
from samebits.sequence_ops.attention.targets import CUDNN, FLASH, FLASH_DETERMINISTIC, SHAPE, STRETCH

ROWS = (1, 16, 64, 264, 925, 3160, 16384)
"""Lengths: queries, and as many keys, of one sequence that is not causal."""
SAME_BITS_AS = {"cudnn": CUDNN, "fa2": FLASH}
"""The peer whose bits a contract has, where that peer does not leave them."""
TIMED = (CUDNN, FLASH, "efficient")


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
        asked = (case for case in quick_cases(contracts.NAME) if case.grads == "model" and case.sizes == shape)
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
            yield results.skipped(case, f"no time was left after {settings.seconds:.0f} s")
            continue
        begin(case)
        yield from _measure(case, settings, machine, environment)
        machine.release()


def _measure(case: Case, settings: Settings, machine: Machine, environment: Environment) -> Iterator[dict[str, Any]]:
    given = drawn(case, machine.device)
    ours = {(c, b): Ours(c, b) for c in settings.contracts for b in settings.backends}
    works = {key: _ours(case, given, one) for key, one in ours.items()}
    others = _peers(case, given) if settings.with_peers else []
    found = machine.measure([*works.values(), *others])
    beside = {other.name: found[other.name] for other in others}
    rows = _rows_of_peers(case, given, settings.with_peers)
    for contract in settings.contracts:
        truth: dict[str, Tensor] | None = None
        for backend in settings.backends:
            sample = found[works[contract, backend].name]
            if isinstance(sample, Failure):
                yield results.skipped(case, sample.reason, contract, backend)
                continue
            if truth is None:
                truth = expected(case, given, contract)
            yield line(case, ours[contract, backend], given, sample, beside, rows, truth, machine, environment)


def drawn(case: Case, device: torch.device) -> Inputs:
    """Random numbers of the device: at these sizes others take minutes."""
    heads, head_dim = (dict(case.sizes)[axis] for axis in ("H", "D"))
    generator = torch.Generator(device).manual_seed(case.rows)
    shape = (1, case.rows, heads, head_dim)
    q, k, v, grad_out = (torch.randn(shape, device=device, generator=generator).bfloat16() for _ in range(4))
    return Inputs(Kind(False, head_dim, heads, heads), q, k, v, grad_out, {})


# --- what is timed ----------------------------------------------------------------------------------------------------


def _leaves(given: Inputs) -> list[Tensor]:
    return [tensor.detach().requires_grad_() for tensor in (given.q, given.k, given.v)]


def _ours(case: Case, given: Inputs, ours: Ours) -> Work:
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
    works = [_peer(case, given, name, PEERS[name]) for name in TIMED]
    if case.direction != "fwd":
        works.append(_deterministic(_peer(case, given, FLASH_DETERMINISTIC, PEERS[FLASH])))
    return works


def _peer(case: Case, given: Inputs, name: str, function: Attention) -> Work:
    def prepare() -> Run:
        leaves = _leaves(given)
        upstream = [given.grad_out]
        return through_autograd(name, function, leaves, leaves, upstream, case.direction).prepare()

    return Work(name, prepare)


def _deterministic(work: Work) -> Work:
    """The same under ``torch.use_deterministic_algorithms``, which its backward asks for when it runs."""

    def under(function: Callable[[], Any]) -> Any:
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)
        try:
            return function()
        finally:
            torch.use_deterministic_algorithms(before)

    def prepare() -> Run:
        run: Run = under(work.prepare)
        return lambda: under(run)  # type: ignore[no-any-return]

    return Work(work.name, prepare)


# --- rows and bits ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PeerRows:
    """Of one forward: each peer's invariance by what was changed, or why there is none, and its result."""

    invariant: dict[str, dict[str, bool]]
    outs: dict[str, Tensor]


def _rows_of_peers(case: Case, given: Inputs, asked: bool) -> PeerRows:
    found = PeerRows({}, {})
    for name in TIMED if asked and case.direction == "fwd" else ():
        try:
            found.outs[name] = PEERS[name](given.q, given.k, given.v)
            found.invariant[name] = invariance(PEERS[name], given.q, given.k, given.v)
        except RuntimeError:  # no library takes every length; its time, which is left out, says why
            continue
    return found


def invariance(function: Attention, q: Tensor, k: Tensor, v: Tensor) -> dict[str, bool]:
    """Whether rows keep their bits with fewer queries, fewer heads, in another batch, and in a second run."""
    with torch.no_grad():
        out = function(q, k, v)
        queries, heads = q.shape[1], q.shape[2]
        half = slice(0, max(1, heads // 2))
        found = {"again": _same(function(q, k, v), out)}
        for rows in (1, 17, 160):
            if rows < queries:
                found[f"last {rows} queries"] = _same(function(q[:, -rows:], k, v), out[:, -rows:])
        if k.shape[2] == heads and heads > 1:
            found["half of the heads"] = _same(function(q[:, :, half], k[:, :, half], v[:, :, half]), out[:, :, half])
        other = [torch.cat([t.flip(1), t]) for t in (q, k, v)]
        found["second in a batch of two"] = _same(function(other[0], other[1], other[2])[1:], out)
    return found


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(bits(a.contiguous()), bits(b.contiguous()))


def _sampled(tensor: Tensor) -> Tensor:
    """Some positions of the first and the last head, of (1, S, H, D)."""
    rows = torch.tensor(chosen_rows(tensor.shape[1]), device=tensor.device)
    return _ends(tensor)[:, rows]


def _ends(tensor: Tensor) -> Tensor:
    heads = torch.tensor(sorted({0, tensor.shape[2] - 1}), device=tensor.device)
    return tensor[:, :, heads]


def expected(case: Case, given: Inputs, contract: str) -> dict[str, Tensor]:
    """What the reference says of some queries, and of some keys with all queries, of two heads: parts that stand for themselves."""
    options: dict[str, Any] = {"contract": contract, "backend": "reference"}
    q, k, v = _sampled(given.q), _ends(given.k), _ends(given.v)
    with torch.no_grad():
        out, lse = api.attention(q, k, v, **options)
        if case.direction == "fwd":
            return {"out": out, "lse": lse}
        grad_q, _, _ = api.attention_backward(_sampled(given.grad_out), q, k, v, out, lse, **options)
        # The sums over all queries need out and lse of all: those of another backend, whose sample is compared with these.
        whole, logs = api.attention(_ends(given.q), k, v, contract=contract)
        some = (_sampled(given.k), _sampled(given.v))
        _, grad_k, grad_v = api.attention_backward(_ends(given.grad_out), _ends(given.q), *some, whole, logs, **options)
    assert grad_q is not None and grad_k is not None and grad_v is not None
    gradients = {"grad_q": grad_q, "grad_k": grad_k, "grad_v": grad_v}
    return gradients if case.direction == "bwd" else {"out": out, "lse": lse, **gradients}


def compared(outputs: Sequence[Tensor], truth: Mapping[str, Tensor]) -> tuple[bool, str]:
    """Whether the samples are those of ``truth``, and what was compared or the first difference."""
    count = 0
    for (name, exact), output in zip(truth.items(), outputs, strict=True):
        found = (
            _sampled(output.transpose(1, 2)[..., None])[..., 0].transpose(1, 2) if name == "lse" else _sampled(output)
        )
        difference = first_difference(found.contiguous(), exact.contiguous())
        if difference is not None:
            return False, f"{name} of the sample differs: {difference}"
        count = max(count, found.shape[1]) if name != "lse" else count
    return True, f"{count} positions of the first and last head: {', '.join(truth)}"


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
        own = invariance(lambda q, k, v: api.attention(q, k, v, contract=ours.contract, backend=ours.backend)[0], given.q, given.k, given.v)  # fmt: skip
        extra["invariant"] = own
        if not all(own.values()):
            right, scope = False, f"rows change: {', '.join(name for name, kept in own.items() if not kept)}"
        peer = SAME_BITS_AS[ours.contract]
        if peer in rows.outs:
            extra["same_bits_as"] = {peer: _same(sample.outputs[0], rows.outs[peer])}
    moved, written, flops = work_of(case)
    made = {"op": case.op, "contract": ours.contract, "backend": ours.backend, "direction": case.direction}
    made |= {"shape": case.shape(), "dtype": results.case_dtype(case)}
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
