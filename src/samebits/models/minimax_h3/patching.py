"""``samebits.patch`` for MiniMax-H3: the operators at every call site of diffusers' transformer, and out of it again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from samebits import registry
from samebits.models.minimax_h3 import known
from samebits.models.minimax_h3.geometry import DTYPE
from samebits.models.sites import SITES, Patched, Site, SiteReport
from samebits.sequence_ops.attention import contracts as attention

OPERATORS = (
    "adaln_gate_residual", "adaln_projection", "attention", "final_adaln_out", "fp32_linear", "linear", "qk_norm_rope",
    "qk_rmsnorm", "rmsnorm", "rmsnorm_modulated", "swiglu", "timestep_mlp", "timestep_sinusoid",
)  # fmt: skip
"""What runs in a patched model."""
DEFAULTS = ("fast", "published")
"""Words for contracts that a family of operators may have; these have one each for every choice but attention's."""
TIME_FEATURES = {"flip_sin_to_cos": True, "downscale_freq_shift": 0, "scale": 1}


def patch(model: nn.Module, contracts: str | Mapping[str, str] = "fast", *, backend: str | None = None) -> Patched:
    """Run a MiniMax-H3 transformer of ``diffusers`` with our operators, at every place that they cover.

    Replaced are all linears (BF16 and the FP32 ones), norms with what follows them (modulation, rotation), the AdaLN
    projections, gated residuals, SwiGLU, the timestep embedder, and attention by a processor. What is left to torch are copies
    and single element-wise operations: casts, plain residuals of the refiner, angles, the packing of rows. Only this model
    changes: no class, no other instance. Adapters around a linear (``peft``) keep working, put on before or after; so does
    gradient checkpointing.

    Args:
        model: ``MiniMaxH3Transformer3DModel``, one ``MiniMaxH3TransformerBlock``, or any module around them, in BF16 or FP16
            with what the class keeps in FP32 left in FP32, as ``from_pretrained(torch_dtype=torch.bfloat16)`` gives it.
        contracts: operator name to contract name, e.g. ``{"attention": "fa2"}``; the default contract where not named.
            Both ends of a stack must use the same.
        backend: of every operator; None takes the first that accepts the call.

    Raises:
        ImportError: diffusers is missing or too old.
        TypeError: no such module inside; a subclass, a replaced forward, another attention processor; other dtypes.
        RuntimeError: patched already; code of a ``diffusers`` release that was never verified; an attention backend was set.
        ValueError: an unknown contract or operator, or a configuration that the operators do not have.
    """
    chosen = resolve(contracts)
    known.require_known()
    if patched_modules(model) or _processors(model):
        raise RuntimeError("this model is patched already; samebits.unpatch it first")
    if not any(isinstance(member, (known.home(known.BLOCK), known.home(known.MODEL))) for member in model.modules()):
        raise TypeError(
            f"{type(model).__module__}.{type(model).__qualname__} holds no {known.BLOCK} of diffusers {known.version()}"
        )
    plan = _Plan(chosen, backend)
    for name, module in model.named_modules():
        plan.visit(name, module)
    plan.check()
    plan.apply()
    return patched(model)


def unpatch(model: nn.Module) -> None:
    """Undo :func:`patch`: every module has its class and its processor back, and nothing of ours is left.

    Raises:
        RuntimeError: the model is not patched.
    """
    modules, processors = _require_patched(model)
    for _, module in modules:
        del vars(module)[SITES]
        module.__class__ = type(module).__bases__[0]
    for _, module in processors:
        module.set_processor(module.processor.original)  # type: ignore[operator,union-attr]


def patched(model: nn.Module) -> Patched:
    """The sites of a patched model, their contracts, and how often each has run.

    Raises:
        RuntimeError: the model is not patched.
    """
    modules, processors = _require_patched(model)
    holders: list[Any] = [module for _, module in modules] + [module.processor for _, module in processors]
    sites = [site for holder in holders for site in vars(holder)[SITES].values()]
    return Patched(
        release=f"diffusers {known.version()}",
        contracts={site.operator: site.contract for site in sites},
        backend=sites[0].backend,
        sites=tuple(
            SiteReport(site.name, site.operator, site.contract, site.hits)
            for site in sites
            if not site.inside or site.hits
        ),
        adapters=tuple(name.removesuffix(_BASE) for name, _ in modules if name.endswith(_BASE)),
    )


def patched_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name, module) of every module whose class a patch has replaced."""
    from samebits.models.minimax_h3 import classes

    ours = tuple(classes.REPLACED.values())
    return [(name, member) for name, member in model.named_modules() if type(member) in ours]


def to_bfloat16(model: nn.Module) -> nn.Module:
    """Cast in place as ``from_pretrained(torch_dtype=torch.bfloat16)`` does: all but what the class keeps in FP32.

    For a model that was built from a configuration; ``Module.to(torch.bfloat16)`` does not read that list.
    """
    kept: tuple[str, ...] = tuple(known.home(known.MODEL)._keep_in_fp32_modules)
    for name, parameter in model.named_parameters():
        if not any(word in name for word in kept):
            parameter.data = parameter.data.to(DTYPE)
    return model


# --- what is there, and whether it may be replaced ----------------------------------------------------------------------

_BASE = ".base_layer"
"""How ``peft`` calls the linear that an adapter stands around."""


def resolve(contracts: str | Mapping[str, str]) -> dict[str, str]:
    """Every operator with its contract.

    Raises:
        ValueError: an operator that is not used here, or a contract that it does not have.
    """
    if isinstance(contracts, str):
        if contracts not in DEFAULTS:
            words = ", ".join(map(repr, DEFAULTS))
            raise ValueError(f"no contracts named {contracts!r}; choose one of {words}, or map operators to contracts")
        contracts = {}
    for operator in contracts:
        if operator not in OPERATORS:
            raise ValueError(f"contracts names {operator!r}, which is not used here; choose of {', '.join(OPERATORS)}")
    return {operator: _contract(operator, contracts.get(operator)) for operator in OPERATORS}


def _contract(operator: str, asked: str | None) -> str:
    if operator == attention.NAME:
        return attention.recipe(asked or attention.CUDNN.contract.name).contract.name
    declared = "adaln_projection" if operator == "final_adaln_out" else operator
    return registry.spec(declared).contract(asked).name


def _require_patched(model: nn.Module) -> tuple[list[tuple[str, nn.Module]], list[tuple[str, nn.Module]]]:
    modules, processors = patched_modules(model), _processors(model)
    if not modules:
        raise RuntimeError("this model is not patched; samebits.patch it first")
    return modules, processors


def _processors(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name, attention) of every attention with our processor."""
    return [
        (name, member) for name, member in model.named_modules() if hasattr(getattr(member, "processor", None), SITES)
    ]


@dataclass(frozen=True)
class _Swap:
    name: str
    module: nn.Module
    kind: type
    """Class that it must have."""
    sites: dict[str, Site]


class _Plan:
    """Everything that will be replaced, collected and checked before anything is."""

    def __init__(self, contracts: Mapping[str, str], backend: str | None) -> None:
        self.contracts, self.backend = contracts, backend
        self.swaps: list[_Swap] = []
        self.attentions: list[tuple[str, Any, dict[str, Site]]] = []
        self.body: list[tuple[str, nn.Module]] = []
        """Modules that must be in the dtype of the rows."""
        self.islands: list[tuple[str, nn.Module]] = []
        """Modules that must be FP32."""

    def visit(self, name: str, module: Any) -> None:
        kinds = {
            known.MODEL: self._model,
            known.REFINER: self._refiner,
            known.REFINER_BLOCK: self._refiner_block,
            known.BLOCK: self._block,
        }
        for kind, add in kinds.items():
            if isinstance(module, known.home(kind)):
                # the parts of a whole model have the names that it gives them, those of a block alone the block's
                label = name or ("" if kind == known.MODEL else type(module).__name__)
                known.require_class(module, known.home(kind), label or "the model")
                add(label, module)

    def check(self) -> None:
        for swap in self.swaps:
            known.require_class(swap.module, swap.kind, swap.name)
        for name, module, _ in self.attentions:
            self._check_attention(name, module)
        for name, module in self.islands:
            _require_dtype(name, module, (torch.float32,))
        dtypes = {parameter.dtype for _, module in self.body for parameter in module.parameters(recurse=False)}
        for name, module in self.body:
            _require_dtype(name, module, (torch.bfloat16, torch.float16))
        if len(dtypes) > 1:
            found = ", ".join(sorted(map(str, dtypes)))
            raise TypeError(f"the blocks have parameters of several dtypes ({found}); expected one of them throughout")

    def apply(self) -> None:
        from samebits.models.minimax_h3 import classes

        for swap in self.swaps:
            vars(swap.module)[SITES] = swap.sites
            swap.module.__class__ = classes.REPLACED[swap.kind]
        for _, module, sites in self.attentions:
            module.set_processor(classes.AttnProcessor(module.processor, sites))

    def _site(self, name: str, operator: str, inside: bool = False) -> Site:
        return Site(name, operator, self.contracts[operator], self.backend, inside)

    def _swap(self, name: str, module: nn.Module, kind: type, **sites: Site) -> None:
        self.swaps.append(_Swap(name, module, kind, {"" if key == "_" else key: site for key, site in sites.items()}))

    def _linear(self, name: str, module: Any, inside: bool = False, island: bool = False) -> None:
        while not isinstance(module, nn.Linear) and hasattr(module, "base_layer"):
            name, module = name + _BASE, module.base_layer
        (self.islands if island else self.body).append((name, module))
        self._swap(name, module, nn.Linear, _=self._site(name, "fp32_linear" if island else "linear", inside))

    def _norm(self, name: str, module: Any, operator: str, inside: bool = False) -> None:
        self.body.append((name, module))
        self._swap(name, module, nn.RMSNorm, _=self._site(name, operator, inside))

    def _model(self, name: str, module: Any) -> None:
        inside = f"{name}." if name else ""
        for part in ("proj_in", "audio_proj_in", "proj_out", "audio_proj_out"):
            self._linear(inside + part, getattr(module, part), island=True)
        self._linear(f"{inside}context_embedder", module.context_embedder)
        self._time(f"{inside}time_proj", module.time_proj, f"{inside}time_embedder", module.time_embedder)
        self._norm_out(f"{inside}norm_out", module.norm_out)

    def _time(self, name: str, features: Any, embedder_name: str, embedder: Any) -> None:
        for attribute, value in TIME_FEATURES.items():
            if getattr(features, attribute, value) != value:
                raise ValueError(f"{name}: {attribute} is {getattr(features, attribute)}, expected {value}")
        self._swap(name, features, known.home(known.TIMESTEPS), _=self._site(name, "timestep_sinusoid"))
        site = self._site(embedder_name, "timestep_mlp")
        self._swap(embedder_name, embedder, known.home(known.TIME_EMBEDDING), _=site)
        for part in ("linear_1", "linear_2"):
            self._linear(f"{embedder_name}.{part}", getattr(embedder, part), inside=True, island=True)

    def _norm_out(self, name: str, module: Any) -> None:
        apart = self._site(f"{name}.norm", "rmsnorm_modulated", inside=True)
        whole = self._site(name, "final_adaln_out")
        self._swap(name, module, known.home(known.NORM_OUT), _=whole, norm=apart)
        self._norm(f"{name}.norm", module.norm, "rmsnorm", inside=True)
        self._linear(f"{name}.linear", module.linear, inside=True)

    def _refiner(self, name: str, module: Any) -> None:
        self._norm(f"{name}.final_norm", module.final_norm, "rmsnorm")

    def _refiner_block(self, name: str, module: Any) -> None:
        for part in ("norm1", "norm2"):
            self._norm(f"{name}.{part}", getattr(module, part), "rmsnorm")
        self._attention(f"{name}.attn", module.attn, rotary=False)
        self._feed_forward(f"{name}.ff", module.ff)

    def _block(self, name: str, module: Any) -> None:
        norms = {part: self._site(f"{name}.{part}", "rmsnorm_modulated") for part in ("norm1", "norm2")}
        lines = ("attn_residual", "ff_residual")
        gates = {part: self._site(f"{name}.{part}", "adaln_gate_residual") for part in lines}
        self._swap(name, module, known.home(known.BLOCK), **norms, **gates)
        for part in norms:
            self._norm(f"{name}.{part}", getattr(module, part), "rmsnorm", inside=True)
        projection = f"{name}.adaln_proj"
        self._swap(
            projection,
            module.adaln_proj,
            known.home(known.MODULATION),
            _=self._site(projection, "adaln_projection"),
        )
        self._linear(f"{projection}.linear", module.adaln_proj.linear, inside=True)
        self._attention(f"{name}.attn", module.attn, rotary=True)
        self._feed_forward(f"{name}.ff", module.ff)

    def _attention(self, name: str, module: Any, rotary: bool) -> None:
        sites = {"attention": self._site(name, "attention")}
        if rotary:
            sites |= {part: self._site(f"{name}.{part}", "qk_norm_rope") for part in ("norm_q", "norm_k")}
        self.attentions.append((name, module, sites))
        for part in ("norm_q", "norm_k"):
            self._norm(f"{name}.{part}", getattr(module, part), "qk_rmsnorm", inside=rotary)
        for part in ("to_qkv",) if module.fused_projections else ("to_q", "to_k", "to_v"):
            self._linear(f"{name}.{part}", getattr(module, part))
        self._linear(f"{name}.to_out.0", module.to_out[0])

    def _feed_forward(self, name: str, module: Any) -> None:
        first, _, last = module.net
        self._swap(f"{name}.net.0", first, known.home(known.SWIGLU), _=self._site(f"{name}.net.0", "swiglu"))
        self._linear(f"{name}.net.0.proj", first.proj)
        self._linear(f"{name}.net.2", last)

    def _check_attention(self, name: str, module: Any) -> None:
        known.require_class(module, known.home(known.ATTENTION), name)
        processor = module.processor
        if type(processor) is not known.home(known.PROCESSOR):
            raise TypeError(
                f"{name} has the processor {type(processor).__module__}.{type(processor).__qualname__}; only "
                f"{known.PROCESSOR} is replaced (another may compute something else)"
            )
        if processor._attention_backend is not None:
            raise RuntimeError(
                f"{name}: the attention backend {processor._attention_backend} was chosen; reset_attention_backend() first, "
                f"and choose a contract: samebits.patch(model, {{'attention': 'cudnn' or 'fa2'}})"
            )
        if module.head_dim not in attention.HEAD_DIMS:
            words = " or ".join(map(str, attention.HEAD_DIMS))
            raise ValueError(f"{name}: heads have {module.head_dim} channels, samebits.attention takes {words}")


def _require_dtype(name: str, module: nn.Module, accepted: tuple[torch.dtype, ...]) -> None:
    for part, parameter in module.named_parameters(recurse=False):
        if parameter.dtype not in accepted:
            words = " or ".join(map(str, accepted))
            raise TypeError(
                f"{name}.{part} is {parameter.dtype}, expected {words}: load the model with "
                f"from_pretrained(torch_dtype=torch.bfloat16), or cast a fresh one with "
                f"samebits.models.minimax_h3.patching.to_bfloat16(model); Module.to(torch.bfloat16) casts what must stay FP32"
            )
