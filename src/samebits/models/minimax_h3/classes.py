"""The classes of ``diffusers`` and torch with our forwards: what the modules of a patched model are instances of.

A patched module has the same parameters, hooks and name of its class; only its class is one of these. So copies, adapters
around a linear and checkpoints work as before, and undoing the patch is giving the class back.

Where several of the model's operations are one of ours, the members that it passes over are still shown to their hooks.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import silu

import samebits
from samebits.models.hooks import hooked, show
from samebits.models.minimax_h3 import known
from samebits.models.sites import SITES, Site
from samebits.ops.rope_3axis.shape import angles_of

SITE = ""
"""Name of the one site of a module that has no others."""


def site(module: Any, name: str = SITE) -> Site:
    found: Site = vars(module)[SITES][name]
    return found


def _ours(*members: Any) -> bool:
    """Whether all are patched modules themselves, and not an adapter around one."""
    return all(SITES in vars(member) for member in members)


class Linear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        at = site(self)
        made: Tensor = getattr(samebits, at.operator)(input, self.weight, self.bias, **at.hit())
        return made


class RMSNorm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        at = site(self)
        function = samebits.qk_rmsnorm if at.operator in ("qk_rmsnorm", "qk_norm_rope") else samebits.rmsnorm
        made: Tensor = function(x, self.weight, eps=self.eps, **at.hit())
        return made


class SwiGLU(known.home(known.SWIGLU)):  # type: ignore[misc]
    def forward(self, hidden_states: Tensor) -> Tensor:
        made: Tensor = samebits.swiglu(self.proj(hidden_states), **site(self).hit())
        return made


class Timesteps(known.home(known.TIMESTEPS)):  # type: ignore[misc]
    def forward(self, timesteps: Tensor) -> Tensor:
        made: Tensor = samebits.timestep_sinusoid(timesteps, self.num_channels, **site(self).hit())
        return made


class TimestepEmbedding(known.home(known.TIME_EMBEDDING)):  # type: ignore[misc]
    def forward(self, sample: Tensor, condition: Tensor | None = None) -> Tensor:
        one, two = self.linear_1, self.linear_2
        if condition is not None or not _ours(one, two):
            made: Tensor = super().forward(sample, condition)
            return made
        at = site(self)
        show(one, f"{at.name}.linear_1", lambda: sample)
        show(two, f"{at.name}.linear_2", lambda: silu(one.forward(sample)))
        made = samebits.timestep_mlp(sample, one.weight, one.bias, two.weight, two.bias, **at.hit())
        return made


class MiniMaxH3AdaLayerNormModulation(known.home(known.MODULATION)):  # type: ignore[misc]
    def forward(self, temb: Tensor) -> tuple[Tensor, ...]:
        if _ours(self.linear):
            return self._chunks(_projection(self, temb))
        # an adapter around the projection
        return self._chunks(self.linear(silu(temb).to(self.linear.weight.dtype)))

    def _chunks(self, table: Tensor) -> tuple[Tensor, ...]:
        return table.view(-1, 6 * self.hidden_size).chunk(6, dim=-1)


def _projection(module: Any, temb: Tensor) -> Tensor:
    at, linear = site(module), module.linear
    show(linear, f"{at.name}.linear", lambda: silu(temb).to(linear.weight.dtype))
    made: Tensor = samebits.adaln_projection(temb, linear.weight, linear.bias, **at.hit())
    return made


class MiniMaxH3AdaLayerNormOut(known.home(known.NORM_OUT)):  # type: ignore[misc]
    def forward(self, hidden_states: Tensor, temb: Tensor, timestep_indices: Tensor) -> Tensor:
        norm, linear, at = self.norm, self.linear, site(self)
        show(norm, f"{at.name}.norm", lambda: hidden_states)
        if _ours(linear):
            show(linear, f"{at.name}.linear", lambda: silu(temb).to(linear.weight.dtype))
            made: Tensor = samebits.final_adaln_out(
                hidden_states, norm.weight, temb, linear.weight, linear.bias, timestep_indices, eps=norm.eps, **at.hit()
            )
            return made
        shift, scale = linear(silu(temb).to(linear.weight.dtype)).chunk(2, dim=-1)
        options = site(self, "norm").hit()
        made = samebits.rmsnorm_modulated(
            hidden_states, norm.weight, shift, scale, timestep_indices, eps=norm.eps, **options
        )
        return made


class MiniMaxH3TransformerBlock(known.home(known.BLOCK)):  # type: ignore[misc]
    def forward(
        self,
        hidden_states: Tensor,
        temb: Tensor,
        adaln_indices: Tensor,
        rotary_emb: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = self.adaln_proj(temb)
        given = self._modulated("norm1", hidden_states, shift_msa, scale_msa, adaln_indices)
        sublayer = self.attn(given, rotary_emb, attention_mask)
        hidden_states = self._gated("attn_residual", hidden_states, sublayer, gate_msa, adaln_indices)
        given = self._modulated("norm2", hidden_states, shift_mlp, scale_mlp, adaln_indices)
        return self._gated("ff_residual", hidden_states, self.ff(given), gate_mlp, adaln_indices)

    def _modulated(self, name: str, x: Tensor, shift: Tensor, scale: Tensor, index: Tensor) -> Tensor:
        norm, at = getattr(self, name), site(self, name)
        show(norm, at.name, lambda: x)
        made: Tensor = samebits.rmsnorm_modulated(x, norm.weight, shift, scale, index, eps=norm.eps, **at.hit())
        return made

    def _gated(self, name: str, residual: Tensor, sublayer: Tensor, gate: Tensor, index: Tensor) -> Tensor:
        options = site(self, name).hit()
        made: Tensor = samebits.adaln_gate_residual(residual, sublayer, gate, index, **options)
        return made


class AttnProcessor:
    """Attention by our operators, through diffusers' processor interface; ``original`` is what it stands in for."""

    _attention_backend: Any = None
    _parallel_config: Any = None

    def __init__(self, original: Any, sites: dict[str, Site]) -> None:
        self.original = original
        setattr(self, SITES, sites)

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        at = site(self, "attention")
        self._refuse(at.name, attention_mask)
        if attn.fused_projections:
            if type(attn.to_qkv) is nn.Linear:
                raise RuntimeError(
                    f"{at.name}: projections were fused in a patched model; fuse them, then samebits.patch it"
                )
            parts = attn.to_qkv(hidden_states).chunk(3, dim=-1)
        else:
            parts = _projections(hidden_states, attn.to_q, attn.to_k, attn.to_v)
        shape = (*hidden_states.shape[:-1], attn.heads, -1)
        query, key, value = (part.view(*shape) for part in parts)
        if rotary_emb is not None:
            rotary_emb = angles_of("qk_norm_rope", query, *rotary_emb)  # once for both
        query = self._normed("norm_q", attn.norm_q, query, rotary_emb)
        key = self._normed("norm_k", attn.norm_k, key, rotary_emb)
        attended, _ = samebits.attention(query, key, value, **at.hit())
        project, dropout, *_ = attn.to_out  # an index into a list of modules is looked up by its name
        made: Tensor = dropout(project(attended.flatten(2, 3)))
        return made

    def _normed(self, name: str, norm: Any, x: Tensor, rotary_emb: tuple[Tensor, Tensor] | None) -> Tensor:
        made: Tensor
        if rotary_emb is None:
            made = norm(x)
            return made
        at = site(self, name)
        show(norm, at.name, lambda: x)
        made = samebits.qk_norm_rope(x, norm.weight, *rotary_emb, eps=norm.eps, **at.hit())
        return made

    def _refuse(self, name: str, attention_mask: Tensor | None) -> None:
        if attention_mask is not None:
            raise ValueError(
                f"{name}: an attention mask was given; samebits.attention has none. Unpatch the model for it"
            )
        if self._attention_backend is not None:
            raise RuntimeError(
                f"{name}: the attention backend {self._attention_backend} was set on a patched model; choose a contract in "
                f"samebits.patch(model, {{'attention': 'cudnn' or 'fa2'}}) instead"
            )
        if self._parallel_config is not None:
            raise RuntimeError(f"{name}: context parallelism was set up, which the patched attention does not have")


def _projections(x: Tensor, *members: Any) -> tuple[Tensor, ...]:
    """Linears of the same rows: in one call where each is its forward and nothing else."""
    if not all(map(_plain, members)):
        return tuple(member(x) for member in members)
    options = [site(member).hit() for member in members]
    weights, biases = [member.weight for member in members], [member.bias for member in members]
    return samebits.linear_group(x, weights, biases, **options[0])


def _plain(member: Any) -> bool:
    """Whether this is our linear, with no adapter around it, no hook on it and no other forward in its place."""
    return type(member) is Linear and "forward" not in vars(member) and not hooked(member)


REPLACED: dict[type, type] = {
    cls.__bases__[0]: cls
    for cls in (
        Linear,
        RMSNorm,
        SwiGLU,
        Timesteps,
        TimestepEmbedding,
        MiniMaxH3AdaLayerNormModulation,
        MiniMaxH3AdaLayerNormOut,
        MiniMaxH3TransformerBlock,
    )
}
"""Class of the model to ours."""
