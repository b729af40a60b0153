"""What a measurement says beside times: the bits of a sample, and whether rows keep theirs, ours and those of the peers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samebits.bench.bits import chosen_rows
from samebits.bench.case import Case
from samebits.exact.bits import bits
from samebits.exact.compare import first_difference
from samebits.sequence_ops.attention import api
from samebits.sequence_ops.attention.peers import PEERS, TIMED, Attention
from samebits.sequence_ops.attention.subject import Inputs
from samebits.verify.quick import quick_folds


@dataclass(frozen=True)
class PeerRows:
    """Of one forward: each peer's invariance by what was changed, or why there is none, and its result."""

    invariant: dict[str, dict[str, bool]]
    outs: dict[str, Tensor]


def rows_of_peers(case: Case, given: Inputs, asked: bool) -> PeerRows:
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
        found = {"again": same(function(q, k, v), out)}
        for rows in (1, 17, 160):
            if rows < queries:
                found[f"last {rows} queries"] = same(function(q[:, -rows:], k, v), out[:, -rows:])
        if k.shape[2] == heads and heads > 1:
            found["half of the heads"] = same(function(q[:, :, half], k[:, :, half], v[:, :, half]), out[:, :, half])
        other = [torch.cat([t.flip(1), t]) for t in (q, k, v)]
        found["second in a batch of two"] = same(function(other[0], other[1], other[2])[1:], out)
    return found


def same(a: Tensor, b: Tensor) -> bool:
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
    with torch.no_grad(), quick_folds():
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
