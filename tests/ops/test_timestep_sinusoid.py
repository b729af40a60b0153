"""``timestep_sinusoid``: everything an operator must do, the bits of diffusers, and the times that are refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from samebits import registry, timestep_sinusoid, timestep_sinusoid_backward
from samebits.exact import fold
from samebits.exact.bits import digest
from samebits.ops.timestep_sinusoid import api
from samebits.ops.timestep_sinusoid import frequencies as making
from samebits.verify import inputs
from samebits.verify.conformance import Conformance
from samebits.verify.operators import OperatorSubject


class TestTimestepSinusoid(Conformance):
    op = "timestep_sinusoid"
    very_wide_widths = ((4095,), (1023,))
    wide_widths = (1024, 4096)
    accuracy_widths = ((1, 17, 136, 1000), (1, 17, 136))
    cpu_patterns = ("normal", "wide", "nan", "huge", "tiny")

    def public_function(self) -> Callable[..., Any]:
        """The public function makes the frequencies; here they are given."""
        op = registry.operator(self.op)

        def given(timestep: Tensor, frequencies: Tensor, **options: Any) -> Tensor:
            (features,) = op.forward(timestep, frequencies, **options)
            return features

        return given

    def _assert_layout(
        self, subject: OperatorSubject, tensors: list[Tensor], backward: bool, change: Callable[[Tensor], Tensor | None]
    ) -> bool:
        """A forward has no input with two axes, so some layouts of rows do not exist; a far stride has its own test."""
        return super()._assert_layout(subject, tensors, backward, change) or not backward


def _times(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    drawn = inputs.row_tensor("sinusoid-test", range(count), (), torch.float32, sample="positive") / 2
    drawn[:: max(1, count - 1)] = torch.tensor([0.0, 1.0])[: len(drawn[:: max(1, count - 1)])]
    return drawn.to(dtype)


def _diffusers(timestep: Tensor, channels: int) -> Tensor:
    """``get_timestep_embedding(timestep, channels, flip_sin_to_cos=True, downscale_freq_shift=0)``, written down."""
    half = channels // 2
    exponent = -math.log(10000) * torch.arange(0, half, dtype=torch.float32, device=timestep.device)
    angle = timestep[:, None].float() * torch.exp(exponent / (half - 0))[None, :]
    features = torch.cat([torch.sin(1 * angle), torch.cos(1 * angle)], dim=-1)
    return torch.cat([features[:, half:], features[:, :half]], dim=-1)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_bits_are_those_of_diffusers(device: str, dtype: torch.dtype) -> None:
    for channels in (2, 8, 96, 256, 320):
        for count in (1, 2, 3, 7, 64, 200):
            times = _times(count, dtype).to(device)
            assert digest(timestep_sinusoid(times, channels)) == digest(_diffusers(times, channels)), (channels, count)


@pytest.mark.parametrize("device", DEVICES)
def test_a_strided_timestep(device: str) -> None:
    times = _times(64).to(device)
    assert digest(timestep_sinusoid(times[::3])) == digest(timestep_sinusoid(times)[::3].contiguous())
    far = times[5:6].as_strided((1,), (2**31,), 5)  # C3: the stride of a single row is never used
    assert digest(timestep_sinusoid(far)) == digest(timestep_sinusoid(times)[5:6])


def test_the_error_against_fp64() -> None:
    times = _times(1000)
    half = 128
    exact = times.double()[:, None] * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    error = timestep_sinusoid(times).double() - torch.cat([exact.cos(), exact.sin()], -1)
    assert error.abs().max() <= 2**-22
    assert (timestep_sinusoid(times).double() - torch.cat([exact.sin(), exact.cos()], -1)).abs().max() > 0.5


def test_the_gradient_is_the_spelled_out_tree() -> None:
    channels = 320  # 192 zeros of padding
    times = _times(9).requires_grad_()
    upstream = inputs.row_tensor("sinusoid-test/grad", range(9), (channels,), torch.float32)
    features = timestep_sinusoid(times, channels)
    (grad,) = torch.autograd.grad(features, times, upstream)
    f = making.frequencies(times, channels)
    for row in range(9):
        sin, cos = features[row, 160:], features[row, :160]
        terms = [*(-(upstream[row, :160] * sin) * f), *((upstream[row, 160:] * cos) * f)]
        terms += [torch.zeros(())] * 192
        while len(terms) > 1:
            half = len(terms) // 2
            terms = [terms[u] + terms[u + half] for u in range(half)]
        assert digest(terms[0].detach()) == digest(grad[row])
    explicit = timestep_sinusoid_backward(upstream, f, features.detach())
    assert digest(explicit) == digest(grad)


def test_another_tree_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    upstream = inputs.row_tensor("sinusoid-test/grad", range(40), (256,), torch.float32)
    features = timestep_sinusoid(_times(40))
    f = making.frequencies(features, 256)
    honest = timestep_sinusoid_backward(upstream, f, features)
    monkeypatch.setattr(fold, "halving_tree", lambda terms: fold.left_fold(terms, -1))
    assert (timestep_sinusoid_backward(upstream, f, features) != honest).float().mean() > 0.3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_gradient_has_the_dtype_of_the_timestep(dtype: torch.dtype) -> None:
    narrow = _times(12, dtype).requires_grad_()
    wide = narrow.detach().float().requires_grad_()
    upstream = inputs.row_tensor("sinusoid-test/grad", range(12), (256,), torch.float32)
    (grad,) = torch.autograd.grad(timestep_sinusoid(narrow), narrow, upstream)
    (exact,) = torch.autograd.grad(timestep_sinusoid(wide), wide, upstream)
    assert grad.dtype == dtype and digest(grad) == digest(exact.to(dtype))


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [1000.0, 1.0000001, -1e-6, float("nan"), float("inf"), -float("inf")])
def test_times_outside_the_unit_interval_are_refused(device: str, value: float) -> None:
    """Probes H3 and H10: a time in thousandths, an offset that leaves the interval."""
    times = _times(5).to(device)
    times[3] = value
    with pytest.raises(ValueError, match=r"finite and lie in \[0, 1\]"):
        timestep_sinusoid(times)


def test_an_offset_of_a_time_gives_another_row() -> None:
    """Probe H3: a small offset inside the interval is another time, and shows in its row alone."""
    times = _times(5)
    moved = times.clone()
    moved[2] += 2**-12
    before, after = timestep_sinusoid(times), timestep_sinusoid(moved)
    assert (before[2] != after[2]).float().mean() > 0.5
    assert digest(before[[0, 1, 3, 4]]) == digest(after[[0, 1, 3, 4]])


def test_a_change_in_place_is_looked_at_again() -> None:
    times = _times(5)
    timestep_sinusoid(times)
    assert api._checked[times] == times._version
    times[1] = 2.0
    with pytest.raises(ValueError, match="the value 2;"):
        timestep_sinusoid(times)
    times[1] = 0.5
    assert timestep_sinusoid(times).isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
def test_the_torch_op_gives_such_a_row_nan_and_no_other(device: str) -> None:
    """Where values may not be looked at (graph capture, torch.compile) nothing may pass for a feature."""
    op = registry.operator("timestep_sinusoid")
    times = _times(6).to(device)
    f = making.frequencies(times, 256)
    clean = op.forward(times, f)[0]
    for value in (1000.0, -0.5, float("nan"), float("inf")):
        wrong = times.clone()
        wrong[4] = value
        features = op.forward(wrong, f)[0]
        assert features[4].isnan().all()
        assert digest(features[[0, 1, 2, 3, 5]]) == digest(clean[[0, 1, 2, 3, 5]])
        assert timestep_sinusoid_backward(torch.zeros_like(features), f, features)[4].isnan()


def test_compiled_the_frequencies_keep_their_bits() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda t: timestep_sinusoid(t, 96), fullgraph=True, backend="aot_eager")
    times = _times(7)
    assert digest(compiled(times)) == digest(timestep_sinusoid(times, 96))
    torch.library.opcheck(torch.ops.samebits.timestep_frequencies.default, (times, 96))


@pytest.mark.gpu
def test_captured_in_a_graph() -> None:
    times = _times(4).cuda()
    expected = timestep_sinusoid(times, 64)
    for cached in (True, False):
        if not cached:
            making._kept.clear()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            features = timestep_sinusoid(times, 64)
        assert bool(making._kept) == cached
        graph.replay()
        torch.cuda.synchronize()
        assert digest(features) == digest(expected)


def test_frequencies_are_kept_per_number_of_channels_and_survive_inference_mode() -> None:
    making._kept.clear()
    times = _times(3)
    with torch.inference_mode():
        timestep_sinusoid(times, 10)
    leaf = times.clone().requires_grad_()
    timestep_sinusoid(leaf, 10).backward(torch.ones(3, 10))
    assert making.frequencies(times, 10) is making.frequencies(leaf, 10)
    assert making.frequencies(times, 12).shape == (6,)


def test_wrong_arguments_are_refused_by_name() -> None:
    times = _times(3)
    for channels in (0, -2, 3, 255, 8194):
        with pytest.raises(ValueError, match=r"num_channels = .* even number from 2 to 8192"):
            timestep_sinusoid(times, channels)
    for wrong in (256.0, "256", True):
        with pytest.raises(TypeError, match="num_channels must be an integer"):
            timestep_sinusoid(times, wrong)
    with pytest.raises(ValueError, match=r"expected \(T,\)"):
        timestep_sinusoid(times[None])
    with pytest.raises(TypeError, match=r"torch\.int64"):
        timestep_sinusoid(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"torch\.float64"):
        timestep_sinusoid(times.double())
    with pytest.raises(TypeError, match=r"torch\.Tensor, not list"):
        timestep_sinusoid([0.5])


def test_no_times() -> None:
    assert timestep_sinusoid(torch.zeros(0)).shape == (0, 256)
