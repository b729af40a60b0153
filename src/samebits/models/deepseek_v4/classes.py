"""The classes of ``transformers`` with our forwards: what the modules of a patched model are instances of.

A patched module has the same parameters, buffers, hooks and name of its class; only its class is one of these. So copies,
replicas and checkpoints of it work as before, and undoing the patch is giving the class back.

The hyper-connection and the norm behind it are one operation here. Both modules are still called where somebody has put a
hook on them, and are shown what they would have computed; a hook that would change it is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from samebits.models.deepseek_v4 import known
from samebits.models.sites import SITES, Site
from samebits.nn import Link, boundary_open, hyper_head, rms_norm

_code = known.modeling()


def _site(module: nn.Module, name: str = "") -> Site:
    sites: dict[str, Site] = vars(module)[SITES]
    return sites[name]


class DeepseekV4RMSNorm(_code.DeepseekV4RMSNorm):  # type: ignore[misc,name-defined]
    def forward(self, hidden_states: Tensor) -> Tensor:
        shown = _shown(self, hidden_states)
        if shown is not None:
            return shown
        site = _site(self)
        options = site.hit()
        if (
            site.operator == "mhc_pre_norm"
        ):  # the norm inside it has its contract, also when somebody calls it by itself
            options["contract"] = site.contract
        return rms_norm(hidden_states, self.weight, eps=self.variance_epsilon, **options)

    def samebits_parameters(self) -> Iterator[Tensor]:
        yield self.weight


class DeepseekV4HyperConnection(_code.DeepseekV4HyperConnection):  # type: ignore[misc,name-defined]
    def forward(self, hidden_streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Called by itself; in a layer, the layer runs it together with the norm and the post mix."""
        shown = _shown(self, hidden_streams)
        if shown is not None:
            return shown
        collapsed, link = _opened(self, None, hidden_streams)
        return link.post, link.comb, collapsed

    def samebits_parameters(self) -> Iterator[Tensor]:
        yield from (self.fn, self.base, self.scale)


class DeepseekV4HyperHead(_code.DeepseekV4HyperHead):  # type: ignore[misc,name-defined]
    def forward(self, x: Tensor) -> Tensor:
        options = _site(self).hit()
        return hyper_head(x, self.hc_fn, self.hc_scale, self.hc_base, eps=self.input_norm.eps, **options)

    def samebits_parameters(self) -> Iterator[Tensor]:
        yield from (self.hc_fn, self.hc_base, self.hc_scale)


class DeepseekV4DecoderLayer(_code.DeepseekV4DecoderLayer):  # type: ignore[misc,name-defined]
    def forward(self, hidden_states: Tensor, input_ids: Tensor | None = None, **kwargs: Any) -> Tensor:
        x, link = _boundary(self.attn_hc, self.input_layernorm, hidden_states)
        attn_output, _ = self.self_attn(x, **kwargs)
        hidden_states = self._close("attn_post", link, attn_output)
        x, link = _boundary(self.ffn_hc, self.post_attention_layernorm, hidden_states)
        return self._close("ffn_post", link, self.mlp(x, input_ids=input_ids))

    def _close(self, name: str, link: Link, sublayer: Tensor) -> Tensor:
        _site(self, name).hit()
        return link.close(sublayer)


for _class in (DeepseekV4RMSNorm, DeepseekV4HyperConnection, DeepseekV4HyperHead, DeepseekV4DecoderLayer):
    assert _class.__bases__ == (getattr(_code, _class.__name__),)


def _opened(connection: Any, norm: Any, streams: Tensor) -> tuple[Tensor, Link]:
    options = _site(connection).hit()
    if norm is not None:
        _site(norm).hit()
    return boundary_open(
        streams,
        connection.fn,
        connection.scale,
        connection.base,
        None if norm is None else norm.weight,
        eps=connection.input_norm.eps,
        norm_eps=1e-6 if norm is None else norm.variance_epsilon,
        **options,
    )


def _boundary(connection: nn.Module, norm: nn.Module, streams: Tensor) -> tuple[Tensor, Link]:
    """One open call for both modules; either is called as well if somebody listens to it."""
    x, link = _opened(connection, norm, streams)
    if _has_hooks(connection):
        _show(connection, streams, (link.post, link.comb, link.hidden))
    if _has_hooks(norm):
        _show(norm, link.hidden, x)
    return x, link


# --- hooks ------------------------------------------------------------------------------------------------------------

_SHOWN = "samebits_shown"
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def _has_hooks(module: nn.Module) -> bool:
    return torch_module._has_any_global_hook() or any(getattr(module, hooks) for hooks in _HOOKS)


def _show(module: nn.Module, given: Tensor, result: Any) -> None:
    """Call a module for the sake of its hooks: it takes ``given`` and returns ``result``, which was computed elsewhere."""
    vars(module)[_SHOWN] = (given, result)
    try:
        returned = module(given)
    finally:
        del vars(module)[_SHOWN]
    if returned is not result:
        raise RuntimeError(f"{_site(module).name}: {_OBSERVE}")


def _shown(module: nn.Module, given: Tensor) -> Any:
    if _SHOWN not in vars(module):
        return None
    expected, result = vars(module)[_SHOWN]
    if given is not expected:
        raise RuntimeError(f"{_site(module).name}: {_OBSERVE}")
    return result


_OBSERVE = (
    "a hook changes what this module takes or returns (a full backward hook does, too), but samebits runs the "
    "hyper-connection and its norm as one operation; hooks on these two may only look. Use a hook on the layer, or "
    "samebits.unpatch the model"
)
