"""One rounding of the streams' gradient, whatever autograd, checkpointing or a compiler does around it."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial

import pytest
import torch
from nn.formulas import Leaves, block, differing, leaves, same, sublayer, upstream
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from samebits.nn import FAMILIES, Link, boundary_close, boundary_open, contract_of
from samebits.registry import operator, spec

NAMES = tuple(f.name for f in fields(Leaves))


def opened(given: Leaves, family: str = "ascending") -> tuple[Tensor, Link]:
    return boundary_open(
        given.residual, given.weight, given.scale, given.bias, given.gamma, contract=family, backend="reference"
    )


def run(given: Leaves, family: str = "ascending") -> Tensor:
    x, link = opened(given, family)
    return boundary_close(link, sublayer(x))


@pytest.fixture(scope="module")
def expected():
    return block(leaves(), upstream(), "ascending")


@pytest.mark.parametrize("family", FAMILIES)
def test_autograd_arrives_at_the_written_formulas(family):
    given = leaves()
    streams = run(given, family)
    streams.backward(upstream())
    expected_streams, grads = block(given, upstream(), family)
    assert same(streams.detach(), expected_streams)
    assert differing(given.grads(), grads) == []
    assert given.residual.grad.dtype == torch.bfloat16


def test_autograd_over_the_operators_rounds_more_often(expected):
    """What the carrier is for: without it the gradient of the streams has other bits, all else has the same."""
    given = leaves()
    gain = torch.cat([given.scale[i].repeat(n) for i, n in enumerate((4, 4, 16))])
    _, x, post, comb, *_ = operator("mhc_pre_norm").forward(
        given.residual, given.weight, gain, given.bias, given.gamma, backend="reference"
    )
    (streams,) = operator("mhc_post").forward(given.residual, sublayer(x), comb, post, backend="reference")
    streams.backward(upstream())
    assert "residual" in differing(given.grads(), expected[1])
    assert differing(given.grads(), {name: expected[1][name] for name in ("weight", "bias", "gamma")}) == []


@pytest.mark.parametrize(
    "wanted", [("residual",), ("weight",), ("scale",), ("bias",), ("gamma",), ("weight", "gamma"), NAMES[1:]]
)
def test_any_subset_of_gradients(expected, wanted):
    given = leaves().fresh(frozen=tuple(set(NAMES) - set(wanted)))
    run(given).backward(upstream())
    grads = given.grads()
    assert [name for name in NAMES if grads[name] is not None] == list(wanted)
    assert differing(grads, {name: expected[1][name] for name in wanted}) == []


def test_nothing_wanted_gives_no_graph(expected):
    given = leaves().fresh(frozen=NAMES)
    streams = run(given)
    assert not streams.requires_grad and same(streams, expected[0])


def test_without_norm_is_mhc_pre():
    given, other = leaves(), leaves()
    x, link = boundary_open(given.residual, given.weight, given.scale, given.bias, backend="reference")
    gain = torch.cat([other.scale[i].repeat(n) for i, n in enumerate((4, 4, 16))])
    hidden, post, comb, *_ = operator("mhc_pre").forward(
        other.residual, other.weight, gain, other.bias, backend="reference"
    )
    assert same(x, hidden) and same(link.post, post) and same(link.comb, comb) and link.hidden is x
    weight = upstream()[:, 0]
    (x * weight).sum().backward()
    (hidden * weight).sum().backward()
    assert differing(given.grads(), {n: g for n, g in other.grads().items() if g is not None and n != "scale"}) == []


# --- what is used of an opened boundary -------------------------------------------------------------------------------


def test_never_closed_has_no_leg_of_the_post_mix():
    given, other = leaves(), leaves()
    x, _ = opened(given)
    x.backward(upstream()[:, 0])
    operator("mhc_pre_norm").forward(
        other.residual,
        other.weight,
        other.scale.repeat_interleave(torch.tensor([4, 4, 16])),
        other.bias,
        other.gamma,
        backend="reference",
    )[1].backward(upstream()[:, 0])
    assert differing(given.grads(), {n: g for n, g in other.grads().items() if g is not None and n != "scale"}) == []
    assert given.residual.grad.any()


def test_closed_alone_has_the_other_legs_of_zero_upstreams():
    """The sublayer cuts the graph: post and comb still lead to the controller."""
    given = leaves()
    x, link = opened(given)
    boundary_close(link, sublayer(x).detach()).backward(upstream())
    assert all(grad is not None and grad.isfinite().all() for grad in given.grads().values())
    assert given.weight.grad.any() and not given.gamma.grad.any()


def test_the_collapsed_streams_may_be_used_as_well():
    """The leg that the norm's fork has in the published block: added in FP32 behind the norm."""
    one, two = leaves(), leaves()
    for given, times in ((one, 1), (two, 2)):
        x, link = opened(given)
        streams = boundary_close(link, sublayer(x))
        torch.autograd.backward([streams, link.hidden], [upstream(), times * upstream()[:, 0]])
    assert not same(one.residual.grad, two.residual.grad)
    assert same(one.gamma.grad, two.gamma.grad)


def test_opened_without_gradients_is_a_constant():
    """As under torch.no_grad always: the streams then have the post mix alone."""
    given = leaves()
    with torch.no_grad():
        x, link = opened(given)
    boundary_close(link, sublayer(x)).backward(upstream())
    expected = operator("mhc_post").backward(
        upstream(),
        given.residual.detach(),
        sublayer(x),
        link.comb,
        link.post,
        grad_dtype=torch.bfloat16,
        backend="reference",
    )[0]
    assert same(given.residual.grad, expected)
    assert [name for name, grad in given.grads().items() if grad is not None] == ["residual"]


def test_no_grad_and_inference_mode_have_the_same_bits(expected):
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            streams = run(leaves())
        assert not streams.requires_grad and same(streams, expected[0])


def test_batch_axes_and_strides(expected):
    given = leaves(8, 12)
    flat = run(given)
    flat.backward(upstream(8, 12))
    cut = leaves(8, 12)
    streams = run(replace(cut, residual=cut.residual.view(2, 4, 4, 12)))
    assert streams.shape == (2, 4, 4, 12) and same(streams.flatten(0, 1), flat)
    streams.backward(upstream(8, 12).view(2, 4, 4, 12))
    assert differing(cut.grads(), {n: g for n, g in given.grads().items() if g is not None}) == []
    apart = leaves(8, 12)
    padded = torch.nn.functional.pad(apart.residual, (0, 4))[..., :12]
    assert same(run(replace(apart, residual=padded)), flat)


def test_no_rows():
    given = leaves(0, 12)
    streams = run(given)
    assert streams.shape == (0, 4, 12)
    streams.backward(torch.zeros_like(streams))
    assert all(grad is not None and not grad.any() for grad in given.grads().values())


def test_the_carrier_takes_no_memory():
    _, link = opened(leaves())
    assert link._carrier.shape == (7, 4, 12)
    assert link._carrier.untyped_storage().nbytes() == link._carrier.element_size()


# --- torch's machinery around it --------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_the_block(expected, reentrant):
    given = leaves()
    streams = checkpoint(
        lambda residual: run(replace(given, residual=residual)), given.residual, use_reentrant=reentrant
    )
    streams.backward(upstream())
    assert differing(given.grads(), expected[1]) == []


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_the_sublayer(expected, reentrant):
    given = leaves()
    x, link = opened(given)
    boundary_close(link, checkpoint(sublayer, x, use_reentrant=reentrant)).backward(upstream())
    assert differing(given.grads(), expected[1]) == []


def test_compiled_in_one_graph():
    torch._dynamo.reset()

    def step(given: Leaves) -> Tensor:
        x, link = opened(given)
        streams = link.close(torch.tanh(x))
        x, link = boundary_open(streams, given.weight, given.scale, given.bias, backend="reference")
        return link.close(torch.tanh(x))

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (7, 4, 1):
        eager, traced = leaves(rows), leaves(rows)
        outputs = [f(given) for f, given in ((step, eager), (compiled, traced))]
        for output in outputs:
            output.backward(upstream(rows))
        assert same(outputs[0].detach(), outputs[1].detach())
        assert differing(traced.grads(), {n: g for n, g in eager.grads().items() if g is not None}) == []
    with torch.no_grad():
        assert same(compiled(leaves()), step(leaves()))


def test_compiled_with_frozen_parameters():
    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    given, eager = leaves().fresh(frozen=NAMES[1:]), leaves()
    compiled(given).backward(upstream())
    run(eager).backward(upstream())
    assert differing(given.grads(), {"residual": eager.residual.grad}) == []


def test_a_graph_break_between_open_and_close(expected):
    torch._dynamo.reset()

    def step(given: Leaves) -> Tensor:
        x, link = opened(given)
        torch._dynamo.graph_break()
        return link.close(sublayer(x))

    given = leaves()
    streams = torch.compile(step, backend="aot_eager")(given)
    streams.backward(upstream())
    assert same(streams.detach(), expected[0])
    assert differing(given.grads(), expected[1]) == []


def test_two_blocks_in_a_row_and_twice_backward():
    given = leaves()
    streams = run(replace(given, residual=run(given)))
    streams.backward(upstream(), retain_graph=True)
    first = {name: grad.clone() for name, grad in given.grads().items()}
    for leaf in NAMES:
        getattr(given, leaf).grad = None
    streams.backward(upstream())
    assert differing(given.grads(), first) == []


# --- what is refused --------------------------------------------------------------------------------------------------


def test_double_backward_is_refused():
    given = leaves()
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(run(given), given.residual, upstream(), create_graph=True)
    x, _ = opened(given)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(x, given.residual, upstream()[:, 0], create_graph=True)


def test_closing_twice_is_refused_where_it_would_round_twice():
    x, link = opened(leaves())
    boundary_close(link, sublayer(x))
    with pytest.raises(RuntimeError, match="this link was closed before"):
        boundary_close(link, x)
    with torch.no_grad():
        x, link = opened(leaves())
        boundary_close(link, x)
        boundary_close(link, x)


def test_forward_mode_is_refused():
    given = leaves()
    with pytest.raises(NotImplementedError, match="forward-mode AD"):
        torch.func.jvp(lambda r: run(replace(given, residual=r)), (given.residual,), (given.residual,))


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"residual": torch.zeros(3, 4, 12)}, TypeError, "residual has dtype torch.float32"),
        ({"scale": torch.zeros(5)}, ValueError, "gain"),
        ({"scale": torch.zeros(3, dtype=torch.bfloat16)}, ValueError, r"scale must be \(3,\) float32"),
        ({"weight": torch.zeros(24, 40)}, ValueError, "K"),
        ({"bias": None}, TypeError, "bias must be a torch.Tensor"),
    ],
)
def test_wrong_inputs_are_named(change, error, match):
    with pytest.raises(error, match=match):
        run(replace(leaves(), **change))


def test_unknown_contracts_are_named():
    with pytest.raises(ValueError, match="no family of contracts named 'quick'"):
        opened(leaves(), "quick")
    with pytest.raises(ValueError, match="mhc_post: no contract named 'quick'"):
        opened(leaves(), {"mhc_post": "quick"})
    with pytest.raises(ValueError, match="'h_aggregate', which is not used here"):
        opened(leaves(), {"h_aggregate": "tree256"})


def test_every_family_names_contracts_that_exist():
    for family in FAMILIES:
        for name in ("mhc_pre", "mhc_pre_norm", "mhc_post", "hyper_head", "rmsnorm_residual"):
            spec(name).contract(contract_of(name, family))
    assert contract_of("mhc_post", "fast-dsv4") == "fast"
    assert contract_of("rmsnorm_residual", "fast") == "tree512"
    assert contract_of("mhc_pre", {"mhc_post": "fast"}) == "ascending"


def test_opcheck_of_the_ops_that_a_compiler_sees():
    given = leaves(3)
    gain = given.scale.detach().repeat_interleave(torch.tensor([4, 4, 16])).requires_grad_()
    check = partial(torch.library.opcheck, test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))
    check(
        torch.ops.samebits.mhc_pre_open.default,
        (given.residual, given.weight, gain, given.bias, 1e-6, "ascending", "reference"),
    )
    check(torch.ops.samebits.expand_gain.default, (given.scale, [4, 4, 16]))
    check(torch.ops.samebits.fold_gain.default, (gain.detach(), [4, 4, 16]))
