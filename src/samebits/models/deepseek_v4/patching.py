"""``samebits.patch``: put the operators at every call site of a DeepSeek-V4 model, and take them out again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from samebits.models.deepseek_v4 import known
from samebits.models.sites import SITES, Patched, Site, SiteReport
from samebits.nn.families import FAMILIES, OPERATORS, contract_of

CONNECTIONS = (("attn_hc", "input_layernorm"), ("ffn_hc", "post_attention_layernorm"))
"""(hyper-connection, norm behind it) of both halves of a decoder layer."""
CHOICES = {"fast": "fast-dsv4", "published": "ascending"}
"""What ``contracts`` may say instead of a family."""
_FIXED = {"hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6}


def patch(model: nn.Module, contracts: str | Mapping[str, str] = "fast", *, backend: str | None = None) -> Patched:
    """Run a DeepSeek-V4 model of ``transformers`` with our operators, at every place that they cover.

    Replaced are both hyper-connections and the norms behind them (``mhc_pre_norm``), the two post mixes inside the layer
    (``mhc_post``), the head's collapse (``hyper_head``), and every RMSNorm with a weight (``rmsnorm_residual``), those
    inside the attention included: in transformers 5.17 they return FP32, and a BF16 model does not run with them.
    Attention, experts, router and projections stay the class's. Only this model changes: no class, no other instance.

    Args:
        model: ``DeepseekV4ForCausalLM``, ``DeepseekV4Model``, one ``DeepseekV4DecoderLayer``, or any module around them,
            in BF16 with what the class keeps in FP32 left in FP32, as ``from_pretrained(dtype=torch.bfloat16)`` gives it.
        contracts: ``"fast"`` (``fast-dsv4``: fastest, with the RMS the checkpoint was trained with), ``"published"``
            (``ascending``: the published manifest), another family by its name (``"ascending-dsv4"``, ``"fast-dsv4"``), or
            operator name to contract name, published where not named. Both ends of a stack must use the same.
        backend: of every operator; None takes the first that accepts the call.

    Returns:
        What is in place, as :func:`patched`.

    Raises:
        ModuleNotFoundError: transformers is missing or too old.
        TypeError: no DeepSeek-V4 module inside; a subclass or a replaced forward; dtypes other than the above.
        RuntimeError: patched already; code of a ``transformers`` release that was never verified.
        ValueError: an unknown contract, or a configuration the operators do not have (four streams, 20 Sinkhorn steps).
    """
    chosen = _resolve(contracts)
    code = known.modeling()
    already = patched_modules(model)
    if already:
        raise RuntimeError("this model is patched already; samebits.unpatch it first")
    found = list(_replaceable(model, code))
    if not any(kind == known.LAYER for _, _, kind in found):
        raise TypeError(
            f"{type(model).__module__}.{type(model).__qualname__} holds no {known.LAYER}: samebits.patch knows the "
            f"DeepSeek-V4 classes of transformers {', '.join(known.VERIFIED)} (DeepseekV4ForCausalLM, DeepseekV4Model, "
            f"{known.LAYER}); this is transformers {known.transformers_version()}. It also knows MiniMax-H3 of diffusers "
            "(MiniMaxH3Transformer3DModel)"
        )
    for name, module, kind in found:
        known.require(module, kind, name)
        _require_parameters(name, module)
        _require_configuration(name, module)
    _require_bfloat16(model, found)

    from samebits.models.deepseek_v4 import classes

    fused = _fused(found)
    for name, module, kind in found:
        sites = {
            part: Site(f"{name}.{part}" if part else name, operator, chosen[operator], backend, family=chosen)
            for part, operator in _operators(kind, name in fused).items()
        }
        vars(module)[SITES] = sites
        module.__class__ = getattr(classes, kind)
    return patched(model)


def unpatch(model: nn.Module) -> None:
    """Undo :func:`patch`: every module has its class back and nothing of ours is left in it.

    Raises:
        RuntimeError: the model is not patched.
    """
    modules = patched_modules(model)
    if not modules:
        raise RuntimeError("this model is not patched; samebits.patch it first")
    for _, module in modules:
        del vars(module)[SITES]
        module.__class__ = type(module).__bases__[0]


def patched(model: nn.Module) -> Patched:
    """The sites of a patched model, their contracts, and how often each has run.

    Raises:
        RuntimeError: the model is not patched.
    """
    modules = patched_modules(model)
    if not modules:
        raise RuntimeError("this model is not patched; samebits.patch it first")
    sites = [site for _, module in modules for site in vars(module)[SITES].values()]
    return Patched(
        release=f"transformers {known.transformers_version()}",
        contracts=dict(sites[0].family or {}),
        backend=sites[0].backend,
        sites=tuple(SiteReport(s.name, s.operator, s.contract, s.hits) for s in sites),
    )


def patched_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name, module) of every module that a patch has replaced."""
    return [(name, member) for name, member in model.named_modules() if SITES in vars(member)]


def to_bfloat16(model: nn.Module) -> nn.Module:
    """Cast in place as ``from_pretrained(dtype=torch.bfloat16)`` does: not what the class's strict list keeps in FP32.

    For a model that was built from a configuration; ``Module.to(torch.bfloat16)`` does not read that list.
    """
    strict = set(model._keep_in_fp32_modules_strict)  # type: ignore[arg-type]
    for name, parameter in model.named_parameters():
        if strict.isdisjoint(name.split(".")):
            parameter.data = parameter.data.bfloat16()
    return model


# --- what is there, and whether it may be replaced ----------------------------------------------------------------------

Found = tuple[str, nn.Module, str]
"""Name, module, and the class it replaces."""


def _resolve(contracts: str | Mapping[str, str]) -> dict[str, str]:
    family: Any = CHOICES.get(contracts, contracts) if isinstance(contracts, str) else dict(contracts)
    if isinstance(family, str) and family not in FAMILIES:
        known_words = ", ".join(map(repr, [*CHOICES, "ascending-dsv4", "fast-dsv4"]))
        raise ValueError(f"no contracts named {contracts!r}; choose {known_words}, or map operators to contracts")
    if not isinstance(family, str) and "mhc_pre" in family:
        raise ValueError("contracts names 'mhc_pre', which the model calls as a part of 'mhc_pre_norm'; name that")
    chosen = {operator: contract_of(operator, family) for operator in OPERATORS}
    return chosen | {"mhc_pre": chosen["mhc_pre_norm"]}  # where a hyper-connection is called by itself


def _replaceable(model: nn.Module, code: ModuleType) -> Iterator[Found]:
    kinds = (known.LAYER, known.HYPER_CONNECTION, known.HYPER_HEAD, known.RMSNORM)
    for name, module in model.named_modules():
        for kind in kinds:
            if isinstance(module, getattr(code, kind)):
                yield name or type(module).__name__, module, kind


def _fused(found: list[Found]) -> set[str]:
    """Names of the members that a layer runs as one operation with another."""
    layers = {name: module for name, module, kind in found if kind == known.LAYER}
    members = {id(getattr(layer, part)) for layer in layers.values() for pair in CONNECTIONS for part in pair}
    return {name for name, module, _ in found if id(module) in members}


def _operators(kind: str, fused: bool) -> dict[str, str]:
    """Sites of a module: name of the part ('' for the module itself) to operator."""
    if kind == known.LAYER:
        return {"attn_post": "mhc_post", "ffn_post": "mhc_post"}
    if kind == known.HYPER_HEAD:
        return {"": "hyper_head"}
    if fused:
        return {"": "mhc_pre_norm"}
    return {"": "mhc_pre" if kind == known.HYPER_CONNECTION else "rmsnorm_residual"}


def _require_parameters(name: str, module: nn.Module) -> None:
    for parameter_name, parameter in module.named_parameters(recurse=False):
        if parameter.dtype != torch.float32:
            raise TypeError(
                f"{name}.{parameter_name} is {parameter.dtype}, but the operator takes FP32: this class keeps it in FP32 "
                f"when it is loaded with from_pretrained(dtype=torch.bfloat16); Module.to(torch.bfloat16) does not"
            )


def _require_configuration(name: str, module: nn.Module) -> None:
    for attribute, value in _FIXED.items():
        found = getattr(module, attribute, value)
        if found != value:
            raise ValueError(
                f"{name}: {attribute} is {found}, but the operators have {attribute} = {value} in their contract"
            )
    if type(module).__name__ == known.HYPER_HEAD and getattr(module, "eps", _FIXED["hc_eps"]) != _FIXED["hc_eps"]:
        raise ValueError(f"{name}: eps is {module.eps}, but hyper_head has {_FIXED['hc_eps']} in its contract")


def _require_bfloat16(model: nn.Module, found: list[Found]) -> None:
    """The streams must be BF16. They have the dtype of the embedding, and of what the layers' projections return."""
    suspects: list[tuple[str, Tensor | None]] = [
        (f"{name}.self_attn.o_b_proj", getattr(layer.get_submodule("self_attn.o_b_proj"), "weight", None))
        for name, layer, kind in found
        if kind == known.LAYER
    ]
    suspects += [(name, member.weight) for name, member in model.named_modules() if isinstance(member, nn.Embedding)]
    for name, weight in suspects:
        if weight is not None and weight.dtype in (torch.float32, torch.float16, torch.float64):
            raise TypeError(
                f"{name} is {weight.dtype}, so the residual streams would not be BF16, which the operators take: load the "
                f"model with from_pretrained(dtype=torch.bfloat16), or cast a fresh one with "
                f"samebits.models.deepseek_v4.to_bfloat16(model)"
            )
