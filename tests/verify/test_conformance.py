"""Can the conformance tests fail? Each fault of a kernel is planted as a backend of its own and must be noticed."""

import dataclasses
import importlib
import itertools
import re
from pathlib import Path

import pytest
import torch

from samebits import dispatch, registry
from samebits.verify.conformance import Conformance, Target, base, sizes
from samebits.verify.conformance import bits as bits_module
from samebits.verify.conformance.comparisons import Comparisons
from samebits.verify.layouts import LAYOUTS

REFERENCE = {name: importlib.import_module(f"samebits.ops.{name}.reference") for name in registry.names()}
PLANTED = Target("cuda", "cpu")
"""A backend that needs a GPU, replaced by one of ours that does not."""
NORMAL_FORWARD = (
    *("adaln_projection", "adaln_row_gather", "fp32_linear", "hc_split_sinkhorn", "linear"),
    *("rmsnorm_modulated", "timestep_mlp", "timestep_sinusoid"),
)
"""Operators whose forward has no subnormal value that shows: a sigmoid, a softmax, a cosine, what is behind a bias, a copy."""


class Backend:
    """The reference under another name; a fault may change what goes in or what comes out."""

    def __init__(self, op, plans=1, before=None, after=None):
        self.reference, self.count = REFERENCE[op], plans
        self.before = before or (lambda call, inputs: inputs)
        self.after = after or (lambda call, plan, inputs, results: None)

    def plans(self, call):
        return tuple(range(self.count))

    def run(self, call, plan, inputs, results, scalars):
        seen = self.before(call, inputs)
        self.reference.run(call, None, seen, results, scalars)
        self.after(call, plan, seen, results)


@pytest.fixture
def plant(monkeypatch):
    monkeypatch.setattr(dispatch, "refusal", lambda spec, backend, device, installed, contract: None)

    def planted(op="h_aggregate", **fault):
        monkeypatch.setitem(registry.operator(op)._backends, "cuda", Backend(op, **fault))
        tests = type("Planted", (Conformance,), {"op": op})()
        base._drawn.cache_clear()
        return tests

    yield planted
    base._drawn.cache_clear()


def default(op):
    return registry.spec(op).default_contract.name


def bits(tests):
    tests._assert_bits(PLANTED, default(tests.op), "normal", 17, (0, 1, 9, 33))


def layouts(tests):
    for layout, backward in itertools.product(LAYOUTS, (False, True)):
        tests.test_layouts(PLANTED, layout, backward)


@pytest.mark.parametrize("op", sorted(REFERENCE))
def test_a_right_backend_passes(plant, op):
    tests = plant(op, plans=2)
    with bits_module.quick_folds():  # nothing is to be found here, so each sum may be one call
        bits(tests)
        layouts(tests)
        for backward in (False, True):
            tests.test_any_strides(PLANTED, backward)
            tests.test_batch_axes_in_any_order(PLANTED, backward)
            tests.test_results_are_fully_written(PLANTED, default(op), backward)
        tests.test_inputs_are_left_alone(PLANTED, default(op))
        tests.test_special_rows_leave_their_neighbours_alone(PLANTED, default(op))
        tests.test_check_passes(PLANTED, default(op))


def flip(tensor):
    """One bit of the last element, wherever there is one."""
    if tensor.numel():
        tensor.view(torch.uint8)[..., -1] ^= 1


def second_plan(call, plan, inputs, results):
    if plan == 1 and call.rows >= 9:
        flip(next(iter(results.values())))


def odd_tail(call, plan, inputs, results):
    if call.size("D") % 8 and call.backward:
        flip(results["grad_residual"])


def threshold(call, plan, inputs, results):
    if call.rows > 32 and not call.backward:
        flip(results["hidden"])


def minus_zero(call, plan, inputs, results):
    for value in results.values():
        value += 0.0  # turns -0 into +0


@pytest.mark.parametrize("fault", [{"plans": 2, "after": second_plan}, {"after": odd_tail}, {"after": threshold}])
def test_wrong_bits_are_seen(plant, fault):
    with pytest.raises(AssertionError, match="elements differ"):
        bits(plant(**fault))


def test_a_lost_sign_of_zero_is_seen(plant):
    """E9"""
    tests = plant(after=minus_zero)
    with pytest.raises(AssertionError, match="0x8000"):
        tests._assert_bits(PLANTED, "ascending", "minus_zero", 17, (0, 1, 9, 33))


@pytest.mark.parametrize("op", sorted(REFERENCE))
def test_flushed_subnormals_are_seen(plant, op):
    """E10: a backend that flushes subnormals to zero, as a build with fast math does."""
    tests = plant(op)
    right = registry.operator(op)._backends["cuda"].run

    def flushed(*arguments):
        assert torch.set_flush_denormal(True), "this processor cannot flush subnormals"
        try:
            right(*arguments)
        finally:
            torch.set_flush_denormal(False)

    tests._assert_bits(PLANTED, default(op), "tiny", 17, (0, 1, 9))
    registry.operator(op)._backends["cuda"].run = flushed
    first = "backward" if op in NORMAL_FORWARD else "forward"
    with pytest.raises(AssertionError, match=rf"{first}.*elements differ"):
        tests._assert_bits(PLANTED, default(op), "tiny", 17, (0, 1, 9))

    def flushed_backward(call, *rest):
        (flushed if call.backward else right)(call, *rest)

    registry.operator(op)._backends["cuda"].run = flushed_backward
    with pytest.raises(AssertionError, match=r"backward.*elements differ"):
        tests._assert_bits(PLANTED, default(op), "tiny", 17, (0, 1, 9))


def as_if_dense(call, inputs):
    """A kernel that computes addresses from shapes and ignores strides."""
    return {
        name: t if t.is_contiguous() else t.as_strided(t.shape, torch.empty(t.shape, device="meta").stride())
        for name, t in inputs.items()
    }


def row_pitch_of_another(call, inputs):
    """A kernel that reads the upstream gradient with the row stride of the residual."""
    if not call.backward:
        return inputs
    grad, residual = inputs["grad_hidden"], inputs["residual"]
    pitch = residual.stride(0) // 4
    if (
        grad.shape[0] < 2
        or pitch * (grad.shape[0] - 1) + grad.shape[1] > grad.untyped_storage().nbytes() // grad.element_size()
    ):
        return inputs
    return {**inputs, "grad_hidden": grad.as_strided(grad.shape, (pitch, 1), 0)}


@pytest.mark.parametrize("before", [as_if_dense, row_pitch_of_another])
def test_a_misread_layout_is_seen(plant, before):
    with pytest.raises(AssertionError, match="layout of"):
        layouts(plant(before=before))


def narrow_offsets(call, plan, inputs, results):
    """What an offset of too few bits does to the last rows."""
    for value in results.values():
        if call.rows > 20:
            flip(value[-2:])


@pytest.mark.parametrize("backward", [False, True])
def test_a_narrow_offset_is_seen(plant, monkeypatch, backward):
    """C1, C2, C5"""
    monkeypatch.setattr(sizes, "OFFSET_LIMIT", 2**19)
    plant().test_offsets_beyond_32_bits(PLANTED, backward)
    with pytest.raises(AssertionError, match=r"row \d+ of \d+"):
        plant(after=narrow_offsets).test_offsets_beyond_32_bits(PLANTED, backward)


def overwrites_upstream(call, plan, inputs, results):
    if call.backward:
        inputs["grad_hidden"].mul_(2)


def overwrites_input(call, plan, inputs, results):
    if not call.backward:
        inputs["residual"].neg_()


@pytest.mark.parametrize("after", [overwrites_upstream, overwrites_input])
def test_a_write_into_an_input_is_seen(plant, after):
    with pytest.raises((AssertionError, RuntimeError)):
        plant(after=after).test_inputs_are_left_alone(PLANTED, "ascending")


def test_an_unwritten_element_is_seen(plant):
    def run(call, plan, inputs, results, scalars):
        kept = {name: value[..., -1:].clone() for name, value in results.items()}
        REFERENCE["h_aggregate"].run(call, None, inputs, results, scalars)
        for name, value in results.items():
            value[..., -1:] = kept[name]

    tests = plant()
    registry.operator("h_aggregate")._backends["cuda"].run = run
    for backward in (False, True):
        with pytest.raises(AssertionError, match="on poisoned memory"):
            tests.test_results_are_fully_written(PLANTED, "ascending", backward)


def leak(call, plan, inputs, results):
    if not call.backward:
        results["hidden"].copy_((results["hidden"].float() + 0 * results["hidden"].float().sum()).bfloat16())


def test_a_leak_between_rows_is_seen(plant):
    with pytest.raises(AssertionError, match="hidden beside"):
        plant(after=leak).test_special_rows_leave_their_neighbours_alone(PLANTED, "ascending")


def ignores_wanted(call, plan, inputs, results):
    if call.backward and "grad_pre" not in call.wanted:
        flip(results["grad_residual"])


def test_bits_that_depend_on_what_is_wanted_are_seen(plant):
    tests = plant(after=ignores_wanted)
    with pytest.raises(AssertionError):
        tests.test_only_what_is_wanted(PLANTED, "ascending")
    with pytest.raises(AssertionError):
        tests.test_every_subset_of_leaves(PLANTED, "ascending", (False, True))


def unordered(call, plan, inputs, results):
    if "grad_gamma" in results:
        products = (inputs["grad_y"].float() * inputs["x"].float()) * inputs["rstd"][:, None]
        results["grad_gamma"].copy_(products.flip(0).sum(0))


def test_a_parameter_gradient_in_another_order_is_seen(plant):
    with pytest.raises(AssertionError, match="grad_gamma"):
        bits(plant("rmsnorm_residual", after=unordered))


def test_a_wrong_formula_is_seen_by_the_golden(plant):
    def drop_gamma(call, inputs):
        return {**inputs, "gamma": torch.ones_like(inputs["gamma"])}

    with pytest.raises(AssertionError, match="outside"):
        plant("rmsnorm_residual", before=drop_gamma).test_accuracy(PLANTED, "ascending")


def test_an_ignored_scalar_is_seen(plant):
    tests = plant("rmsnorm_residual")
    right = registry.operator("rmsnorm_residual")._backends["cuda"].run
    registry.operator("rmsnorm_residual")._backends["cuda"].run = lambda call, plan, inputs, results, scalars: right(
        call, plan, inputs, results, {"eps": 1e-6}
    )
    with pytest.raises(AssertionError, match="is ignored"):
        tests.test_scalars_are_honoured(PLANTED, "ascending")


@pytest.mark.parametrize("op", registry.names())
def test_every_operator_is_tested(op):
    file = Path(__file__).parents[1] / "ops" / f"test_{op}.py"
    text = file.read_text()
    named = re.search(r"Conformance\):\n    op = (OP|\"(\w+)\")\n", text)
    assert named, "no conformance class"
    assert named[2] == op or (named[1] == "OP" and f'\nOP = "{op}"\n' in text)


def test_the_quick_fold_is_the_fold():
    """What judges very wide rows adds in the same order, with one rounding each, and keeps every sign of zero."""
    from samebits.exact import fold
    from samebits.exact.compare import first_difference
    from samebits.verify.inputs import PATTERNS, row_tensor

    terms = torch.cat([row_tensor("s", [0, 2], (3000,), torch.float32, pattern=p) for p in PATTERNS])
    terms = torch.cat([terms, torch.full((1, 3000), -0.0)])
    for dim in (-1, 0):
        slow = fold.left_fold(terms, dim)
        with bits_module.quick_folds():
            quick = fold.left_fold(terms, dim)
        assert first_difference(slow, quick, payloads=False) is None
    assert first_difference(terms.sum(-1), fold.left_fold(terms, -1), payloads=False) is not None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_quick_sums_of_a_gpu_are_the_definitions(dtype):
    """Folds, fused multiply-adds and tensor-core chains of every pattern of values."""
    from samebits.exact import fma as fused
    from samebits.exact import fold, tensor_core
    from samebits.exact.compare import first_difference
    from samebits.verify.inputs import PATTERNS, row_tensor

    def sums(a, b):
        terms, start = a.float() * b.float(), b[..., 0].float()
        folds = [fold.left_fold(terms, dim) for dim in (0, 1, -1)] + [fold.left_fold(terms, -1, start)]
        chains = tensor_core.chain(a, b), tensor_core.chain(a, b, folds[2][..., None].expand(4, 3, 3))
        return [*folds, fused.fma(a.float(), b.float(), b.float().flip(0)), *(c.nan_to_num(7, 7, 7) for c in chains)]

    for pattern in PATTERNS:
        a, b = (row_tensor(n, range(12), (100,), dtype, pattern=pattern).view(4, 3, 100).cuda() for n in "ab")
        slow = sums(a, b)
        with bits_module.quick_folds():
            quick = sums(a, b)
        assert len(slow) == 7
        for left, right in zip(slow, quick, strict=True):
            # A GPU's own multiply-add makes one NaN; the definition, by way of FP64, keeps a payload.
            assert first_difference(left, right, payloads=False) is None, pattern


def test_comparisons_that_wait_are_made():
    """The verdicts of a GPU are read late: what differs is found all the same, and the next use begins anew."""
    compared = Comparisons()
    right, wrong = torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])
    compared._waiting = [({"x": right}, {"x": right}, "one"), ({"x": right}, {"x": wrong}, "two")]
    compared._verdicts = [torch.tensor(False), torch.tensor(True)]
    with pytest.raises(AssertionError, match="two, x: row 0"):
        compared.settle()
    compared = Comparisons()
    with pytest.raises(AssertionError, match="three"):
        compared.add({"x": right}, {"x": wrong}, "three")
    compared.settle()


def second_chunk(call, plan, inputs, results):
    """A kernel that forgets the columns beyond its first chunk."""
    if call.size("D") > 300 and not call.backward:
        results["hidden"][..., 300:] = 0


def test_a_forgotten_chunk_is_seen(plant, monkeypatch):
    monkeypatch.setattr(bits_module, "VERY_WIDE_WIDTHS", (1000,))
    plant().test_bits_of_very_wide_rows(PLANTED, "ascending")
    with pytest.raises(AssertionError, match="forward, 1 rows"):
        plant(after=second_chunk).test_bits_of_very_wide_rows(PLANTED, "ascending")


def test_a_launch_without_rows_is_seen(plant, monkeypatch):
    tests, op = plant(), registry.operator("h_aggregate")
    real = op._known

    def one_row(request):
        decision, addresses = real(request)
        return dataclasses.replace(decision, call=dataclasses.replace(decision.call, rows=1)), addresses

    for backward in (False, True):
        tests.test_no_rows(PLANTED, "ascending", backward)
        with monkeypatch.context() as patch:
            patch.setattr(op, "_known", one_row)
            with pytest.raises(AssertionError, match="without rows was launched"):
                tests.test_no_rows(PLANTED, "ascending", backward)


def test_a_call_that_remembers_is_seen(plant):
    seen = []

    def warm(call, plan, inputs, results):
        seen.append(call)
        if len(seen) > 2:
            flip(next(iter(results.values())))

    plant().test_cold_and_warm_calls_agree(PLANTED, "ascending", False)
    with pytest.raises(AssertionError, match="a warm call"):
        plant(after=warm).test_cold_and_warm_calls_agree(PLANTED, "ascending", False)


def wrong_sum_of_many(call, plan, inputs, results):
    if "grad_gamma" in results and call.rows > 65536:
        flip(results["grad_gamma"])


def test_a_wrong_sum_over_very_many_rows_is_seen(plant):
    plant("rmsnorm_residual").test_very_many_rows(PLANTED, 65537)
    with pytest.raises(AssertionError, match="grad_gamma of 65537 rows"):
        plant("rmsnorm_residual", after=wrong_sum_of_many).test_very_many_rows(PLANTED, 65537)


def test_views_of_every_layout_keep_or_own_their_values():
    dense = torch.arange(60.0).view(3, 4, 5) + 1
    for name, layout in LAYOUTS.items():
        view = layout(dense)
        assert view is not None and view.shape == dense.shape and not view.isnan().any(), name
        if not name.startswith(("expanded", "overlapping")):
            assert torch.equal(view, dense), name
        assert name.startswith("misaligned") or not view.is_contiguous(), name
