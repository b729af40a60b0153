"""The call sites of a model, each as two functions of its inputs: what our operators return, and what the class does.

A site can so be judged alone: on the inputs of another run, or on some rows of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from samebits.models.deepseek_v4 import known
from samebits.models.deepseek_v4.patching import CONNECTIONS
from samebits.models.deepseek_v4.record import short
from samebits.nn import boundary_open, contract_of, hyper_head, rms_norm
from samebits.registry import operator

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Options:
    """How our operators run."""

    contracts: Mapping[str, str]
    backend: str | None = None


@dataclass(frozen=True)
class Site:
    """``inputs`` and ``outputs`` are boundaries of a record; a tensor is rows (T, ...) for both functions."""

    name: str
    kind: str
    module: Any
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    trailing: tuple[int, ...]
    """How many axes of each input belong to a row."""
    ours: Callable[[Tensors, Options], Tensors]
    theirs: Callable[[Tensors], Tensors]

    def rows(self, record: Any) -> Tensors:
        """The site's inputs in a record, as rows."""
        tensors = (record[name] for name in self.inputs)
        return tuple(t.reshape(-1, *t.shape[t.dim() - n :]) for t, n in zip(tensors, self.trailing, strict=True))


def call_sites(model: nn.Module) -> list[Site]:
    """In the order of a run of a ``DeepseekV4ForCausalLM``, patched or not (parameters are read when a site runs)."""
    found = []
    layers = list(model.get_submodule("model.layers").named_children())
    for index, (number, layer) in enumerate(layers):
        name = f"layers.{number}"
        after = f"layers.{layers[index + 1][0]}.attn_hc" if index + 1 < len(layers) else "hc_head"
        for (hc, norm), sublayer, streams in zip(
            CONNECTIONS, ("self_attn.output", "mlp"), (f"{name}.ffn_hc", after), strict=True
        ):
            found.append(_connection(f"{name}.{hc}", layer.get_submodule(hc)))
            found.append(_norm(f"{name}.{norm}", layer.get_submodule(norm)))
            if hc == "attn_hc":
                found += _inner_norms(name, layer)
            found.append(_mix(f"{name}.{hc}", f"{name}.{sublayer}", f"{streams}.streams"))
    found.append(_head("hc_head", model.get_submodule("model.hc_head")))
    found.append(_norm("norm", model.get_submodule("model.norm")))
    return found


def _inner_norms(name: str, layer: nn.Module) -> Iterator[Site]:
    norm = getattr(known.modeling(), known.RMSNORM)
    for path, member in layer.get_submodule("self_attn").named_modules():
        if isinstance(member, norm):
            yield _norm(short(f"{name}.self_attn.{path}"), member)


def _connection(name: str, module: Any) -> Site:
    def ours(rows: Tensors, options: Options) -> Tensors:
        parameters = (module.fn, module.scale, module.base)
        contract = {**options.contracts, "mhc_pre": options.contracts["mhc_pre_norm"]}
        hidden, link = boundary_open(
            rows[0], *parameters, eps=module.input_norm.eps, contract=contract, backend=options.backend
        )
        return link.post, link.comb, hidden

    def theirs(rows: Tensors) -> Tensors:
        post, comb, collapsed = module(rows[0][:, None])
        return post.flatten(0, 1), comb.flatten(0, 1), collapsed.flatten(0, 1)

    outputs = tuple(f"{name}.{part}" for part in ("post", "comb", "collapsed"))
    return Site(name, "connection", module, (f"{name}.streams",), outputs, (2,), ours, theirs)


def _norm(name: str, module: Any) -> Site:
    fused = name.endswith(tuple(norm for _, norm in CONNECTIONS))

    def ours(rows: Tensors, options: Options) -> Tensors:
        contract = dict(options.contracts)
        if fused:  # as the norm inside mhc_pre_norm
            contract["rmsnorm_residual"] = contract_of("rmsnorm_residual", contract["mhc_pre_norm"])
        return (
            rms_norm(rows[0], module.weight, eps=module.variance_epsilon, contract=contract, backend=options.backend),
        )

    def theirs(rows: Tensors) -> Tensors:
        return (module(rows[0][:, None])[:, 0].to(rows[0].dtype),)

    return Site(name, "norm", module, (f"{name}.input",), (name,), (1,), ours, theirs)


def _mix(connection: str, sublayer: str, streams: str) -> Site:
    def ours(rows: Tensors, options: Options) -> Tensors:
        contract = contract_of("mhc_post", options.contracts)
        return operator("mhc_post").forward(*rows, contract=contract, backend=options.backend)

    def theirs(rows: Tensors) -> Tensors:
        old, y, comb, post = (row[:, None] for row in rows)
        return (class_mix(old, y, comb, post)[:, 0],)

    inputs = (f"{connection}.streams", sublayer, f"{connection}.comb", f"{connection}.post")
    return Site(f"{connection.removesuffix('_hc')}_post", "mix", None, inputs, (streams,), (2, 1, 2, 1), ours, theirs)


def class_mix(streams: Tensor, sublayer: Tensor, comb: Tensor, post: Tensor) -> Tensor:
    """The expression inside the class's layer, in BF16 throughout."""
    dtype = streams.dtype
    mixed = torch.matmul(comb.to(dtype).transpose(-1, -2), streams)
    return post.to(dtype).unsqueeze(-1) * sublayer.unsqueeze(-2) + mixed


def _head(name: str, module: Any) -> Site:
    def ours(rows: Tensors, options: Options) -> Tensors:
        parameters = (module.hc_fn, module.hc_scale, module.hc_base)
        eps, backend = module.input_norm.eps, options.backend
        return (hyper_head(rows[0], *parameters, eps=eps, contract=options.contracts, backend=backend),)

    def theirs(rows: Tensors) -> Tensors:
        return (module(rows[0][:, None])[:, 0],)

    return Site(name, "head", module, (f"{name}.streams",), (name,), (2,), ours, theirs)
