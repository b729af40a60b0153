"""``linear``: everything an operator must do, its orders and plans; on a GPU every plan at the shapes of a model, and cuBLAS."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pytest
import torch
from ops.linear_shapes import CUBLAS, GPU_ROWS, drawn_on_gpu, positions
from torch import Tensor
from torch.nn import functional as F

from samebits import dispatch, explain, linear, linear_backward, registry
from samebits.audit import compile as compiling
from samebits.audit.build import Build
from samebits.dispatch import Call
from samebits.emulate import cases as emulated
from samebits.emulate import judge
from samebits.exact import tensor_core
from samebits.exact.bits import bits
from samebits.ops.linear import cuda, wgmma
from samebits.ops.linear.targets import SHAPES
from samebits.runtime import sweep
from samebits.runtime.device import H200
from samebits.runtime.launch import Launch
from samebits.verify.conformance import Conformance

HALVES = (torch.bfloat16, torch.float16)
GPU = pytest.mark.gpu
SWEPT = (1, 17, 64, 65, 129, 264, 925, 3160, 4097)
"""Of the numbers of rows on a GPU, those at which every plan runs."""


class TestLinear(Conformance):
    op = "linear"
    width = 40
    held: ClassVar = {"N": 24}
    cpu_patterns: ClassVar = ("normal", "wide", "nan", "huge", "subnormal")

    def _many_values(self, metafunc: pytest.Metafunc) -> Sequence[int]:
        return (131073,)


# --- tools ------------------------------------------------------------------------------------------------------------


def _drawn(rows: int, outputs: int, size: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return {
        "x": normal(rows, size),
        "weight": (normal(outputs, size).float() * size**-0.5).to(dtype),
        "bias": normal(outputs),
        "grad": normal(rows, outputs),
    }


def _same(left: Tensor | None, right: Tensor | None) -> bool:
    assert left is not None and right is not None
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(bits(left), bits(right))


def _indices(*given: Any, **options: Any) -> range:
    """Of all plans of a call on a GPU."""
    call = explain(*given, backend="cuda", **options).call
    return range(len(cuda.plans(call)))


def _y(given: dict[str, Tensor], **options: Any) -> Tensor:
    return linear(given["x"], given["weight"], given["bias"], **options)


def _gradients(given: dict[str, Tensor], *starts: Tensor | None, **options: Any) -> tuple[Tensor | None, ...]:
    return linear_backward(given["grad"], given["x"], given["weight"], *starts, **options)


# --- orders -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_product_is_one_chain(dtype: torch.dtype) -> None:
    """One step of the unit at a time, from the definition; the last step is not full."""
    given = _drawn(37, 21, 40, dtype)

    def spelled_out(a: Tensor, b: Tensor) -> Tensor:
        acc = torch.zeros(len(a), len(b))
        for s in range(0, a.shape[1], 16):
            acc = tensor_core.definition(a[:, s : s + 16], b[:, s : s + 16], acc)
        return acc + 0

    total = spelled_out(given["x"], given["weight"])
    assert _same(_y(given), (total + given["bias"].float()).to(dtype))
    assert _same(linear(given["x"], given["weight"]), total.to(dtype))
    grad_x, grad_weight, grad_bias = _gradients(given)
    assert _same(grad_x, spelled_out(given["grad"], given["weight"].T))
    assert _same(grad_weight, spelled_out(given["grad"].T, given["x"].T))
    acc = torch.zeros(21)
    for row in given["grad"].float():
        acc = acc + row
    assert _same(grad_bias, acc)


def test_another_order_would_show() -> None:
    given = _drawn(33, 24, 160)
    grad_x, grad_weight, _ = _gradients(given)
    outputs = given | {"grad": given["grad"].flip(1), "weight": given["weight"].flip(0)}
    assert not _same(_gradients(outputs)[0], grad_x)
    rows = given | {name: given[name].flip(0) for name in ("x", "grad")}
    assert not _same(_gradients(rows)[1], grad_weight)
    wide = _drawn(64, 64, 1600)
    turned = [wide[name].flip(1) for name in ("x", "weight")]
    assert not _same(linear(*turned), linear(wide["x"], wide["weight"]))


def test_batches_continue_the_chain_after_multiples_of_16_rows() -> None:
    given = _drawn(53, 24, 40)
    _, weight, bias = _gradients(given)
    for cut in (16, 48):
        first, rest = ({k: given[k][rows] for k in ("x", "grad")} for rows in (slice(cut), slice(cut, None)))
        starts = _gradients(given | first)[1:]
        _, *continued = _gradients(given | rest, *starts)
        assert _same(continued[0], weight) and _same(continued[1], bias), cut
    uneven = [{k: given[k][rows] for k in ("x", "grad")} for rows in (slice(20), slice(20, None))]
    assert not _same(_gradients(given | uneven[1], *_gradients(given | uneven[0])[1:])[1], weight)


def test_a_narrow_gradient_is_the_fp32_one_rounded_once() -> None:
    given = _drawn(19, 24, 40)
    for wide, narrow in zip(_gradients(given)[:2], _gradients(given, grad_dtype=torch.bfloat16)[:2], strict=True):
        assert wide is not None and _same(wide.bfloat16(), narrow)


def test_fp32_is_y_before_its_last_rounding() -> None:
    given = _drawn(19, 24, 40)
    x, weight, bias = given["x"], given["weight"], given["bias"]
    wide = linear(x, weight, bias, out_dtype=torch.float32)
    exact = torch.stack([tensor_core.chain(row[None], weight)[0] for row in x]) + bias.float()
    assert _same(wide, exact) and _same(wide.bfloat16(), linear(x, weight, bias))
    assert not torch.equal(wide, wide.bfloat16().float())
    assert _same(linear(x, weight, bias, out_dtype=torch.bfloat16), wide.bfloat16())


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_gradients_of_fp32_are_those_of_a_cast(how: str) -> None:
    """The upstream gradient is rounded once to the dtype of x."""
    given = _drawn(19, 24, 40)
    leaves = [given[name].requires_grad_() for name in ("x", "weight", "bias")]
    grad = torch.randn(19, 24, generator=torch.Generator().manual_seed(1))

    def unrounded(*leaves: Tensor) -> Tensor:
        return linear(*leaves, out_dtype=torch.float32)

    if how == "compiled":
        unrounded = torch.compile(unrounded, backend="aot_eager", fullgraph=True)
    got = torch.autograd.grad(unrounded(*leaves), leaves, grad)
    want = torch.autograd.grad(linear(*leaves), leaves, grad.bfloat16())
    assert all(map(_same, got, want))
    assert not _same(got[0], torch.autograd.grad(linear(*leaves), leaves, (2 * grad).bfloat16())[0])


# --- edges ------------------------------------------------------------------------------------------------------------


def test_zero_overflow_and_what_is_not_finite() -> None:
    """Never -0; NaN for what a chain overflows to, infinity for what is finite and too large for the dtype."""
    zero = torch.full((2, 16), -0.0).bfloat16()
    assert not bits(linear(zero, zero, zero[0, :2])).any()
    huge = torch.full((1, 16), 3e38).bfloat16()
    assert linear(huge, huge).isnan().all()
    half = torch.full((1, 16), 200.0).half()
    assert (linear(half, half) == float("inf")).all()
    given = _drawn(5, 24, 40)
    given["x"][2, 7] = float("inf")
    y = _y(given)
    assert y[2].isnan().all() and y[[0, 1, 3, 4]].isfinite().all()


def test_what_is_refused() -> None:
    given = _drawn(3, 24, 40)
    x, weight, bias = given["x"], given["weight"], given["bias"]
    with pytest.raises(TypeError, match=r"x has dtype torch\.float32, expected torch\.bfloat16 or torch\.float16"):
        linear(x.float(), weight.float())
    with pytest.raises(TypeError, match=r"weight has dtype torch\.float16, but x has torch\.bfloat16"):
        linear(x, weight.half())
    with pytest.raises(TypeError, match="bias has dtype"):
        linear(x, weight, bias.half())
    with pytest.raises(ValueError, match="weight has K = 39, but x has K = 40"):
        linear(x, weight[:, 1:])
    with pytest.raises(ValueError, match="bias has N = 23"):
        linear(x, weight, bias[1:])
    with pytest.raises(ValueError, match="K = 0 is outside"):
        linear(x[:, :0], weight[:, :0])
    with pytest.raises(TypeError, match=r"weight must be a torch\.Tensor"):
        linear(x, None)
    for wrong in (torch.float16, torch.float64):
        with pytest.raises(TypeError, match=r"out_dtype must be torch\.float32 or torch\.bfloat16 for these inputs"):
            linear(x, weight, out_dtype=wrong)


# --- plans ------------------------------------------------------------------------------------------------------------


def _calls(rows: Sequence[int]) -> Iterator[Call]:
    return sweep.calls(registry.spec("linear"), H200, rows=tuple(rows))


def test_other_tensor_cores_are_refused() -> None:
    for arch in (80, 89, 90, 100):
        call = next(iter(sweep.calls(registry.spec("linear"), dataclasses.replace(H200, arch=arch), rows=(1,))))
        why = cuda.refuses(call)
        assert (why is None) == (arch == 90)
        assert why is None or ("9.0" in why and str(arch / 10) in why)


@pytest.mark.parametrize("rows", [1, 8, 9, 64, 65, 3160])
def test_launches_cover_every_tile_and_fit(rows: int) -> None:
    # D6
    for call in _calls([rows]):
        n, k = call.size("N"), call.size("K")
        for plan in cuda.plans(call):
            assert {name for name, step in vars(plan).items() if step is not None} == set(call.wanted)
            for name, step in vars(plan).items():
                if step is None:
                    continue
                if name == "grad_bias":
                    _check_fold(step, n, call.layout("grad_y").aligned)
                    continue
                macros, (cross, _) = dict(step.kernel.defines), step.arguments
                sides = {"y": (rows, n), "grad_x": (rows, k), "grad_weight": (n, k)}[name]
                turned = {"y": (0, 0), "grad_x": (0, 1), "grad_weight": (1, 1)}[name]
                if cross:
                    sides, turned = sides[::-1], turned[::-1]
                assert (macros["TA"], macros["TB"], macros["CROSS"]) == (*turned, cross)
                if step.kernel.entry == wgmma.ENTRY:
                    _check_by_warpgroups(step, sides)
                    continue
                tile = 16 * macros["MT"] * macros["WM"], 8 * macros["NT"] * macros["WN"]
                assert step.grid == -(-sides[0] // tile[0]) * -(-sides[1] // tile[1])
                assert step.block == 32 * macros["WM"] * macros["WN"]
                assert step.shared == 128 * macros["STAGES"] * sum(tile)
                assert macros["BLOCKS"] * (step.shared + 1024) <= 228 * 1024, "blocks that share a multiprocessor"
                read = [
                    call.layout(at)
                    for at in {"y": ("x", "weight"), "grad_x": ("grad_y", "weight")}.get(name, ("grad_y", "x"))
                ]
                vectors = all(layout.aligned for layout in read) and n % 8 == k % 8 == 0
                assert macros["VEC"] == 1 or vectors or (name == "y" and k % 8 == 0)


def _check_fold(step: Launch, outputs: int, aligned: bool) -> None:
    macros = dict(step.kernel.defines)
    assert step.block == 32 and step.grid == -(-outputs // 32)
    assert macros["VEC"] == 1 or (aligned and outputs % 8 == 0 and macros["STAGES"] > 1)
    assert step.shared == 2 * 32 * macros["ROWS"] * macros["STAGES"] <= 48 * 1024


def _check_by_warpgroups(step: Launch, sides: tuple[int, int]) -> None:
    macros = dict(step.kernel.defines)
    tile = [(64 if macros["TURNS"] else 128) * macros["MI"], macros["NB"]]
    lines = tile[0] + (-(-tile[1] // 64) * 64 if macros["TB"] else tile[1])
    pieces = 4 * 128 * ((32 if macros["WIDE"] else 16) if macros["CROSS"] else 64)  # two of each warpgroup, at least
    assert macros["STAGES"] * (128 * lines + 16) + 1024 + pieces <= step.shared == macros["SHARED"] == 227 * 1024
    assert macros["MI"] * macros["NB"] <= 384, "sums of a thread fit into its registers"
    assert step.block == 384 and macros["NB"] % 8 == 0 and (macros["CROSS"] or macros["NB"] % 32 == 0)
    blocks = 1 if macros["SHARE"] == 0 else 2
    if macros["SHARE"]:
        tile[macros["SHARE"] - 1 ^ 1] *= 2
    clusters = -(-sides[0] // tile[0]) * -(-sides[1] // tile[1])
    assert step.grid == blocks * min(clusters, H200.multiprocessors // blocks)


def test_warpgroups_get_what_the_copy_engine_reads() -> None:
    """Bases and strides of 16 bytes, lines that do not overlap, results that are stored eight at a time."""
    seen = set()
    for call in _calls([264]):
        for plan in cuda.plans(call):
            for name, step in vars(plan).items():
                if step is not None and step.kernel.entry == wgmma.ENTRY:
                    seen.add(name)
                    read = {"y": ("x", "weight"), "grad_x": ("grad_y", "weight"), "grad_weight": ("grad_y", "x")}[name]
                    assert all(call.layout(at).aligned for at in read)
                    assert call.size("K") % 8 == 0 and call.size("N") % 8 == 0
    assert seen == {"y", "grad_x", "grad_weight"}
    call = next(c for c in _calls([264]) if c.aligned and not c.backward and c.size("N") % 8 == 0)
    step = cuda.plans(call)[0].y
    assert step is not None and step.kernel.entry == wgmma.ENTRY
    repeated = dict(call.layouts) | {"x": dataclasses.replace(call.layout("x"), strides=(0, 1))}
    entries = {
        step.kernel.entry
        for plan in cuda.plans(dataclasses.replace(call, layouts=tuple(repeated.items())))
        for step in plan
    }
    assert entries == {"gemm"}, "one row repeated has no line of its own"


def test_the_products_of_a_warpgroup_follow_one_another() -> None:
    """Where it cannot tell who writes the sums, the assembler waits after every instruction (gsb0) and says so in no result."""
    tile, sides = wgmma.Tile(2, 160, 4, 0, 1, 1), wgmma.Sides(128, 264, 136, False, False)
    kernel = wgmma.planned(tile, [sides], "bfloat16", False, 132).kernel
    code = compiling.read(compiling.compile_build(Build(kernel, ("kchain",)), "sm_90")).kernel.instructions
    products = [step for step in code if step.base == "HGMMA"]
    assert len(products) == 2 * 4 * tile.MI, (
        "the first stage, and one in the loop: four steps of every block of 64 rows"
    )
    assert sum("gsb0" in step.operands for step in products) == 2


def _folds() -> list[Launch]:
    """Of grad_bias, for an aligned call."""
    call = next(c for c in _calls([264]) if c.wanted == ("grad_bias",) and c.aligned and c.size("N") % 8 == 0)
    return [plan.grad_bias for plan in cuda.plans(call) if plan.grad_bias is not None]


def test_the_rows_of_grad_bias_are_on_their_way_together() -> None:
    """A load that might be left out is made where it is used, and then every row waits for memory: 1.2 ms for 3160 rows."""
    folds = [(dict(step.kernel.defines)["VEC"], step) for step in _folds()]
    assert {vec for vec, _ in folds} == {1, 8}
    for vec, step in folds:
        code = compiling.read(compiling.compile_build(Build(step.kernel, ("kchain",)), "sm_90")).kernel.instructions
        marks = "".join({"LDG": "g", "LDS": "s", "FADD": "+"}.get(each.base, "") for each in code)
        together = max(map(len, re.findall("g+" if vec == 1 else "s+", marks)))
        assert together >= (32 if vec == 1 else 8), marks


def test_grad_bias_goes_round_its_stages() -> None:
    """More rows than are on their way at once, and a last stage that is not full."""
    rows = 3 + max(
        macros["ROWS"] * (macros["STAGES"] + 1) for macros in (dict(step.kernel.defines) for step in _folds())
    )
    found = [
        case
        for case in emulated.candidates(registry.spec("linear"), rows=(rows,), sizes={"N": 40, "K": 1})
        if case.call.wanted == ("grad_bias",) and case.call.has("start_bias")
    ]
    assert {kernel for case in found for kernel in case.kernels} >= {step.kernel for step in _folds()}
    wrong = [str(finding) for case in found for finding in judge.findings(case)]
    assert not wrong, "\n".join(wrong[:5])


@pytest.mark.parametrize("multiprocessors", [1, 2, 131, 132])
def test_a_tile_is_chosen_by_the_multiprocessor_with_the_most_work(multiprocessors: int) -> None:
    """Fewer clocks come first, and what they count is whole tiles of the busiest one."""
    sides = wgmma.Sides(5376, 264, 7168, False, False)
    for tile in wgmma.BATCH:
        units = tile.units(tile.tiles(sides.rows, sides.columns), multiprocessors)
        assert 1 <= units <= tile.tiles(sides.rows, sides.columns) and units * tile.blocks <= max(
            multiprocessors, tile.blocks
        )
        more = dataclasses.replace(sides, columns=sides.columns + tile.NB * 2 * multiprocessors)
        assert wgmma.clocks(tile, [more], multiprocessors) > wgmma.clocks(tile, [sides], multiprocessors)
    wide, narrow = wgmma.Tile(2, 136, 4, 0, 1, 1), wgmma.Tile(2, 88, 7, 1, 0, 1)
    assert wgmma.clocks(narrow, [sides], 132) < wgmma.clocks(wide, [sides], 132), "42 large tiles leave 90 of 132 idle"


def test_short_narrow_gradients_of_large_weights_take_pairs_first() -> None:
    """As measured: 16-bit gradients of qkv at 264 rows, but not of more rows, of o, whose pairs have nine tiles, nor FP32 ones."""

    def first(name: str, rows: int, wide: bool) -> wgmma.Tile:
        n, k = SHAPES[name]
        ways = [(tile, [wgmma.Sides(n, k, rows, True, True)]) for tile in wgmma.WEIGHT]
        return wgmma.ordered(ways, few=False, wide=wide, multiprocessors=132)[0][0]

    single, pairs = wgmma.WEIGHT
    assert first("qkv", 264, False) == pairs
    assert first("qkv", 264, True) == first("qkv", 925, False) == first("o", 264, False) == single


def test_each_product_is_read_by_vectors_where_its_own_operands_allow() -> None:
    """D1, D3, D4: the operands of a product, and nothing else, decide how they are read."""
    operands = {"y": ("x", "weight"), "grad_x": ("grad_y", "weight"), "grad_weight": ("grad_y", "x")}
    for call in _calls([9]):
        layouts = dict(call.layouts)
        if not call.aligned or (call.size("N"), call.size("K")) not in SHAPES.values():
            continue
        for wrong in ("", *layouts):
            changed = layouts | ({wrong: dataclasses.replace(layouts[wrong], aligned=False)} if wrong else {})
            for plan in cuda.plans(dataclasses.replace(call, layouts=tuple(changed.items()))):
                for name, step in vars(plan).items():
                    if name in operands and step is not None and step.kernel.entry == wgmma.ENTRY:
                        assert wrong not in operands[name]
                    elif name in operands and step is not None:
                        assert dict(step.kernel.defines)["VEC"] == (1 if wrong in operands[name] else 8), (wrong, name)


def test_the_best_plans_of_the_model_shapes() -> None:
    """Few rows go crosswise, in blocks that give every multiprocessor work; from 65 on Hopper's own instruction is taken."""
    for n, k in SHAPES.values():
        for call in _calls([1, 16, 64, 65, 264, 16384]):
            if call.backward or (call.size("N"), call.size("K")) != (n, k) or not call.aligned:
                continue
            step = cuda.plans(call)[0].y
            assert step is not None and isinstance(step.grid, int)
            macros = dict(step.kernel.defines)
            assert (step.kernel.entry == wgmma.ENTRY) == (call.rows > cuda.FEW)
            assert macros["CROSS"] or call.rows > cuda.FEW
            assert step.grid >= (42 if call.rows == 65 else 84), "work for most of the 132 multiprocessors"


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@GPU
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_plan_has_the_bits_of_the_reference(dtype: torch.dtype) -> None:
    for rows, outputs, size in (
        (1, 64, 64),
        (5, 129, 33),
        (17, 40, 136),
        (70, 264, 88),
        (130, 136, 520),
        (300, 520, 200),
    ):
        given = {name: value.cuda() for name, value in _drawn(rows, outputs, size, dtype).items()}
        starts = torch.randn(outputs, size, device="cuda"), torch.randn(outputs, device="cuda")
        wide = _y(given, backend="reference", out_dtype=torch.float32)
        y, grads = wide.to(dtype), _gradients(given, *starts, backend="reference")
        for index in _indices("linear", given["x"], given["weight"], given["bias"]):
            with dispatch.force_plan(index):
                assert _same(y, _y(given, backend="cuda")), (rows, outputs, size, index)
                assert _same(wide, _y(given, backend="cuda", out_dtype=torch.float32)), (rows, outputs, size, index)
                assert all(map(_same, grads, _gradients(given, *starts, backend="cuda"))), (rows, outputs, size, index)


@GPU
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_plan_folds_many_rows(dtype: torch.dtype) -> None:
    for rows, outputs in ((925, 5376), (3160, 104), (3160, 33)):
        given = {name: value.cuda() for name, value in _drawn(rows, outputs, 8, dtype).items()}
        start, wanted = torch.randn(outputs, device="cuda"), (False, False, True)
        acc = start + 0.0
        for row in given["grad"].float():
            acc = acc + row
        call = (given["grad"], given["x"], given["weight"], None, start)
        for index in _indices("linear", *call, backward=True, wanted=wanted):
            with dispatch.force_plan(index):
                got = linear_backward(*call, backend="cuda", wanted=wanted)[2]
            assert _same(got, acc), (rows, outputs, index)


@GPU
@pytest.mark.parametrize("pattern", ["random", "wide", "cancelling", "subnormal"])
@pytest.mark.parametrize("shape", SHAPES)
def test_plans_and_batches_at_the_model_shapes(shape: str, pattern: str) -> None:
    """Every plan and every number of rows against one plan of all rows: a row has its bits wherever it stands."""
    n, k = SHAPES[shape]
    x, weight, grad = drawn_on_gpu(pattern, max(GPU_ROWS), n, k)
    y = linear(x, weight, backend="cuda")
    grad_x, *_ = linear_backward(grad, x, weight, backend="cuda", wanted=(True, False, False))
    for rows in GPU_ROWS:
        for first in positions(rows, len(x)):
            here = slice(first, first + rows)
            for index in _indices("linear", x[here], weight, None) if first == 0 and rows in SWEPT else (0,):
                with dispatch.force_plan(index):
                    got = linear(x[here], weight, backend="cuda")
                    back, *_ = linear_backward(grad[here], x[here], weight, backend="cuda", wanted=(True, False, False))
                assert _same(got, y[here]) and _same(back, grad_x[here]), (rows, first, index)


@GPU
@pytest.mark.parametrize("shape", SHAPES)
def test_a_model_shape_has_the_bits_of_the_integer_model(shape: str) -> None:
    """The CPU computes some outputs of some rows; the GPU all of them."""
    n, k = SHAPES[shape]
    x, weight, grad = drawn_on_gpu("random", 264, n, k)
    y = linear(x, weight, backend="cuda").cpu()
    grad_x, grad_weight, _ = linear_backward(grad, x, weight, backend="cuda")
    assert grad_x is not None and grad_weight is not None
    rows, outputs, inner = slice(0, 264, 53), slice(0, n, 97), slice(0, k, 89)
    on_cpu = {"x": x.cpu(), "weight": weight.cpu(), "grad": grad.cpu()}
    assert _same(y[rows, outputs], linear(on_cpu["x"][rows], on_cpu["weight"][outputs]))
    part = {
        "grad": on_cpu["grad"][rows],
        "x": on_cpu["x"][rows, inner].contiguous(),
        "weight": on_cpu["weight"][:, inner].contiguous(),
    }
    assert _same(grad_x.cpu()[rows, inner], _gradients(part, wanted=(True, False, False))[0])
    part = {
        "grad": on_cpu["grad"][:, outputs].contiguous(),
        "x": on_cpu["x"][:, inner].contiguous(),
        "weight": on_cpu["weight"][outputs, inner].contiguous(),
    }
    assert _same(grad_weight.cpu()[outputs, inner], _gradients(part, wanted=(False, True, False))[1])


@GPU
@pytest.mark.parametrize("shape", SHAPES)
def test_the_gradient_of_the_weight_has_the_bits_of_one_plan(shape: str) -> None:
    n, k = SHAPES[shape]
    x, weight, grad = drawn_on_gpu("random", 925, n, k)
    for rows in (1, 16, 17, 264, 925):
        first = None
        for index in _indices(
            "linear", grad[:rows], x[:rows], weight, None, None, backward=True, wanted=(False, True, False)
        ):
            with dispatch.force_plan(index):
                _, got, _ = linear_backward(grad[:rows], x[:rows], weight, backend="cuda", wanted=(False, True, False))
            first = got if first is None else first
            assert _same(first, got), (rows, index)


@GPU
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_cublas_where_that_does_not_split_the_sum(shape: str) -> None:
    """On Hopper one bit class serves the library at these shapes, which is an observation of cuBLAS and no promise of ours."""
    n, k = SHAPES[shape]
    x, weight, _ = drawn_on_gpu("random", 3160, n, k)
    differing = {
        rows: int((bits(linear(x[:rows], weight, backend="cuda")) != bits(F.linear(x[:rows], weight))).sum())
        for rows in CUBLAS[shape]
    }
    assert not any(differing.values()), differing
