"""exp, rsqrt, sin and cos of CUDA's library on a CPU, and every argument of them on a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import samebits
from samebits.exact import elementary, special
from samebits.exact.bits import bits, canonical_nan
from samebits.exact.compare import same_bits

NAMES = ("exp", "rsqrt", "sin", "cos")
MODELS: dict[str, Callable[[Tensor], Tensor]] = {name: getattr(elementary, f"{name}_of_cuda") for name in NAMES}


def words(count: int, seed: int) -> Tensor:
    """FP32 of any bits."""
    drawn = torch.randint(-(2**31), 2**31, (count,), generator=torch.Generator().manual_seed(seed))
    return drawn.int().view(torch.float32)


@pytest.mark.parametrize("name", NAMES)
def test_is_within_two_units_of_the_last_place(name: str) -> None:
    """The bounds that CUDA documents. Any step left out or in another order shows here, or in the digests."""
    x = torch.cat((words(60_000, 1), torch.randn(60_000, generator=torch.Generator().manual_seed(2)) * 60))
    found, exact = MODELS[name](x), getattr(torch, name)(x.double())
    assert torch.equal(found.isnan(), exact.isnan())
    ordinary = exact.float().isfinite() & (exact.abs() >= special.SMALLEST_NORMAL)
    unit = torch.nextafter(exact.float().abs(), torch.tensor(math.inf)).double() - exact.float().abs().double()
    assert ((found.double() - exact).abs() / unit)[ordinary].max() < 2
    assert (found != exact.float())[ordinary].any(), "no function of that library is correctly rounded"


def test_at_the_edges() -> None:
    inf, nan = math.inf, math.nan
    x = torch.tensor([0.0, -0.0, inf, -inf, nan, 89.0, -104.0, -88.0, 1e-45, 105615.0, -3e38])
    expected = {
        "exp": [1.0, 1.0, inf, 0.0, nan, inf, 0.0, 6.05e-39, 1.0, inf, 0.0],
        "rsqrt": [inf, -inf, 0.0, nan, nan, 0.106, nan, nan, 2.6714e22, 0.003077, nan],
        "sin": [0.0, -0.0, nan, nan, nan, 0.86007, 0.321622, -0.035398, 1e-45, 0.806478, -0.874905],
        "cos": [1.0, 1.0, nan, nan, nan, 0.510177, -0.946868, 0.999373, 1.0, 0.591264, -0.484289],
    }
    for name, values in expected.items():
        found = MODELS[name](x)
        assert found.tolist() == pytest.approx(values, rel=1e-4, nan_ok=True), name
        zero = found == 0
        assert torch.equal(found[zero].signbit(), torch.tensor(values)[zero].signbit()), name


def test_a_cpu_has_its_own_functions_unless_it_is_asked() -> None:
    x = words(4000, 3)
    own = torch.exp(x)
    assert same_bits(elementary.exp(x), own)
    with samebits.bits_of("sm_90"):
        within = elementary.exp(x)
        assert same_bits(torch.exp(x), own), "torch's own functions must stay"
    assert same_bits(within, elementary.exp_of_cuda(x))
    assert not same_bits(within, own)
    assert same_bits(elementary.exp(x), own), "and it must end with the block"


def test_it_ends_when_the_block_raises() -> None:
    x = words(4000, 3)
    with pytest.raises(RuntimeError, match="inside"), samebits.bits_of("sm_90"):
        raise RuntimeError("inside")
    assert same_bits(elementary.sin(x), torch.sin(x))


def test_an_unknown_architecture_is_refused() -> None:
    with (
        pytest.raises(ValueError, match=r"functions of 'sm_80' are not known; known: sm_90"),
        samebits.bits_of("sm_80"),
    ):
        pass


@pytest.mark.parametrize("function", [elementary.exp, elementary.rsqrt, elementary.sin, elementary.cos])
def test_only_fp32(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(TypeError, match=r"must be torch\.float32"):
        function(torch.ones(2, dtype=torch.float64))


def test_sigmoid_of_a_row_does_not_depend_on_its_neighbours() -> None:
    x = torch.randn(37, generator=torch.Generator().manual_seed(4))
    alone = torch.cat([elementary.sigmoid(one) for one in x.split(1)])
    assert same_bits(elementary.sigmoid(x), alone)


PIECE = 2**26
UNIT: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "ex2_approx": (special.ex2_of_table, special.ex2_approx),
    "rcp_approx": (special.rcp_of_table, special.rcp_approx),
    "rsqrt_approx": (special.rsqrt_of_table, special.rsqrt_approx),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*NAMES, *UNIT])
def test_every_argument_there_is(name: str) -> None:
    """2^32 of them: the model, computed on the GPU in integers and IEEE operations, beside the function or the instruction."""
    model, real = UNIT[name] if name in UNIT else (MODELS[name], getattr(torch, name))
    step = PIECE // 4 if name in ("sin", "cos") else PIECE
    for start in range(-(2**31), 2**31, step):
        x = torch.arange(start, start + step, dtype=torch.int64, device="cuda").int().view(torch.float32)
        found, there = model(x), real(x)
        wrong = (bits(found) != bits(there)) & ~(found.isnan() & there.isnan())
        if wrong.any():
            first = [(v[wrong][0].item()).hex() for v in (x, found, there)]
            pytest.fail(
                f"{int(wrong.sum())} of {step} from word {start} on; the first: of {first[0]}, model {first[1]}, GPU {first[2]}"
            )


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_a_cpu_gives_what_the_gpu_gives(name: str) -> None:
    x = torch.cat((words(400_000, 5), torch.randn(400_000, generator=torch.Generator().manual_seed(6)) * 40))
    here, there = MODELS[name](x), getattr(torch, name)(x.cuda()).cpu()
    assert same_bits(canonical_nan(here), canonical_nan(there))
