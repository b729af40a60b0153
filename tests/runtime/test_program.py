"""What a program tells the driver is what its run would, with the addresses of the call; a run that does more has none."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import pytest
import torch
from runtime.no_gpu import STREAM, drive
from torch import Tensor

from samebits import dispatch, registry
from samebits.checks import DTYPES, Request
from samebits.dispatch import Call
from samebits.operator import Decision, _as_kernels_see
from samebits.ops.linear import grouped
from samebits.runtime import device as devices
from samebits.runtime import launch as launching
from samebits.runtime import sweep
from samebits.runtime import tensor_map as mapping
from samebits.runtime.device import H200
from samebits.runtime.launch import Launch, launch
from samebits.runtime.nvrtc import CudaKernel
from samebits.runtime.program import Form, Program, dense, form_of, recorded
from samebits.runtime.tensor_map import tensor_map
from samebits.sequence_ops.attention import contracts, cuda, cuda_backward
from samebits.sequence_ops.attention.checks import check as attention_check

PLAN = Launch(CudaKernel("any", "entry"), (3, 2), 128, shared=16)
OTHER = Launch(CudaKernel("any", "other"), 5, 64)
CPU = torch.device("cpu")
CUDA = [name for name in registry.names() if any(b.name == "cuda" for b in registry.spec(name).backends)]


class Map:
    """Stands in for a tensor map: 128 bytes that hold a number, by which the test finds what it was made of."""

    made: ClassVar[list[tuple[Any, ...]]] = []

    def __init__(self, *of: Any) -> None:
        self.held = (ctypes.c_int64 * 16)(len(self.made))
        self.made.append(of)

    def getPtr(self) -> int:
        return ctypes.addressof(self.held)


class Driver:
    """Reads each launch as the driver does. ``counts``: words of the launches to come; a negative one is a map."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []
        self.kinds: list[list[str]] = []
        self.status = 0
        self.meanwhile: Callable[[], None] | None = None

    def cuLaunchKernel(self, plan: Any, x: int, y: int, z: int, block: int, *rest: Any) -> tuple[int]:
        if self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()
        _, _, shared, stream, row, extra = rest
        assert (z, extra, stream) == (1, 0, STREAM)
        kinds = self.kinds.pop(0)
        addresses = (ctypes.c_void_p * len(kinds)).from_address(row)
        words = [ctypes.c_int64.from_address(address).value for address in addresses]
        told = tuple(("map", *Map.made[w]) if kind == "map" else w for kind, w in zip(kinds, words, strict=True))
        self.heard.append((plan, x, y, block, shared, told))
        return (self.status,)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    drive(monkeypatch, made)
    monkeypatch.setattr(launching, "_ready", {})
    monkeypatch.setattr(launching, "_load", ready)
    monkeypatch.setattr(mapping, "encoded", Map)
    monkeypatch.setattr(Map, "made", [])
    return made


def ready(plan: Launch, device: int) -> launching._Ready:
    x, y = plan.grid if isinstance(plan.grid, tuple) else (plan.grid, 1)
    return launching._Ready(plan, plan, x, y, plan.block, plan.shared)


class Expected:
    """Notes of a run on the tensors themselves: what the driver should hear."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []
        self.kinds: list[list[str]] = []

    def launch(self, plan: Launch, arguments: Sequence[Any]) -> None:
        self.kinds.append(["map" if isinstance(a, tuple) else "word" for a in arguments])
        told = tuple(a if isinstance(a, tuple) else word(a) for a in arguments)
        x, y = plan.grid if isinstance(plan.grid, tuple) else (plan.grid, 1)
        self.heard.append((plan, x, y, plan.block, plan.shared, told))

    def map(self, tensor: Tensor, box: tuple[int, ...], swizzle: bool) -> Any:
        return ("map", tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), box, swizzle)


def word(argument: Any) -> int:
    if isinstance(argument, ctypes.c_float):
        return ctypes.c_int32.from_buffer_copy(argument).value
    return argument.data_ptr() if isinstance(argument, Tensor) else int(argument)


def noted(run: Callable[[], None]) -> Expected:
    found = Expected()
    with launching.noting(found):
        run()
    return found


def told(driver: Driver, program: Program, expected: Expected, tensors: Sequence[Tensor | None]) -> list[Any]:
    driver.heard, driver.kinds = [], [list(kinds) for kinds in expected.kinds]
    program.run([0 if tensor is None else tensor.data_ptr() for tensor in tensors], CPU)
    return driver.heard


def same(heard: Sequence[Any], expected: Sequence[Any], tensors: Sequence[Tensor | None]) -> bool:
    """Whether both say the same of the tensors that are given, and agree on which of their own memory is which."""
    held = [(t.data_ptr(), t.untyped_storage().nbytes()) for t in tensors if t is not None]
    pairs: set[tuple[int, int]] = set()
    for one, other in zip(heard, expected, strict=True):
        if one[:-1] != other[:-1] or len(one[-1]) != len(other[-1]):
            return False
        for a, b in zip(one[-1], other[-1], strict=True):
            if isinstance(a, tuple) and isinstance(b, tuple) and a[2:] == b[2:]:
                a, b = a[1], b[1]
            if a != b:
                words = isinstance(a, int) and isinstance(b, int)
                if not words or a < 4096 or any(first <= b < first + size for first, size in held):
                    return False
                pairs.add((a, b))
    return len({a for a, _ in pairs}) == len({b for _, b in pairs}) == len(pairs)


# --- every operator ---------------------------------------------------------------------------------------------------


def sampled(name: str, count: int = 10) -> list[Call]:
    calls = [call for call in sweep.calls(registry.spec(name), H200, (1, 5, 300)) if call.wanted]
    drawn = random.Random(name).sample(calls, min(4 * count, len(calls)))
    module = registry.operator(name).backend("cuda")
    refuses = getattr(module, "refuses", lambda call: None)
    return [call for call in drawn if refuses(call) is None and module.plans(call)][:count]


def tensors_of(call: Call) -> list[Tensor | None]:
    """With the metadata of a call; nobody reads what is in them."""
    made: list[Tensor | None] = []
    for arg in registry.spec(call.op).direction(call.backward).inputs:
        if not call.has(arg.name):
            made.append(None)
            continue
        sizes = ((call.rows,) if arg.rows else ()) + tuple(call.size(axis) for axis in arg.axes)
        count, skipped = 1, int(not call.layout(arg.name).aligned)
        for size in sizes:
            count *= size
        made.append(torch.empty(count + skipped, dtype=DTYPES[call.layout(arg.name).dtype])[skipped:].view(sizes))
    return made


def decisions(call: Call, tensors: Sequence[Tensor | None]) -> Iterator[Decision]:
    op = registry.operator(call.op)
    scalars = [scalar.default for scalar in op.spec.scalars]
    mask = [r.name in call.wanted for r in op.spec.backward.results] if call.backward else None
    request = Request(call.backward, tensors, scalars, call.contract, "cuda", call.grad_dtype, mask, call.out_dtype)
    count = len(op.backend("cuda").plans(op._decision(request).call))
    for number in range(min(count, 3)):
        with dispatch.force_plan(number):
            yield op._decision(request)


@pytest.mark.parametrize("name", CUDA)
def test_a_program_launches_what_the_run_does(name: str, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    op = registry.operator(name)
    monkeypatch.setattr(devices, "info", lambda device: H200)
    monkeypatch.setattr(op, "_decisions", {})
    compared = 0
    for call in sampled(name):
        tensors = tensors_of(call)
        for decision in decisions(call, tensors):
            results = [torch.empty(o.shape, dtype=o.dtype) for o in decision.outputs]
            wanted = {o.declared.name: r for o, r in zip(decision.outputs, results, strict=True) if o.wanted}
            seen = _as_kernels_see(decision, tensors)
            sorts = call.backward and "index" in seen and not {"order", "bounds"} <= seen.keys()
            if sorts and any(name in wanted for name in ("grad_gate", "grad_shift", "grad_scale", "grad_table")):
                assert decision.program is None, "the order of the positions is made by operations of torch"
                continue
            expected = noted(
                lambda d=decision, s=seen, w=wanted: op.backend("cuda").run(d.call, d.choice.plan, s, w, d.scalars)
            )
            if decision.program is None:
                assert sorts
                continue
            for _ in range(2):  # the second time in words that were written before
                given = [*tensors, *results]
                assert same(told(driver, decision.program, expected, given), expected.heard, given), str(call)
            compared += 1
    assert compared >= 5


@pytest.mark.parametrize("backward", [False, True])
def test_several_linears_launch_what_they_do_without_a_program(
    backward: bool, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "info", lambda device: H200)
    monkeypatch.setattr(registry.operator("linear"), "_decisions", {})
    x = torch.empty(2, 132, 64, dtype=torch.bfloat16)
    weights = [torch.empty(outputs, 64, dtype=torch.bfloat16) for outputs in (64, 128, 192)]
    biases = [None, torch.empty(128, dtype=torch.bfloat16), torch.empty(192, dtype=torch.bfloat16)]
    upstream = [torch.empty(2, 132, len(weight), dtype=torch.bfloat16) for weight in weights]
    calls: list[Any] = list(zip([x] * 3, weights, biases, strict=True))
    if backward:
        calls = [(grad, x, weight, None, None) for grad, weight in zip(upstream, weights, strict=True)]
    found = grouped._decide(calls, backward, "kchain", None, "bfloat16", (True, True, False) if backward else None)
    assert found is not None and found.program is not None
    seen = [_as_kernels_see(decision, tensors) for decision, tensors in zip(found.decisions, calls, strict=True)]
    for one in seen[1:]:
        one["x"] = seen[0]["x"]
    results = [
        {o.declared.name: torch.empty(o.as_rows or o.shape, dtype=o.dtype) for o in decision.outputs if o.wanted}
        for decision in found.decisions
    ]
    module = registry.operator("linear").backend("cuda")
    expected = noted(lambda: module.run_together([d.call for d in found.decisions], found.plan, seen, results))
    given = [calls[call][at] for call, at in found.slots] + [t for made in results for t in made.values()]
    assert same(told(driver, found.program, expected, given), expected.heard, given)
    assert len(expected.heard) == (4 if backward else 1), "weights of several sizes have their own grad_x"


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("queries", [1, 264])
def test_attention_launches_what_it_does_without_a_program(backward: bool, queries: int, driver: Driver) -> None:
    fused = torch.empty(1, queries, 4, 3, 128, dtype=torch.bfloat16)
    q, k, v = fused.unbind(3)
    problem = attention_check("attention", q, k, v, None, None, 0.1, "cudnn")
    out, lse = torch.empty(q.shape, dtype=q.dtype), torch.empty(1, 4, queries)
    rest = (None, None, False, 0.1)
    if backward:
        tensors = (q, k, v, torch.empty_like(out), lse, torch.empty_like(lse), *(torch.empty_like(out) for _ in "qkv"))
        (plan, *_) = cuda_backward.plans(128, False, queries)
        expected = noted(lambda: cuda_backward._enqueue(problem, plan, tensors, *rest, (True, True)))
        program = cuda_backward.written_down(problem, plan, q, k, v, lse, tensors[3], False, 0.1, (True, True))
    else:
        tensors = (q, k, v, out, lse)
        recipe = contracts.recipe("cudnn")
        (first, *_) = cuda.plans(recipe, 128, False, queries, 1)
        expected = noted(lambda: cuda._enqueue(problem, recipe, first, tensors, *rest))
        program = cuda.written_down(problem, recipe, first, q, k, v, False, 0.1)
    assert program is not None
    assert same(told(driver, program, expected, tensors), expected.heard, tensors)
    assert len(expected.heard) == (2 if backward else 1)


# --- programs themselves ----------------------------------------------------------------------------------------------

ROWS = Form((4, 64), (64, 1), torch.bfloat16)


def test_views_temporaries_numbers_and_maps_are_written_down(driver: Driver) -> None:
    def run(given: Sequence[Any]) -> None:
        x, y = given
        sums, more = x.new_empty(4, 2, dtype=torch.float32), torch.empty_like(y)
        launch(PLAN, x, y[1:], sums, 7, -1, True, ctypes.c_float(1.5))
        launch(OTHER, tensor_map(x, (4, 64)), sums[:, 1], more, tensor_map(x, (4, 64)), tensor_map(y[2:], (2, 64)))

    program = recorded(run, (ROWS, ROWS))
    assert program is not None
    for _ in range(2):
        x, y = torch.ones(4, 64).bfloat16(), torch.ones(4, 64).bfloat16()
        expected = noted(lambda x=x, y=y: run((x, y)))
        heard = told(driver, program, expected, (x, y))
        assert same(heard, expected.heard, (x, y))
        first, second = heard[0][-1], heard[1][-1]
        assert first[1] == y.data_ptr() + 128 and second[1] == first[2] + 4 and second[0] == second[3] != second[4]
    assert len(Map.made) == 4, "one map for each tensor and box"


def test_a_map_is_made_once_for_an_address_and_again_when_it_was_forgotten(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("samebits.runtime.program.KNOWN_MAPS", 2)
    program = recorded(lambda given: launch(PLAN, tensor_map(given[0], (4, 64))), (ROWS,))
    assert program is not None
    tensors = [torch.ones(4, 64).bfloat16() for _ in range(3)]
    made = []
    for at in (0, 1, 0, 2, 0):
        expected = noted(lambda at=at: launch(PLAN, tensor_map(tensors[at], (4, 64))))
        assert same(told(driver, program, expected, (tensors[at],)), expected.heard, (tensors[at],))
        made.append(len(Map.made))
    assert made == [1, 2, 2, 3, 4]


def test_what_interrupts_a_program_has_words_of_its_own(driver: Driver) -> None:
    program = recorded(lambda given: launch(PLAN, given[0], 5), (ROWS,))
    assert program is not None
    one, other = torch.ones(4, 64).bfloat16(), torch.ones(4, 64).bfloat16()
    driver.kinds = [["word", "word"]] * 2
    driver.meanwhile = lambda: program.run([other.data_ptr()], CPU)
    program.run([one.data_ptr()], CPU)
    assert [told[-1][0] for told in driver.heard] == [other.data_ptr(), one.data_ptr()]


def test_a_launch_that_is_refused_is_an_error(driver: Driver) -> None:
    program = recorded(lambda given: launch(PLAN, given[0]), (ROWS,))
    assert program is not None
    driver.status, driver.kinds = 9, [["word"]]
    x = torch.ones(4, 64).bfloat16()
    with pytest.raises(RuntimeError, match=r"grid=\(3, 2\).* was refused: 9"):
        program.run([x.data_ptr()], CPU)


OUTSIDE = torch.ones(3)


@pytest.mark.parametrize(
    "more",
    [
        lambda x: x.zero_(),
        lambda x: x + 1,
        lambda x: x.item(),
        lambda x: x.contiguous(memory_format=torch.contiguous_format).sort(),
        lambda x: x.new_zeros(3),
        lambda x: launch(PLAN, OUTSIDE),
        lambda x: launch(PLAN, torch.empty(3)),
        lambda x: launch(PLAN, 1.5),
    ],
    ids=["fill", "add", "read", "sort", "zeros", "tensor from outside", "memory elsewhere", "unknown argument"],
)
def test_a_run_that_does_more_has_no_program(more: Callable[[Tensor], Any]) -> None:
    def run(given: Sequence[Any]) -> None:
        launch(PLAN, given[0])
        more(given[0][0, 0])

    assert recorded(run, (ROWS,)) is None
    assert recorded(lambda given: launch(PLAN, given[0]), (ROWS,)) is not None


def test_an_error_of_the_run_is_raised_and_ends_the_notes() -> None:
    def run(given: Sequence[Any]) -> None:
        raise KeyError("planned wrongly")

    with pytest.raises(KeyError, match="planned wrongly"):
        recorded(run, (ROWS,))
    assert launching.notes() is None


def test_forms() -> None:
    for shape in ((), (3,), (0, 4), (5, 1, 7)):
        tensor = torch.empty(shape, dtype=torch.float16)
        assert dense(shape, torch.float16) == form_of(tensor)
    assert form_of(torch.empty(4, 8)[:, ::2]) == Form((4, 4), (8, 2), torch.float32)
