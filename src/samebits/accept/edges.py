"""Cases of single operators: the edges of the split and of the norm, and the fixed-K product."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from samebits.accept import integer, published
from samebits.accept.contract import LayerContract
from samebits.accept.provider import Provider, check_capability
from samebits.accept.trace import Trace
from samebits.exact.bits import digest

_LAYER = LayerContract(hidden=published.HIDDEN)
Run = Callable[[Provider, dict[str, Tensor], Trace], None]


@dataclass(frozen=True)
class Workload:
    """Tensors by name; those in ``shared`` are the same for every row."""

    tensors: dict[str, Tensor]
    shared: tuple[str, ...]
    function: Run

    @property
    def rows(self) -> int:
        return next(tensor.shape[0] for name, tensor in self.tensors.items() if name not in self.shared)

    def run(self, provider: Provider) -> Trace:
        check_capability(provider, _LAYER, self.rows)
        trace = Trace(next(iter(self.tensors.values())).device, {"provenance": dict(provider.provenance())})
        self.function(provider, self.tensors, trace)
        return trace

    def only(self, rows: Sequence[int]) -> Workload:
        def taken(name: str, tensor: Tensor) -> Tensor:
            return tensor if name in self.shared else tensor[torch.tensor(list(rows), device=tensor.device)]

        return dataclasses.replace(self, tensors={name: taken(name, tensor) for name, tensor in self.tensors.items()})

    def to(self, device: torch.device) -> Workload:
        return dataclasses.replace(self, tensors={name: tensor.to(device) for name, tensor in self.tensors.items()})

    def fingerprint(self) -> str:
        text = "\n".join(f"{name} {digest(tensor)}" for name, tensor in self.tensors.items())
        return hashlib.sha256(text.encode()).hexdigest()


def sinkhorn() -> Workload:
    """Saturated, equal, zero and far-apart logits."""
    return Workload(published.sinkhorn_edges(), (), _run_sinkhorn)


def _run_sinkhorn(provider: Provider, given: dict[str, Tensor], trace: Trace) -> None:
    pre, post, c, saved = provider.hc_split_sinkhorn_fwd(given["h"], _LAYER)
    for name, tensor in (("sinkhorn.pre", pre), ("sinkhorn.post", post), ("sinkhorn.c", c)):
        trace.add(name, tensor)
    trace.add("sinkhorn.dh", provider.hc_split_sinkhorn_bwd(given["d_pre"], given["d_post"], given["d_c"], saved))


def rms() -> Workload:
    """A zero row, a tiny one, a large one, a ramp."""
    return Workload(published.rms_edges(), ("gamma",), _run_rms)


def _run_rms(provider: Provider, given: dict[str, Tensor], trace: Trace) -> None:
    x, gamma = given["x"], given["gamma"]
    y, residual, saved = provider.rmsnorm_residual_fwd(x, gamma, _LAYER.rmsnorm_eps)
    trace.add("rms.y", y)
    trace.add_copy("rms.residual", residual, x)
    dx, dgamma = provider.rmsnorm_residual_bwd(given["dy"], given["d_residual"], x, gamma, saved)
    trace.add("rms.dx", dx)
    trace.add("rms.dgamma", dgamma, rows=False)


def fixed_k_gemm() -> Workload:
    """The controller's shape: 16 rows, K = 512, N = 24, from the integer generator."""
    batch = integer.batch(16, _LAYER)
    weight = batch.weights.controller
    tensors = {
        "x": batch.r_old.float().flatten(1),
        "weight": weight,
        "dy": batch.d_normalized.float()[:, : weight.shape[0]].contiguous(),
    }
    return Workload(tensors, ("weight",), _run_fixed_k_gemm)


def _run_fixed_k_gemm(provider: Provider, given: dict[str, Tensor], trace: Trace) -> None:
    x, weight = given["x"], given["weight"]
    trace.add("gemm.y", provider.fixed_k_gemm_fwd(x, weight))
    dx, dweight = provider.fixed_k_gemm_bwd(given["dy"], x, weight)
    trace.add("gemm.dx", dx)
    trace.add("gemm.dweight", dweight, rows=False)
