"""What ``samebits check attention`` examines: inputs of several kinds, and who is asked to compute on them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from samebits.dispatch import DeviceInfo
from samebits.runtime import device as devices
from samebits.sequence_ops.attention import api, choice, contracts
from samebits.sequence_ops.attention.checks import check
from samebits.sequence_ops.attention.spec import SPEC
from samebits.verify import inputs
from samebits.verify.subject import NotRun, UsageError, gradients, leaf

AXES = ("S_q", "S_k", "B", "H", "H_kv", "D")
MORE_KEYS = 101
"""By default there are so many more keys than queries: a block of 128 has an edge among them, and causal is not square."""


@dataclass(frozen=True)
class Kind:
    """What attention is asked for, beside the lengths."""

    causal: bool
    head_dim: int
    heads: int
    kv_heads: int

    @property
    def title(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"{mask}, D={self.head_dim}, {self.heads} heads over {self.kv_heads}"


KINDS = (Kind(False, 64, 4, 2), Kind(True, 64, 3, 3), Kind(False, 128, 2, 2), Kind(True, 128, 4, 1))


@dataclass(frozen=True)
class Inputs:
    """Of one call and its backward."""

    kind: Kind
    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    packing: Mapping[str, Tensor]
    """``cu_seqlens`` and ``cu_seqlens_k``; empty for a batch of sequences."""

    @property
    def options(self) -> dict[str, Any]:
        return {"causal": self.kind.causal, **self.packing}


def kinds(sizes: Mapping[str, int]) -> tuple[Kind, ...]:
    """The kinds that fit the sizes that were asked for. UsageError: an axis that is none, or sizes that fit nothing."""
    for axis in sizes:
        if axis not in AXES:
            raise UsageError(f"{SPEC.name} has no axis {axis!r}; its axes: {', '.join(AXES)}")
    if sizes.get("D", contracts.HEAD_DIMS[0]) not in contracts.HEAD_DIMS:
        raise UsageError(f"D = {sizes['D']}: accepted are {' and '.join(map(str, contracts.HEAD_DIMS))}")
    if "H_kv" in sizes and "H" not in sizes:
        raise UsageError("H_kv without H: name both")
    chosen = [kind for kind in KINDS if kind.head_dim == sizes.get("D", kind.head_dim)]
    if "H" in sizes:
        heads, kv_heads = sizes["H"], sizes.get("H_kv", sizes["H"])
        if kv_heads < 1 or heads < 1 or heads % kv_heads:
            raise UsageError(f"H = {heads}, H_kv = {kv_heads}: H must be a multiple of H_kv")
        chosen = [replace(kind, heads=heads, kv_heads=kv_heads) for kind in chosen]
    return tuple(chosen)


def draw(
    kind: Kind,
    lengths: tuple[int, int, int],
    dtype: torch.dtype,
    seed: int,
    device: torch.device,
    pattern: str = "normal",
) -> Inputs:
    """``lengths``: batch, queries, keys. The same numbers on every machine."""
    batch, queries, keys = lengths

    def tensor(name: str, length: int, heads: int) -> Tensor:
        shape = (heads, kind.head_dim)
        rows = inputs.row_tensor(f"{SPEC.name}/{name}", range(batch * length), shape, dtype, seed, pattern=pattern)
        return rows.unflatten(0, (batch, length)).to(device)

    q, grad_out = (tensor(name, queries, kind.heads) for name in ("q", "grad_out"))
    k, v = (tensor(name, keys, kind.kv_heads) for name in ("k", "v"))
    return Inputs(kind, q, k, v, grad_out, {})


# --- who computes -----------------------------------------------------------------------------------------------------


class Candidate(Protocol):
    """Results are ``out`` and, where it has one, ``lse``; gradients are named by their input."""

    @property
    def title(self) -> str: ...

    def takes(self, given: Inputs) -> str | None:
        """Why it has no way to be asked this, or None."""

    def forward(self, given: Inputs) -> dict[str, Tensor]: ...

    def backward(self, given: Inputs) -> dict[str, Tensor]: ...


@dataclass(frozen=True)
class Ours:
    """One contract by one backend (None: what runs by default). Gradients come from the explicit backward."""

    contract: str
    backend: str | None
    title: str = SPEC.name

    def takes(self, given: Inputs) -> str | None:
        return None

    def forward(self, given: Inputs) -> dict[str, Tensor]:
        with torch.no_grad():
            out, lse = self._call(given.q, given.k, given.v, given)
        return {"out": out, "lse": lse}

    def backward(self, given: Inputs) -> dict[str, Tensor]:
        saved = self.forward(given)
        with torch.no_grad():
            found = api.attention_backward(
                given.grad_out, given.q, given.k, given.v, saved["out"], saved["lse"],
                contract=self.contract, backend=self.backend, **given.options,
            )  # fmt: skip
        return {name: grad for name, grad in zip("qkv", found, strict=True) if grad is not None}

    def out(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Of a call that is not causal."""
        return api.attention(q, k, v, contract=self.contract, backend=self.backend)[0]

    def autograd(self, given: Inputs) -> dict[str, Tensor]:
        leaves = {name: leaf(getattr(given, name)) for name in "qkv"}
        out, _ = self._call(leaves["q"], leaves["k"], leaves["v"], given)
        return gradients({"out": out}, leaves, {"out": given.grad_out})

    def _call(self, q: Tensor, k: Tensor, v: Tensor, given: Inputs) -> tuple[Tensor, Tensor]:
        return api.attention(q, k, v, contract=self.contract, backend=self.backend, **given.options)

    def decision(self, given: Inputs, backward: bool) -> tuple[str, int]:
        """The backend that runs this, and how many plans it has. UnsupportedError: none."""
        backend, plans = self._plans(given, backward)
        return backend, len(plans)

    def plan(self, given: Inputs, backward: bool) -> object:
        return self._plans(given, backward)[1][0]

    def _plans(self, given: Inputs, backward: bool) -> tuple[str, tuple[object, ...]]:
        info: DeviceInfo = devices.info(given.q.device)
        cu = [given.packing.get(name) for name in ("cu_seqlens", "cu_seqlens_k")]
        problem = check(SPEC.name, given.q, given.k, given.v, cu[0], cu[1], 1.0, self.contract)
        recipe, causal = contracts.recipe(self.contract), given.kind.causal
        read = (given.q, given.k, given.v, *((given.grad_out,) if backward else ()))
        found = choice.decide(problem, recipe, backward, causal, self.backend, info, read, ())
        backend = next(b for b in SPEC.backends if b.name == found.choice.backend)
        return backend.name, choice.plans(backend, problem, recipe, backward, causal, info.arch)


class Theirs:
    """Somebody's ``function(q, k, v, ...)`` of our shapes, called with those of ``causal``, ``cu_seqlens`` and ``cu_seqlens_k``
    that it takes. It returns out, or out and then lse (B, H, S_q) in FP32. Gradients are autograd's."""

    def __init__(self, function: Callable[..., Any], title: str) -> None:
        self.function, self.title = function, title
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):
            parameters = {}.values()
        self._open = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        self._named = {p.name for p in parameters}

    def takes(self, given: Inputs) -> str | None:
        needed = [name for name, value in given.options.items() if value is not False and not self._knows(name)]
        return f"it takes no {needed[0]}" if needed else None

    def _knows(self, name: str) -> bool:
        return self._open or name in self._named

    def forward(self, given: Inputs) -> dict[str, Tensor]:
        with torch.no_grad():
            return self._call(given.q, given.k, given.v, given)

    def backward(self, given: Inputs) -> dict[str, Tensor]:
        leaves = {name: leaf(getattr(given, name)) for name in "qkv"}
        try:
            results = self._call(leaves["q"], leaves["k"], leaves["v"], given)
        except (RuntimeError, NotImplementedError) as error:
            raise NotRun(f"the forward with gradients raised {type(error).__name__}: {error}") from error
        return gradients({"out": results["out"]}, leaves, {"out": given.grad_out.to(results["out"].dtype)})

    def _call(self, q: Tensor, k: Tensor, v: Tensor, given: Inputs) -> dict[str, Tensor]:
        options = {name: value for name, value in given.options.items() if self._knows(name)}
        found = self.function(q, k, v, **options)
        results = [found] if isinstance(found, Tensor) else [t for t in found if isinstance(t, Tensor)]
        if not results:
            raise TypeError("it returned no tensor")
        expected = (q.shape[0], q.shape[2], q.shape[1])
        second = results[1] if len(results) > 1 else None
        has_lse = second is not None and second.dtype == torch.float32 and tuple(second.shape) == expected
        return {"out": results[0], "lse": second} if has_lse and second is not None else {"out": results[0]}
