"""The border between the residual streams of a hyper-connection and a sublayer, as two differentiable calls.

    normalized, link = boundary_open(streams, weight, gain, bias, gamma)
    streams = boundary_close(link, sublayer(normalized))

The gradient of the streams that enter has three legs: collapse, controller and post mix. Autograd would round the first
two together to BF16, the third on its own, and then their sum: three roundings, where the contract has one. So the post
mix gives its upstream gradient to the open call, through a carrier (see ``continued.py``), and all legs are merged there:
bf16((collapse + controller) + post mix), every plus rounded to FP32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samebits.autograd import refuse_second_derivative, refuse_tangents
from samebits.nn.continued import Continued
from samebits.nn.families import Contracts, contract_of
from samebits.nn.gain import SEGMENTS
from samebits.operator import LIBRARY
from samebits.registry import operator

_CARRIES = ("grad_streams", "residual")
_PRE = Continued(operator("mhc_pre"), carries=_CARRIES, segments=SEGMENTS)
_PRE_NORM = Continued(operator("mhc_pre_norm"), carries=_CARRIES, segments=SEGMENTS)
_HEAD = Continued(operator("hyper_head"), segments=(4,))
_NORM = Continued(operator("rmsnorm_residual"))
_POST = operator("mhc_post")


class Link:
    """What :func:`boundary_close` needs to know of the :func:`boundary_open` it belongs to. Close it once.

    Attributes:
        streams: (..., 4, D) BF16, as given to the open call.
        hidden: (..., D) BF16, the collapsed streams. Differentiable.
        post: (..., 4) FP32, weight of the sublayer's output in each new stream.
        comb: (..., 4, 4) FP32, weight of old stream i in new stream j.
    """

    def __init__(
        self,
        streams: Tensor,
        hidden: Tensor,
        post: Tensor,
        comb: Tensor,
        carrier: Tensor | None,
        contract: str,
        backend: str | None,
    ) -> None:
        self.streams = streams
        self.hidden = hidden
        self.post = post
        self.comb = comb
        self._carrier = carrier
        self._contract = contract
        self._backend = backend
        self._closed = False

    def close(self, sublayer: Tensor) -> Tensor:
        """:func:`boundary_close`."""
        return boundary_close(self, sublayer)


def boundary_open(
    residual: Tensor,
    weight: Tensor,
    gain: Tensor,
    bias: Tensor,
    gamma: Tensor | None = None,
    *,
    eps: float = 1e-6,
    norm_eps: float = 1e-6,
    contract: Contracts = None,
    backend: str | None = None,
) -> tuple[Tensor, Link]:
    """From the residual streams to the input of a sublayer: ``mhc_pre``, or ``mhc_pre_norm`` where there is a ``gamma``.

    Args:
        residual: (..., 4, D) BF16, the residual streams.
        weight: (24, 4 D) FP32, controller weight (``fn`` of the checkpoint).
        gain: (24,) FP32, or the checkpoint's ``scale`` (3,), which is expanded 4 / 4 / 16; its gradient is folded over the
            rows first and over each segment then, both ascending.
        bias: (24,) FP32 (``base`` of the checkpoint).
        gamma: (D,) FP32, gain of the RMSNorm in front of the sublayer; None: no norm.
        eps: of the controller's RMS.
        norm_eps: of the norm.
        contract: a family (``"ascending"``, published and default, ``"ascending-dsv4"``, ``"fast"``, ``"fast-dsv4"``), or
            operator name to contract name for ``mhc_pre``, ``mhc_pre_norm`` and ``mhc_post``.
        backend: ``"cuda"`` or ``"reference"`` for every call, backward included; None takes the first that accepts it.

    Returns:
        The sublayer's input (..., D) BF16, and the link to close the boundary with. Differentiable once in everything.
        Where the streams get a gradient from another use than this boundary, autograd adds the two in BF16.

    Raises:
        TypeError, ValueError: as the operators; an unknown contract.
        RuntimeError: in backward under ``create_graph=True``; compiled inside ``samebits.accumulate``.

    Source: DeepSeek-V4 mHC, block forward and merge order of the block backward (profile ``oracle-fp32-mhc-v1``).
    """
    post_contract = contract_of("mhc_post", contract)
    if gamma is None:
        pre_contract = contract_of("mhc_pre", contract)
        hidden, post, comb, *carrier = _PRE((residual, weight, gain, bias), pre_contract, backend, eps=eps)
        given = hidden
    else:
        pre_contract = contract_of("mhc_pre_norm", contract)
        inputs = (residual, weight, gain, bias, gamma)
        hidden, given, post, comb, *carrier = _PRE_NORM(inputs, pre_contract, backend, eps=eps, norm_eps=norm_eps)
    return given, Link(residual, hidden, post, comb, carrier[0] if carrier else None, post_contract, backend)


def boundary_close(link: Link, sublayer: Tensor) -> Tensor:
    """From the output of the sublayer to the new residual streams: ``mhc_post``.

    Args:
        link: what :func:`boundary_open` returned.
        sublayer: (..., D) BF16.

    Returns:
        (..., 4, D) BF16, contiguous.

    Raises:
        RuntimeError: the link was closed before, with gradients: both uses would be added in BF16, which no contract has.
        TypeError, ValueError: as ``mhc_post``.
    """
    carrier = link._carrier
    if carrier is None or not (torch.is_grad_enabled() and carrier.requires_grad):
        # Nothing to merge with: opened without gradients, the streams are ordinary inputs of an ordinary operator.
        (streams,) = _POST.forward(
            link.streams, sublayer, link.comb, link.post, contract=link._contract, backend=link._backend
        )
        return streams
    if link._closed:
        raise RuntimeError(
            "this link was closed before: a boundary has one sublayer, and the gradients of two would be added in BF16; "
            "open the boundary again"
        )
    link._closed = True
    _POST._need_tensors(_POST.spec.forward.inputs, (link.streams, sublayer, link.comb, link.post))
    arguments = (link.streams, sublayer, link.comb, link.post, carrier, link._contract, link._backend)
    if torch.compiler.is_compiling():
        return torch.ops.samebits.mhc_post_close(*arguments)
    return _close_autograd(*arguments)


def hyper_head(
    residual: Tensor,
    weight: Tensor,
    gain: Tensor,
    bias: Tensor,
    *,
    eps: float = 1e-6,
    contract: Contracts = None,
    backend: str | None = None,
) -> Tensor:
    """The collapse behind the last layer, ``samebits.hyper_head``, with the checkpoint's ``scale`` and chained gradients.

    As :func:`boundary_open`, but weight (4, 4 D), bias (4,), and gain (4,) or (1,). Returns (..., D) BF16.
    """
    return _HEAD((residual, weight, gain, bias), contract_of("hyper_head", contract), backend, eps=eps)[0]


def rms_norm(
    x: Tensor,
    weight: Tensor,
    *,
    eps: float = 1e-6,
    contract: Contracts = None,
    backend: str | None = None,
) -> Tensor:
    """``samebits.rmsnorm_residual`` without its copy, with chained gradients. x (..., D) BF16, weight (D,) FP32."""
    return _NORM((x, weight), contract_of("rmsnorm_residual", contract), backend, eps=eps)[0]


# --- the post mix without its leg of the streams ----------------------------------------------------------------------


class _Close(torch.autograd.Function):
    """mhc_post, whose upstream gradient becomes the gradient of the carrier; the streams themselves get none here."""

    @staticmethod
    def forward(
        ctx: Any,
        streams: Tensor,
        sublayer: Tensor,
        comb: Tensor,
        post: Tensor,
        carrier: Tensor,
        contract: str,
        backend: str | None,
    ) -> Tensor:
        (mixed,) = _POST.below_autograd(False, streams, sublayer, comb, post, contract, backend)
        ctx.save_for_backward(streams, sublayer, comb, post)
        ctx.contract, ctx.backend = contract, backend
        return mixed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            refuse_second_derivative("mhc_post")
        saved = ctx.saved_tensors
        _, *needed = ctx.needs_input_grad[:4]
        wanted = (False, *needed)
        results = _POST.below_autograd(True, grad, *saved, ctx.contract, ctx.backend, "bfloat16", wanted)
        gradients = [value if want else None for value, want in zip(results, wanted, strict=True)]
        return (*gradients, grad, None, None)


def _close_plain(*args: Any) -> Tensor:
    streams, sublayer, comb, post, _, contract, backend = args
    (mixed,) = _POST.below_autograd(False, streams, sublayer, comb, post, contract, backend)
    return mixed


def _close_autograd(*args: Any) -> Tensor:
    refuse_tangents("mhc_post", args[:5])
    if torch.is_grad_enabled() and any(t.requires_grad for t in args[:5]):
        mixed: Tensor = _Close.apply(*args)
        return mixed
    with torch._C._AutoDispatchBelowAutograd():
        return _close_plain(*args)


def _register() -> None:
    LIBRARY.define(
        "mhc_post_close(Tensor residual, Tensor sublayer, Tensor comb, Tensor post, Tensor carrier, str contract, "
        "str? backend) -> Tensor"
    )
    LIBRARY.impl("mhc_post_close", _close_plain, "CompositeExplicitAutograd")
    LIBRARY.impl("mhc_post_close", _close_autograd, "Autograd")
    torch.library.register_fake("samebits::mhc_post_close", _close_plain, lib=LIBRARY)


_register()
