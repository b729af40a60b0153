"""``swiglu``: everything an operator must do, and the bits of diffusers' own module and of its derivative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import samebits
from samebits import swiglu, swiglu_backward
from samebits.exact.bits import digest
from samebits.exact.compare import first_difference
from samebits.exact.fma import fma
from samebits.ops.swiglu import peers, reference
from samebits.verify import inputs
from samebits.verify.conformance import Conformance

KINDS = (torch.bfloat16, torch.float16, torch.float32)
GPU = [pytest.param("cuda", marks=pytest.mark.gpu)]


class TestSwiglu(Conformance):
    op = "swiglu"
    wide_widths: ClassVar = (14336,)

    def public_function(self) -> Callable[..., Tensor]:
        """The public function cuts its rows in halves; here they are cut."""
        return lambda x, **options: swiglu(x.flatten(-2), **options)


def _drawn(name: str, rows: int, size: int, dtype: torch.dtype = torch.bfloat16, pattern: str = "normal") -> Tensor:
    return inputs.row_tensor(f"swiglu-test/{name}", range(rows), (size,), dtype, pattern=pattern)


def _every_gate(dtype: torch.dtype) -> Tensor:
    """All values of a 16-bit type; of FP32 a grid of exponents and mantissas."""
    if dtype != torch.float32:
        return torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    return (torch.arange(-(1 << 15), 1 << 15) * 65536 + 0x5A5A).to(torch.int32).view(torch.float32)


def _gradients(op: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.detach().clone().requires_grad_()
    y = op(leaf)
    y.backward(grad)
    assert leaf.grad is not None
    return y.detach(), leaf.grad


def _eager(x: Tensor) -> Tensor:
    return peers.module(x.unflatten(-1, (2, -1)))[0]


@pytest.mark.gpu
@pytest.mark.parametrize("pattern", ["normal", "wide", "huge", "subnormal", "tiny", "inf", "nan"])
@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("backend", ["cuda", "reference"])
def test_the_bits_of_diffusers_and_of_its_autograd(backend: str, dtype: torch.dtype, pattern: str) -> None:
    for size in (1, 17, 136, 14336):
        x = _drawn("x", 9, 2 * size, dtype, pattern).cuda() * 3
        grad = _drawn("grad", 9, size, dtype, pattern).cuda()
        got = _gradients(lambda t: swiglu(t, backend=backend), x, grad)
        for ours, theirs in zip(got, _gradients(_eager, x, grad), strict=True):
            assert first_difference(theirs, ours) is None, size


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_the_bits_of_diffusers_for_every_gate(dtype: torch.dtype) -> None:
    gate = _every_gate(dtype).cuda()
    for value, upstream in ((1.0, 1.0), (-0.7109375, 1.3359375)):
        x = torch.stack((torch.full_like(gate, value), gate)).flatten()
        grad = torch.full_like(gate, upstream)
        for ours, theirs in zip(_gradients(swiglu, x, grad), _gradients(_eager, x, grad), strict=True):
            assert first_difference(theirs, ours) is None, value


@pytest.mark.parametrize("dtype", KINDS[:2], ids=str)
def test_a_cpu_differs_from_diffusers_by_its_own_exp_alone(dtype: torch.dtype) -> None:
    """torch's kernels there have another exp, and a derivative without the fused multiply-add: rarely another 16-bit number."""
    gate = _every_gate(dtype)
    gate = gate[gate.isfinite()]
    x, grad = torch.stack((torch.full_like(gate, 1.0), gate)).flatten(), torch.ones_like(gate)
    for ours, theirs in zip(_gradients(swiglu, x, grad), _gradients(_eager, x, grad), strict=True):
        words = [t.view(torch.int16).long() for t in (ours, theirs)]
        apart = (words[0] - words[1]).abs()
        assert (apart > 0).float().mean() < 0.002
        assert apart.max() <= 1


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_the_operations_around_the_silu_are_those_of_the_model(dtype: torch.dtype) -> None:
    """With our own SiLU in diffusers' module every bit agrees, on any machine."""

    class Ours(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, gate: Tensor) -> Tensor:
            ctx.save_for_backward(gate)
            return reference.silu(gate)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return reference.silu_gradient(grad, *ctx.saved_tensors)

    class Activation(nn.Module):
        def forward(self, gate: Tensor) -> Tensor:
            return Ours.apply(gate)

    from diffusers.models.activations import SwiGLU

    module = SwiGLU(1, 1)
    module.proj, module.activation = nn.Identity(), Activation()
    for pattern in ("normal", "wide", "tiny", "minus_zero"):
        x, grad = _drawn("x", 5, 272, dtype, pattern), _drawn("grad", 5, 136, dtype, pattern)
        for ours, theirs in zip(_gradients(swiglu, x, grad), _gradients(module, x, grad), strict=True):
            assert digest(ours) == digest(theirs), pattern


def test_a_missing_rounding_and_the_fused_multiply_add_would_be_seen() -> None:
    x, grad = _drawn("x", 64, 1024), _drawn("grad", 64, 512)
    value, gate = x.unflatten(-1, (2, -1)).unbind(1)
    got, got_grad = _gradients(swiglu, x, grad)
    wide = gate.float()
    s = 1 / (1 + torch.exp(-wide))
    once = (value.float() * (wide * s)).to(torch.bfloat16)
    assert (once != got).float().mean() > 0.05
    slope = fma(wide, 1 - s, torch.ones_like(s))
    unrounded = ((grad.float() * value.float()) * s * slope).to(torch.bfloat16)
    assert (unrounded != got_grad[:, 512:]).float().mean() > 0.05
    of_silu = (grad.float() * value.float()).to(torch.bfloat16).float()
    assert digest((of_silu * s * slope).to(torch.bfloat16)) == digest(got_grad[:, 512:])
    x, grad = x.float(), grad.float()
    got_grad = _gradients(swiglu, x, grad)[1][:, 512:]
    apart = (grad * value.float()) * s * (1 + wide * (1 - s))
    assert (apart != got_grad).float().mean() > 0.05


def test_value_stands_before_gate() -> None:
    x = torch.tensor([3.0, 5.0, 0.0, 100.0])  # of Llama's order the result would be 0, 500
    assert swiglu(x).tolist() == [0.0, 500.0]


@pytest.mark.parametrize("device", ["cpu", *GPU])
def test_rows_of_a_wider_tensor_are_read_in_place(device: str) -> None:
    whole = _drawn("whole", 14, 3 * 80).view(2, 7, -1).to(device)
    part = whole[..., 80:]
    assert not part.is_contiguous()
    with samebits.policy("strict"):
        assert digest(swiglu(part)) == digest(swiglu(part.contiguous()))


def test_the_explicit_backward_is_that_of_autograd() -> None:
    x, grad = _drawn("x", 6, 34).view(2, 3, 34), _drawn("grad", 6, 17).view(2, 3, 17)
    (explicit,) = swiglu_backward(grad, x)
    assert explicit is not None and explicit.shape == x.shape and explicit.is_contiguous()
    assert digest(explicit) == digest(_gradients(swiglu, x, grad)[1])
    assert swiglu_backward(grad, x, wanted=(False,)) == (None,)


def test_rows_that_have_no_halves_are_refused() -> None:
    with pytest.raises(ValueError, match=r"swiglu: x has shape \(2, 5\), expected \(\.\.\., 2 F\)"):
        swiglu(torch.zeros(2, 5))
    with pytest.raises(ValueError, match=r"swiglu_backward: x has shape \(\), expected"):
        swiglu_backward(torch.zeros(1), torch.zeros(()))
    with pytest.raises(TypeError, match=r"swiglu: x must be a torch.Tensor, not list"):
        swiglu([1.0])
    with pytest.raises(ValueError, match="F = 0 is outside 1"):
        swiglu(torch.zeros(3, 0))
    with pytest.raises(TypeError, match=r"x has dtype torch\.float64, expected"):
        swiglu(torch.zeros(3, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"x has F = 5, but grad_y has F = 4"):
        swiglu_backward(torch.zeros(3, 4), torch.zeros(3, 10))
