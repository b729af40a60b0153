"""Can the conformance tests fail? Each fault of a kernel is planted as a backend of its own and must be noticed."""

import itertools

import pytest
import torch

from samebits import dispatch, registry
from samebits.ops.h_aggregate import reference as aggregate
from samebits.ops.rmsnorm_residual import reference as norm
from samebits.verify.conformance import Conformance, Target, base, sizes
from samebits.verify.layouts import LAYOUTS

REFERENCE = {"h_aggregate": aggregate, "rmsnorm_residual": norm}
PLANTED = Target("triton", "cpu")
"""A backend that needs a GPU, replaced by one of ours that does not."""


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
    monkeypatch.setattr(dispatch, "refusal", lambda spec, backend, device, installed: None)

    def planted(op="h_aggregate", **fault):
        monkeypatch.setitem(registry.operator(op)._backends, "triton", Backend(op, **fault))
        tests = type("Planted", (Conformance,), {"op": op})()
        base._drawn.cache_clear()
        return tests

    yield planted
    base._drawn.cache_clear()


def bits(tests):
    tests._assert_bits(PLANTED, "ascending", "normal", 17, (0, 1, 9, 33))


def layouts(tests):
    for layout, backward in itertools.product(LAYOUTS, (False, True)):
        tests.test_layouts(PLANTED, layout, backward)


@pytest.mark.parametrize("op", sorted(REFERENCE))
def test_a_right_backend_passes(plant, op):
    tests = plant(op, plans=2)
    bits(tests)
    layouts(tests)
    for backward in (False, True):
        tests.test_any_strides(PLANTED, backward)
        tests.test_batch_axes_in_any_order(PLANTED, backward)
        tests.test_results_are_fully_written(PLANTED, "ascending", backward)
    tests.test_inputs_are_left_alone(PLANTED, "ascending")
    tests.test_special_rows_leave_their_neighbours_alone(PLANTED, "ascending")
    tests.test_check_passes(PLANTED, "ascending")


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
    tests = plant(after=minus_zero)
    with pytest.raises(AssertionError, match="0x8000"):
        tests._assert_bits(PLANTED, "ascending", "minus_zero", 17, (0, 1, 9, 33))


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
        aggregate.run(call, None, inputs, results, scalars)
        for name, value in results.items():
            value[..., -1:] = kept[name]

    tests = plant()
    registry.operator("h_aggregate")._backends["triton"].run = run
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
    right = registry.operator("rmsnorm_residual")._backends["triton"].run
    registry.operator("rmsnorm_residual")._backends["triton"].run = lambda call, plan, inputs, results, scalars: right(
        call, plan, inputs, results, {"eps": 1e-6}
    )
    with pytest.raises(AssertionError, match="is ignored"):
        tests.test_scalars_are_honoured(PLANTED, "ascending")


def test_views_of_every_layout_keep_or_own_their_values():
    dense = torch.arange(60.0).view(3, 4, 5) + 1
    for name, layout in LAYOUTS.items():
        view = layout(dense)
        assert view is not None and view.shape == dense.shape and not view.isnan().any(), name
        if not name.startswith(("expanded", "overlapping")):
            assert torch.equal(view, dense), name
        assert name.startswith("misaligned") or not view.is_contiguous(), name
