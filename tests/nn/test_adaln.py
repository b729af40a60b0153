"""The fused AdaLN nodes: the bits of their operators forward, an FP32 table gradient between them backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

import samebits
from samebits import adaln_modulation, final_adaln_out
from samebits.exact.bits import bits

T, D, H, S = 3, 40, 24, 300
SIX = ("shift_msa", "scale_msa", "gate_msa", "shift_mlp", "scale_mlp", "gate_mlp")


def _normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _block(dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    return {
        "temb": 2 * _normal(0, T, D),
        "weight": (_normal(1, 18 * H, D) * D**-0.5).to(dtype),
        "bias": (0.1 * _normal(2, 18 * H)).to(dtype),
        "index": torch.randint(0, 3 * T, (S,), generator=torch.Generator().manual_seed(3)),
    }


def _final(dtype: torch.dtype = torch.bfloat16, batch: int = 2) -> dict[str, Tensor]:
    return {
        "x": _normal(4, batch, S, H).to(dtype),
        "norm_weight": (1 + 0.5 * _normal(5, H)).to(dtype),
        "temb": 2 * _normal(0, T, D),
        "weight": (_normal(6, 2 * H, D) * D**-0.5).to(dtype),
        "bias": (0.1 * _normal(7, 2 * H)).to(dtype),
        "timestep_indices": torch.randint(0, T, (S,), generator=torch.Generator().manual_seed(8)),
    }


def _leaves(given: dict[str, Tensor], *frozen: str) -> dict[str, Tensor]:
    return {name: t.clone().requires_grad_(t.is_floating_point() and name not in frozen) for name, t in given.items()}


def _same(left: Tensor | None, right: Tensor | None) -> bool:
    assert left is not None and right is not None
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(bits(left), bits(right))


def _upstream(results: tuple[Tensor, ...], seed: int = 20) -> list[Tensor]:
    return [_normal(seed + i, *r.shape).to(r.dtype) for i, r in enumerate(results)]


def _relative(value: Tensor | None, exact: Tensor) -> float:
    assert value is not None
    return float((value.double() - exact).abs().max() / exact.abs().max())


def _slope(temb: Tensor) -> Tensor:
    """Derivative of the SiLU, FP64."""
    gate = torch.special.expit(temb.double())
    return gate * (1 + temb.double() * (1 - gate))


# --- forward ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("contract", [None, "kchain", "fma"])
def test_modulation_is_projection_then_rows(contract: str | None) -> None:
    """H4: channel m * 6 H + c * H + h is modality m, chunk c; table row t * 3 + m."""
    given = _block()
    six = adaln_modulation(**given, contract=contract)
    table = samebits.adaln_projection(given["temb"], given["weight"], given["bias"], contract=contract)
    for chunk, value in enumerate(six):
        for position in (0, 1, S - 1):
            t, m = divmod(int(given["index"][position]), 3)
            first = m * 6 * H + chunk * H
            assert _same(value[position], table[t, first : first + H].contiguous()), (SIX[chunk], position)
    assert all(v.shape == (S, H) and v.is_contiguous() for v in six)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_final_out_is_projection_then_modulated_norm(dtype: torch.dtype) -> None:
    """norm_out takes shift first and scale second, and goes by the timestep of a position."""
    given = _final(dtype)
    table = samebits.adaln_projection(given["temb"], given["weight"], given["bias"])
    shift, scale = table[:, :H], table[:, H:]
    index = given["timestep_indices"]
    expected = samebits.rmsnorm_modulated(given["x"], given["norm_weight"], shift, scale, index)
    assert _same(final_adaln_out(**given), expected)
    n = F.rms_norm(given["x"].double(), (H,), given["norm_weight"].double(), 1e-5)
    formula = n * (1 + scale[index].double()) + shift[index].double()
    assert _relative(expected, formula) < (1e-2 if dtype == torch.bfloat16 else 2e-3)


def test_segments_have_the_bits_of_the_index() -> None:
    block, final = _block(), _final()
    shared = samebits.segments(block["index"], 3 * T)
    for one, other in zip(adaln_modulation(**block), adaln_modulation(**(block | {"index": shared})), strict=True):
        assert _same(one, other)
    steps = samebits.segments(final["timestep_indices"], T, batch=2)
    assert _same(final_adaln_out(**final), final_adaln_out(**(final | {"timestep_indices": steps})))


# --- backward ---------------------------------------------------------------------------------------------------------


def test_modulation_hands_on_the_table_gradient_in_fp32() -> None:
    given = _block()
    leaves = _leaves(given)
    six = adaln_modulation(**leaves)
    upstream = _upstream(six)
    torch.autograd.backward(six, upstream)
    grad_rows = torch.zeros(3 * T, 6 * H, dtype=torch.float64)
    grad_rows.index_add_(0, given["index"], torch.cat(upstream, -1).double())
    grad_table = grad_rows.view(T, 18 * H)
    act = F.silu(given["temb"]).bfloat16().double()
    exact = (grad_table @ given["weight"].double()) * _slope(given["temb"])
    assert _relative(leaves["temb"].grad, exact) < 1e-5
    for name, value in (("weight", grad_table.T @ act), ("bias", grad_table.sum(0))):
        grad = leaves[name].grad
        assert grad is not None and grad.dtype == torch.bfloat16
        assert (grad == value.bfloat16()).float().mean() > 0.99

    separate = _leaves(given)
    table = samebits.adaln_projection(separate["temb"], separate["weight"], separate["bias"])
    rows = samebits.adaln_row_gather(table.view(3 * T, 6 * H), given["index"])
    torch.autograd.backward(rows, upstream)
    assert _relative(separate["temb"].grad, exact) > 1e-4, "rounded to BF16 on the way"


def test_final_out_hands_on_the_table_gradient_in_fp32() -> None:
    given = _final()
    leaves = _leaves(given)
    y = final_adaln_out(**leaves)
    (upstream,) = _upstream((y,))
    y.backward(upstream)
    index, g = given["timestep_indices"].repeat(2), upstream.view(-1, H).double()
    n = samebits.rmsnorm(given["x"], given["norm_weight"]).view(-1, H).double()
    grad_table = torch.zeros(T, 2 * H, dtype=torch.float64).index_add_(0, index, torch.cat([g, g * n], -1))
    exact = (grad_table @ given["weight"].double()) * _slope(given["temb"])
    assert _relative(leaves["temb"].grad, exact) < 1e-5
    act = F.silu(given["temb"]).bfloat16().double()
    for name, value in (("weight", grad_table.T @ act), ("bias", grad_table.sum(0))):
        grad = leaves[name].grad
        assert grad is not None and (grad == value.bfloat16()).float().mean() > 0.99

    table = samebits.adaln_projection(given["temb"], given["weight"], given["bias"])
    separate = _leaves({"x": given["x"], "norm_weight": given["norm_weight"]})
    parts = (table[:, :H], table[:, H:], given["timestep_indices"])
    samebits.rmsnorm_modulated(separate["x"], separate["norm_weight"], *parts).backward(upstream)
    assert _same(leaves["x"].grad, separate["x"].grad)
    assert _same(leaves["norm_weight"].grad, separate["norm_weight"].grad)


NODES: list[tuple[Callable[..., object], Callable[[], dict[str, Tensor]]]] = [
    (adaln_modulation, _block),
    (final_adaln_out, _final),
]


def _results(function: Callable[..., object], given: dict[str, Tensor]) -> tuple[Tensor, ...]:
    results = function(**given)
    return (results,) if isinstance(results, Tensor) else tuple(results)  # type: ignore[arg-type]


@pytest.mark.parametrize(("function", "drawn"), NODES)
def test_only_leaves_that_ask_get_gradients(
    function: Callable[..., object], drawn: Callable[[], dict[str, Tensor]]
) -> None:
    full = _leaves(drawn())
    results = _results(function, full)
    torch.autograd.backward(results, _upstream(results))
    learned = [name for name, t in full.items() if t.requires_grad]
    assert all(full[name].grad is not None for name in learned)
    for name in learned:
        alone = _leaves(drawn(), *(other for other in learned if other != name))
        results = _results(function, alone)
        torch.autograd.backward(results, _upstream(results))
        assert _same(alone[name].grad, full[name].grad)
        assert all(t.grad is None for other, t in alone.items() if other != name)
    assert not any(r.requires_grad for r in _results(function, drawn()))


def test_a_modulation_that_nobody_uses_has_a_gradient_of_zero() -> None:
    leaves, other = _leaves(_block()), _leaves(_block())
    gate = adaln_modulation(**leaves)[2]
    (upstream,) = _upstream((gate,))
    gate.backward(upstream)
    six = adaln_modulation(**other)
    torch.autograd.backward(six, [upstream if i == 2 else torch.zeros_like(v) for i, v in enumerate(six)])
    for name in ("temb", "weight", "bias"):
        assert _same(leaves[name].grad, other[name].grad)


@pytest.mark.parametrize(("function", "drawn"), NODES)
def test_compiled_without_graph_breaks(function: Callable[..., object], drawn: Callable[[], dict[str, Tensor]]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    eager, traced = _leaves(drawn()), _leaves(drawn())
    for run, leaves in ((function, eager), (compiled, traced)):
        results = _results(run, leaves)
        torch.autograd.backward(results, _upstream(results))
    for name, leaf in eager.items():
        if leaf.requires_grad:
            assert _same(leaf.grad, traced[name].grad)
    for one, other in zip(_results(function, eager), _results(compiled, traced), strict=True):
        assert _same(one.detach(), other.detach())


@pytest.mark.parametrize(("function", "drawn"), NODES)
def test_other_derivatives_are_refused(function: Callable[..., object], drawn: Callable[[], dict[str, Tensor]]) -> None:
    leaves = _leaves(drawn())
    total = torch.stack([r.float().sum() for r in _results(function, leaves)]).sum()
    with pytest.raises(RuntimeError, match="double backward"), samebits.policy("silent"):
        torch.autograd.grad(total, [leaves["temb"]], create_graph=True)
    given = drawn()
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode AD"):
        _results(function, given | {"temb": forward_ad.make_dual(given["temb"], torch.ones_like(given["temb"]))})


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        (
            {"temb": _normal(0, T, D).bfloat16()},
            TypeError,
            "temb has dtype torch.bfloat16, expected torch.float32",
        ),  # H7
        ({"temb": _normal(0, 1, T, D)}, ValueError, r"temb has shape \(1, 3, 40\), expected \(T, D\)"),
        ({"temb": _normal(0, 0, D)}, ValueError, "at least one timestep"),
        ({"temb": None}, TypeError, "temb must be a torch.Tensor, not NoneType"),
        ({"weight": torch.zeros(18 * H + 6, D).bfloat16()}, ValueError, r"expected \(18 \* H, D\)"),
        ({"weight": torch.zeros(0, D).bfloat16()}, ValueError, r"expected \(18 \* H, D\)"),
        ({"bias": torch.zeros(18 * H)}, TypeError, "bias has dtype torch.float32, expected torch.bfloat16"),
        ({"index": torch.full((S,), 3 * T)}, IndexError, "index is 9 at position 0, outside 0 .. 8"),
        ({"index": torch.full((S,), -1)}, IndexError, "index is -1"),
        ({"index": torch.zeros(S, dtype=torch.int32)}, TypeError, "torch.int64"),
        ({"index": samebits.segments(torch.zeros(S, dtype=torch.int64), T)}, ValueError, "the table has 9"),
        ({"index": None}, TypeError, "samebits.Segments"),
    ],
)
def test_modulation_refuses(changed: dict[str, Tensor], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        adaln_modulation(**(_block() | changed))


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        (
            {"temb": _normal(0, T, D).bfloat16()},
            TypeError,
            "temb has dtype torch.bfloat16, expected torch.float32",
        ),  # H7
        ({"x": torch.zeros(H).bfloat16()}, ValueError, r"expected \(\.\.\., S, H\)"),
        ({"x": torch.zeros(2, S, H)}, TypeError, "weight has dtype torch.bfloat16, but x has torch.float32"),
        ({"weight": torch.zeros(6 * H, D).bfloat16()}, ValueError, r"expected \(2 \* H, D\) with H = 24"),
        ({"bias": torch.zeros(2 * H)}, TypeError, "bias has dtype torch.float32"),
        ({"norm_weight": torch.zeros(H)}, TypeError, "weight has dtype torch.float32, but x has torch.bfloat16"),
        ({"timestep_indices": torch.full((S,), T)}, IndexError, "index is 3 at position 0, outside 0 .. 2"),
        ({"timestep_indices": torch.zeros(S - 1, dtype=torch.int64)}, ValueError, "index has shape"),
        ({"timestep_indices": torch.zeros(S)}, TypeError, "torch.int64"),
        ({"timestep_indices": torch.zeros(S, dtype=torch.int64, device="meta")}, ValueError, "is on meta"),
        ({"eps": 0.0}, ValueError, "eps = 0"),
        ({"contract": "nonsense"}, ValueError, "no contract named 'nonsense'"),
    ],
)
def test_final_out_refuses(changed: dict[str, Tensor], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        final_adaln_out(**(_final() | changed))


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(("function", "drawn"), NODES)
def test_kernels_have_the_bits_of_the_references(
    function: Callable[..., object], drawn: Callable[[], dict[str, Tensor]]
) -> None:
    runs = []
    for backend in ("reference", "cuda", "cuda"):
        leaves = _leaves({name: t.cuda() for name, t in drawn().items()})
        results = function(**leaves, backend=backend)
        results = (results,) if isinstance(results, Tensor) else tuple(results)  # type: ignore[arg-type]
        torch.autograd.backward(results, [g.cuda() for g in _upstream(results)])
        runs.append([*(r.detach() for r in results), *(t.grad for t in leaves.values() if t.grad is not None)])
    for other in runs[1:]:
        assert all(map(_same, runs[0], other))


@pytest.mark.gpu
@pytest.mark.parametrize(("function", "drawn"), NODES)
def test_captured_in_a_cuda_graph(function: Callable[..., object], drawn: Callable[[], dict[str, Tensor]]) -> None:
    given = {name: t.cuda() for name, t in drawn().items()}
    expected = _results(function, given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = _results(function, given)
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(_same, expected, results))
