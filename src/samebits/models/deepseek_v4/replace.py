"""Put the operators into a decoder layer, and take them out again.

The norms are whole modules, so their forward is ours. The collapse of a hyper-connection is one expression inside its
forward, ``(pre.unsqueeze(-1) * hidden_streams).sum(dim=2)``, so the class's own forward still runs, on a stand-in for
``hidden_streams`` that knows only what that forward asks of it: the controller receives the real tensor, and the
product with ``pre`` becomes a pending collapse whose ``sum`` is our operator. Everything else (controller, Sinkhorn)
is the class's code on the class's values, so post, comb and pre keep their bits. A forward that would ask anything
else of the stand-in fails loudly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import samebits
from samebits import registry
from samebits.models.deepseek_v4 import known

SITES = (("attn_hc", "input_layernorm"), ("ffn_hc", "post_attention_layernorm"))
"""(hyper-connection, norm behind it) of both halves of a decoder layer."""

Observer = Callable[[str, Tensor], None]


@dataclass(frozen=True)
class Replacement:
    """What is in place, and how often each replaced module ran."""

    contracts: dict[str, str]
    backend: str | None
    calls: Counter[str] = field(default_factory=Counter)


@contextmanager
def replaced(
    layer: nn.Module,
    contracts: Mapping[str, str] | None = None,
    *,
    backend: str | None = None,
    on_collapse: Observer | None = None,
) -> Iterator[Replacement]:
    """Run a DeepSeek-V4 decoder layer with our collapse and our norms while the context is open.

    Only this instance changes (the class and other layers do not), and every forward is restored on exit, also after an
    error. The norms return BF16, the dtype of their input: the class returns FP32 by promotion with its FP32 weight,
    which the BF16 projection behind it does not accept (see README of this folder).

    Args:
        layer: ``DeepseekV4DecoderLayer``, or any module with the same four members.
        contracts: operator name to contract name; an operator that is not named uses its published contract.
        backend: as of the operators; None takes the first that accepts the call.
        on_collapse: called as ``on_collapse("attn_hc", pre)`` at each collapse, with the FP32 weights (B, S, 4).

    Raises:
        TypeError, RuntimeError: a member is not the known class, see ``known.require``.
        TypeError: a norm's weight is not FP32.
        ValueError: a contract that the operator does not have.
    """
    state = Replacement(_resolve(contracts or {}), backend)
    members = {name: _member(layer, name) for site in SITES for name in site}
    for collapse, norm in SITES:
        known.require(members[collapse], known.HYPER_CONNECTION, collapse)
        known.require(members[norm], known.RMSNORM, norm)
        weight = members[norm].weight
        if weight.dtype != torch.float32:
            raise TypeError(
                f"{norm}.weight is {weight.dtype}, but the operator takes FP32: this class keeps it in FP32 when it is "
                f"loaded with from_pretrained(dtype=torch.bfloat16); Module.to(torch.bfloat16) does not"
            )
    try:
        for collapse, norm in SITES:
            members[collapse].forward = _collapse_forward(members[collapse], collapse, state, on_collapse)
            members[norm].forward = _norm_forward(members[norm], norm, state)
        yield state
    finally:
        for member in members.values():
            vars(member).pop("forward", None)


def _resolve(contracts: Mapping[str, str]) -> dict[str, str]:
    used = ("h_aggregate", "rmsnorm_residual")
    for name in contracts:
        if name not in used:
            raise ValueError(f"contracts names {name!r}, which this layer does not use; it uses {', '.join(used)}")
    return {name: registry.spec(name).contract(contracts.get(name)).name for name in used}


def _member(layer: nn.Module, name: str) -> nn.Module:
    member = getattr(layer, name, None)
    if not isinstance(member, nn.Module):
        raise TypeError(f"{type(layer).__qualname__} has no module {name!r}: this is not a DeepSeek-V4 decoder layer")
    return member


class _Streams:
    """Stands in for ``hidden_streams`` inside the forward of a hyper-connection."""

    def __init__(self, streams: Tensor, collapse: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._streams = streams
        self._collapse = collapse

    @property
    def dtype(self) -> torch.dtype:
        return self._streams.dtype

    @property
    def shape(self) -> torch.Size:
        return self._streams.shape

    def flatten(self, start_dim: int) -> Tensor:
        return self._streams.flatten(start_dim=start_dim)

    def view(self, *shape: int) -> Tensor:
        return self._streams.view(*shape)

    def __rmul__(self, weights: Tensor) -> _PendingCollapse:
        return _PendingCollapse(weights, self._streams, self._collapse)


class _PendingCollapse:
    """``weights * streams``, not yet summed over the streams."""

    def __init__(self, weights: Tensor, streams: Tensor, collapse: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._weights = weights
        self._streams = streams
        self._collapse = collapse

    def sum(self, dim: int) -> Tensor:
        expected = (*self._streams.shape[:-1], 1)
        if dim != self._streams.dim() - 2 or tuple(self._weights.shape) != expected:
            raise RuntimeError(
                f"expected a sum of weights {expected} over the streams, got {tuple(self._weights.shape)} over dim {dim}"
            )
        return self._collapse(self._weights.squeeze(-1), self._streams)


def _collapse_forward(
    module: nn.Module, name: str, state: Replacement, observe: Observer | None
) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
    theirs = module.forward

    def collapse(pre: Tensor, streams: Tensor) -> Tensor:
        state.calls[name] += 1
        if observe is not None:
            observe(name, pre)
        hidden: Tensor = samebits.h_aggregate(
            pre, streams, contract=state.contracts["h_aggregate"], backend=state.backend
        )
        return hidden

    def forward(hidden_streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        post, comb, collapsed = theirs(_Streams(hidden_streams, collapse))
        return post, comb, collapsed

    return forward


def _norm_forward(module: nn.Module, name: str, state: Replacement) -> Callable[[Tensor], Tensor]:
    def forward(hidden_states: Tensor) -> Tensor:
        state.calls[name] += 1
        y, _ = samebits.rmsnorm_residual(
            hidden_states,
            module.weight,
            module.variance_epsilon,
            contract=state.contracts["rmsnorm_residual"],
            backend=state.backend,
        )
        normalised: Tensor = y
        return normalised

    return forward
