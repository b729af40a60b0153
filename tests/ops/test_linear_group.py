"""``linear_group``: the bits of separate calls, forward and backward, and the launches that stand for several of them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from samebits import dispatch, linear, linear_group, observers, registry
from samebits.dispatch import Call
from samebits.exact.bits import bits
from samebits.ops.linear import cuda, grouped, wgmma
from samebits.ops.linear.reference import product
from samebits.runtime.device import H200
from samebits.runtime.launch import Launch
from samebits.runtime.sweep import dense_layout

GPU = pytest.mark.gpu
HALVES = (torch.bfloat16, torch.float16)
Parts = list[tuple[Tensor, Tensor | None]]


def drawn(rows: int, size: int, outputs: Sequence[int], biased: bool = True, dtype: Any = torch.bfloat16, device: str = "cpu"):  # type: ignore[no-untyped-def]  # fmt: skip
    """x, [(weight, bias)], upstream gradients."""
    generator = torch.Generator().manual_seed(rows + size)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(device)

    parts: Parts = [(normal(n, size) * size**-0.5, normal(n) if biased else None) for n in outputs]
    return normal(rows, size), parts, [normal(rows, n) for n in outputs]


def apart(x: Tensor, parts: Parts) -> tuple[Tensor, ...]:
    return tuple(linear(x, *part) for part in parts)


def together(x: Tensor, parts: Parts) -> tuple[Tensor, ...]:
    return linear_group(x, [weight for weight, _ in parts], [bias for _, bias in parts])


def same(left: Tensor | None, right: Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(bits(left), bits(right))


def both_ways(
    function: Callable[[Tensor, Parts], tuple[Tensor, ...]],
    given: Any,
    used: Sequence[int] | None = None,
    frozen: Sequence[int] = (),
) -> list[Tensor | None]:
    """Results and the gradients of every leaf; ``used``: results that have an upstream gradient."""
    x, parts, upstream = given
    leaf = x.clone().requires_grad_()
    owned: Parts = []
    for at, (weight, bias) in enumerate(parts):
        own = weight.clone().requires_grad_(at not in frozen)
        owned.append((own, None if bias is None else bias.clone().requires_grad_(at not in frozen)))
    made = function(leaf * 1, owned)  # behind another node, as in a model
    used = range(len(parts)) if used is None else used
    leaves = [leaf, *(t for part in owned for t in part if t is not None and t.requires_grad)]
    gradients = torch.autograd.grad([made[at] for at in used], leaves, [upstream[at] for at in used], allow_unused=True)
    return [*(y.detach() for y in made), *gradients]


# --- bits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("outputs", [(24,), (24, 24, 24), (24, 16, 8), (8, 8, 8, 8)], ids=str)
def test_it_has_the_bits_of_separate_calls(outputs: tuple[int, ...], dtype: torch.dtype) -> None:
    for biased in (True, False):
        given = drawn(5, 40, outputs, biased, dtype)
        got, expected = both_ways(together, given), both_ways(apart, given)
        assert all(map(same, got, expected)) and len(got) == len(expected)


@pytest.mark.parametrize(
    ("used", "frozen"), [((0, 2), ()), ((1,), ()), (None, (1,)), (None, (0, 1, 2)), ((0, 2), (0,))]
)
def test_what_has_no_gradient_gets_none(used: Any, frozen: Any) -> None:
    given = drawn(5, 40, (24, 16, 8))
    got, expected = both_ways(together, given, used, frozen), both_ways(apart, given, used, frozen)
    assert all(map(same, got, expected)) and len(got) == len(expected)


def test_gradients_of_x_are_added_from_the_last_to_the_first() -> None:
    given = drawn(64, 40, (24, 24, 24), False)
    _, parts, upstream = given
    legs = [product(grad, weight.T).bfloat16() for (weight, _), grad in zip(parts, upstream, strict=True)]
    got = both_ways(together, given)[3]
    assert same(got, legs[2] + legs[1] + legs[0])
    assert not same(got, legs[0] + legs[1] + legs[2]), "another order would show"


def test_batch_axes_and_no_rows() -> None:
    x, parts, _ = drawn(6, 40, (24, 16))
    for shaped in (x.view(2, 3, 40), x[:0], x[0]):
        assert all(map(same, together(shaped, parts), apart(shaped, parts)))


# --- who sees it ------------------------------------------------------------------------------------------------------


def test_an_observer_sees_separate_calls_in_both_directions() -> None:
    given, seen = drawn(5, 40, (24, 16)), []

    def observe(name: str, backward: bool, *rest: Any) -> None:
        seen.append((name, backward))

    expected = both_ways(together, given)
    observers.OBSERVERS.append(observe)
    try:
        got = both_ways(together, given)
    finally:
        observers.OBSERVERS.remove(observe)
    assert seen == [("linear", False)] * 2 + [("linear", True)] * 2
    assert all(map(same, got, expected))


def test_an_observer_of_the_backward_alone_sees_separate_calls() -> None:
    x, parts, upstream = drawn(5, 40, (24, 16))
    leaf, seen = x.requires_grad_(), []

    def observe(name: str, backward: bool, *rest: Any) -> None:
        seen.append((name, backward))

    made = together(leaf, parts)
    observers.OBSERVERS.append(observe)
    try:
        (got,) = torch.autograd.grad(made, [leaf], upstream)
    finally:
        observers.OBSERVERS.remove(observe)
    assert seen == [("linear", True)] * 2
    assert same(got, torch.autograd.grad(apart(leaf, parts), [leaf], upstream)[0])


def test_a_dispatch_mode_sees_separate_calls() -> None:
    heard = []

    class Listening(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            heard.append(str(func))
            return func(*args, **(kwargs or {}))

    x, parts, _ = drawn(5, 40, (24, 16))
    with Listening():
        together(x, parts)
    assert heard.count("samebits.linear.default") == 2


def test_a_plan_that_was_asked_for_is_that_of_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    x, parts, _ = drawn(5, 40, (24, 16))
    monkeypatch.setattr(grouped, "_run", lambda *given: pytest.fail("run as one"))
    with pytest.raises(pytest.fail.Exception):
        together(x, parts)
    with dispatch.force_plan(1):
        assert all(map(same, together(x, parts), apart(x, parts)))


def test_it_compiles() -> None:
    given = drawn(5, 40, (24, 16))
    compiled = torch.compile(together, backend="aot_eager", fullgraph=True)
    assert all(map(same, both_ways(compiled, given), both_ways(together, given)))


def test_what_is_refused() -> None:
    x, parts, upstream = drawn(5, 40, (24, 16))
    weights = [weight for weight, _ in parts]
    with pytest.raises(ValueError, match="linear_group: 0 weights and 0 biases"):
        linear_group(x, [])
    with pytest.raises(ValueError, match="linear_group: 2 weights and 1 biases"):
        linear_group(x, weights, [None])
    with pytest.raises(TypeError, match=r"weight has dtype torch\.float16, but x has torch\.bfloat16"):
        linear_group(x, [weights[0], weights[1].half()])
    with pytest.raises(ValueError, match="weight has K = 39, but x has K = 40"):
        linear_group(x, [weights[0], weights[1][:, 1:]])
    with pytest.raises(ValueError, match="bias has N = 23"):
        linear_group(x, weights, [upstream[0][0][1:], None])
    with pytest.raises(TypeError, match=r"weight must be a torch\.Tensor"):
        linear_group(x, [weights[0], None])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="contract"):
        linear_group(x, weights, contract="another")
    leaf = x.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(linear_group(leaf, weights), [leaf], upstream, create_graph=True)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        linear_group(forward_ad.make_dual(x, x), weights)
    with torch.inference_mode():
        inference = x.clone()
    with pytest.raises(RuntimeError, match="inference_mode"):
        linear_group(inference, [weight.clone().requires_grad_() for weight in weights])


# --- launches ---------------------------------------------------------------------------------------------------------


def calls(
    rows: int, size: int, outputs: Sequence[int], wanted: Sequence[str] = ("y",), dtype: str = "bfloat16"
) -> list[Call]:
    """Of the group on an H200."""
    backward = "y" not in wanted
    spec, made = registry.spec("linear"), []
    for n in outputs:
        sizes = {"N": n, "K": size}
        given = [arg for arg in spec.direction(backward).inputs if not arg.optional]
        layouts = tuple((arg.name, dense_layout(arg, dtype, sizes)) for arg in given)
        made.append(Call("linear", backward, "kchain", rows, tuple(sizes.items()), layouts, tuple(wanted), dtype, H200))
    return made


def planned(group: list[Call]) -> cuda.Together:
    return cuda.together(group, [cuda.plans(call)[0] for call in group])


def steps(group: list[Call]) -> dict[str, Launch]:
    return {step.result: step.launch for step in planned(group).steps}


def test_q_k_and_v_are_one_launch_of_every_product() -> None:
    for rows in (65, 264, 925, 3160):
        forward = planned(calls(rows, 5376, [7168] * 3))
        assert [step.result for step in forward.steps] == ["y"] and forward.rest == (None,) * 3
        made = planned(calls(rows, 5376, [7168] * 3, ("grad_x", "grad_weight", "grad_bias")))
        assert [step.result for step in made.steps] == ["grad_x", "grad_weight"]
        for rest in made.rest:
            assert rest is not None and rest.grad_bias is not None and rest.grad_x is rest.grad_weight is None


def test_where_there_are_several_launches() -> None:
    """Few rows, odd widths, more products than a launch has room for, chains of several lengths."""
    assert not steps(calls(64, 1024, [1024] * 3))
    assert not steps(calls(264, 1020, [1024] * 3)) and not steps(calls(264, 1024, [1024, 1020]))
    assert not steps(calls(264, 1024, [1024] * 4)) and not steps(calls(264, 1024, [1024]))
    assert set(steps(calls(264, 1024, [1024, 256, 256], ("grad_x", "grad_weight")))) == {"grad_weight"}
    short = calls(264, 1024, [1024] * 2)
    layouts = dict(short[1].layouts)
    layouts["weight"] = dataclasses.replace(layouts["weight"], aligned=False)
    assert not steps([short[0], dataclasses.replace(short[1], layouts=tuple(layouts.items()))])


def test_a_launch_has_the_tiles_of_all_and_no_more_blocks_than_fit() -> None:
    for outputs in ([7168] * 3, [2048, 512, 512], [5376, 8]):
        for tile in (*wgmma.BATCH, *wgmma.WEIGHT):
            sides = [wgmma.Sides(n, 264, 5376, False, False) for n in outputs]
            made = wgmma.planned(tile, sides, "bfloat16", False, 132)
            tiles = sum(tile.tiles(side.rows, side.columns) for side in sides)
            assert made.grid == tile.blocks * min(tiles, 132 // tile.blocks)
            assert dict(made.kernel.defines)["GROUPS"] == 3
            assert wgmma.clocks(tile, sides, 132) <= sum(wgmma.clocks(tile, [side], 132) for side in sides)


def test_builds_of_several_products_are_audited() -> None:
    kernels = {build.kernel for build in cuda.builds()}
    directions, dtypes = (("y",), ("grad_x", "grad_weight")), ("bfloat16", "float16")
    for rows, wanted, dtype in itertools.product((65, 264, 925, 3160), directions, dtypes):
        for outputs in ([7168] * 3, [1024, 256, 256], [40, 48]):
            for step in steps(calls(rows, 5376, outputs, wanted, dtype)).values():
                assert step.kernel in kernels


@pytest.mark.parametrize("wanted", [("y",), ("grad_x", "grad_weight", "grad_bias")], ids=str)
def test_each_product_gets_its_own_operands(wanted: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch stands for products that are computed here from what it was told."""
    launched = []

    def multiply(step: Launch, products: Sequence[wgmma.Product], size: int, start: Any = 0) -> None:
        launched.append(step)
        macros = dict(step.kernel.defines)
        for out, a, b, bias, rows, columns in products:
            a, b = (a.T if macros["TA"] else a), (b.T if macros["TB"] else b)
            assert a.shape == (rows, size) and b.shape == (columns, size)
            total = a.float() @ b.float().T
            total = total.T if macros["CROSS"] else total
            out.copy_(total + (bias.float() if isinstance(bias, Tensor) else 0))

    def fold(step: Launch, out: Tensor, grad: Tensor, *rest: Any) -> None:
        out.copy_(grad.float().sum(0))

    monkeypatch.setattr(wgmma, "multiply", multiply)
    monkeypatch.setattr(cuda, "launch", fold)
    for rows, outputs in ((70, (24, 24, 24)), (264, (40, 40))):
        x, parts, upstream = drawn(rows, 48, outputs)
        group = calls(rows, 48, outputs, wanted)
        inputs, results = [], []
        for (weight, bias), grad in zip(parts, upstream, strict=True):
            shapes = {"y": grad.shape, "grad_x": x.shape, "grad_weight": weight.shape, "grad_bias": grad.shape[1:]}
            forward = {"x": x, "weight": weight, "bias": bias}
            inputs.append(forward if wanted == ("y",) else {"grad_y": grad, "x": x, "weight": weight})
            results.append({name: torch.empty(shapes[name]) for name in wanted})
        launched.clear()
        cuda.run_together(group, planned(group), inputs, results)
        assert len(launched) == len(set(wanted) - {"grad_bias"})
        for (weight, bias), grad, made in zip(parts, upstream, results, strict=True):
            expected = {
                "y": x.float() @ weight.float().T + bias.float(),
                "grad_x": grad.float() @ weight.float(),
                "grad_weight": grad.float().T @ x.float(),
                "grad_bias": grad.float().sum(0),
            }
            for name, value in made.items():
                torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-4)


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@GPU
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("outputs", [(7168, 7168, 7168), (2048, 512, 512), (520, 2048), (8, 1304, 264)], ids=str)
def test_on_a_gpu_it_has_the_bits_of_separate_calls(outputs: tuple[int, ...], dtype: torch.dtype) -> None:
    """And of mma.sync, which is the last plan."""
    for rows in (1, 64, 65, 129, 200, 264, 300, 925):
        for biased in (True, False):
            given = drawn(rows, 1032, outputs, biased, dtype, "cuda")
            got, expected = both_ways(together, given), both_ways(apart, given)
            assert all(map(same, got, expected)), (rows, biased)
        with dispatch.force_plan(-1):
            assert all(map(same, both_ways(apart, given), expected)), rows


@GPU
@pytest.mark.parametrize("tile", [*wgmma.BATCH, *wgmma.WEIGHT], ids=str)
def test_every_tile_takes_several_products(tile: wgmma.Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    given = drawn(300, 520, (1304, 264, 720), device="cuda")
    expected = both_ways(apart, given)
    monkeypatch.setattr(wgmma, "WEIGHT" if tile in wgmma.WEIGHT else "BATCH", (tile,))
    monkeypatch.setattr(grouped, "_known", {})
    assert all(map(same, both_ways(together, given), expected))
