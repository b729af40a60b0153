"""Micro-batches that continue one fold have the bytes of one batch; everything that would not is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from nn.formulas import Leaves, differing, leaves, same, sublayer, upstream
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import samebits
from samebits.nn import GradientChain, HyperConnection, HyperHead, RMSNorm, boundary_open, expand_gain, fold_gain

PARAMETERS = ("weight", "scale", "bias", "gamma")


def run(given: Leaves, family: str = "ascending") -> Tensor:
    x, link = boundary_open(
        given.residual, given.weight, given.scale, given.bias, given.gamma, contract=family, backend="reference"
    )
    return link.close(sublayer(x))


def parameters(given: Leaves) -> list[Tensor]:
    return [getattr(given, name) for name in PARAMETERS]


def single(rows: int, width: int = 12, family: str = "ascending") -> dict[str, Tensor]:
    given = leaves(rows, width)
    run(given, family).backward(upstream(rows, width))
    return {name: grad for name, grad in given.grads().items() if grad is not None}


def batches(given: Leaves, cuts: list[int]) -> list[tuple[Leaves, slice]]:
    return [(given.rows(a, b), slice(a, b)) for a, b in pairwise(cuts)]


@pytest.mark.parametrize("cuts", [[0, 7], [0, 3, 7], [0, 1, 2, 3, 4, 5, 6, 7], [0, 0, 4, 4, 7]])
def test_micro_batches_have_the_bytes_of_one_batch(cuts):
    given, parts = leaves(7), []
    with samebits.accumulate(parameters(given)):
        for part, rows in batches(given, cuts):
            run(part).backward(upstream(7)[rows])
            parts.append(part.residual.grad)
            assert given.weight.grad is None, "nothing before the end of the block"
    assert differing(given.grads() | {"residual": torch.cat(parts)}, single(7)) == []


def test_without_the_chain_the_bytes_are_others():
    given = leaves(7)
    for part, rows in batches(given, [0, 3, 7]):
        run(part).backward(upstream(7)[rows])
    expected = single(7)
    assert set(differing(given.grads(), {name: expected[name] for name in PARAMETERS})) >= {"weight", "bias"}


def test_fast_continues_behind_whole_chunks():
    given = leaves(257, 1)
    with samebits.accumulate(parameters(given)):
        for part, rows in batches(given, [0, 256, 257]):
            run(part, "fast-dsv4").backward(upstream(257, 1)[rows])
    expected = single(257, 1, "fast-dsv4")
    assert differing(given.grads(), {name: expected[name] for name in PARAMETERS}) == []


def test_fast_refuses_to_continue_inside_a_chunk():
    given = leaves(6, 2)
    with (
        pytest.raises(RuntimeError, match="chunks of 256, and an earlier micro-batch ended 4 rows"),
        samebits.accumulate(parameters(given)),
    ):
        for part, rows in batches(given, [0, 4, 6]):
            run(part, "fast").backward(upstream(6, 2)[rows])
    assert given.weight.grad is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_inside_the_block(reentrant):
    given = leaves(7)
    with samebits.accumulate(parameters(given)):
        for part, rows in batches(given, [0, 3, 7]):
            streams = checkpoint(
                lambda residual, part=part: run(replace(part, residual=residual)),
                part.residual,
                use_reentrant=reentrant,
            )
            streams.backward(upstream(7)[rows])
    expected = single(7)
    assert differing(given.grads(), {name: expected[name] for name in PARAMETERS}) == []


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            HyperConnection(12, backend="reference"),
            HyperConnection(12, norm=False, backend="reference"),
        )
        self.head, self.norm = HyperHead(12, backend="reference"), RMSNorm(12, backend="reference")
        self.other = torch.nn.Linear(12, 12, dtype=torch.bfloat16)

    def forward(self, streams: Tensor) -> Tensor:
        streams = self.first(streams, sublayer)
        return self.norm(self.head(self.second(streams, self.other)))


def test_every_module_takes_part():
    torch.manual_seed(0)
    model = Model()
    given, weight = leaves(7).residual.detach(), upstream(7)[:, 0]
    model(given).backward(weight)
    whole = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    model.head.hc_base.requires_grad_(False)
    with samebits.accumulate(model) as chain:
        for rows in (slice(0, 2), slice(2, 7)):
            model(given[rows]).backward(weight[rows])
    assert len(chain.buffers) == 4 + 3 + 2 + 1
    for name, parameter in model.named_parameters():
        if name == "head.hc_base":
            assert parameter.grad is None
        elif not name.startswith("other"):
            assert same(parameter.grad, whole[name]), name
    assert model.other.weight.grad is not None, "accumulates as always"


def test_another_rank_may_hand_over_the_start():
    """What a distributed chain does: receive where the fold starts, pass on where it ends."""
    sent: dict[int, Tensor] = {}

    class Handed(GradientChain):
        def take(self, parameter: Tensor) -> Tensor | None:
            return sent.get(parameter.numel())

        def put(self, parameter: Tensor, value: Tensor) -> None:
            super().put(parameter, value)
            sent[parameter.numel()] = value

    given = leaves(7)
    for part, rows in batches(given, [0, 3, 7]):
        rank = part.fresh()
        with Handed(parameters(rank)) as chain:
            run(rank).backward(upstream(7)[rows])
        chain.finish()
    expected = single(7)
    assert differing(rank.grads(), {name: expected[name] for name in PARAMETERS}) == []


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_gradient_from_before_is_refused():
    given = leaves()
    run(given).backward(upstream())
    with pytest.raises(ValueError, match="already has a gradient; zero_grad"), samebits.accumulate(parameters(given)):
        pass


def test_only_trainable_fp32_leaves_are_taken():
    for bad in (torch.zeros(3), torch.zeros(3, requires_grad=True) * 2, torch.zeros(3).bfloat16().requires_grad_()):
        with pytest.raises(ValueError, match="FP32 leaves that require grad"):
            GradientChain([bad])
    with (
        pytest.raises(ValueError, match="Linear holds no trainable parameter whose gradient samebits folds"),
        samebits.accumulate(torch.nn.Linear(2, 2)),
    ):
        pass
    with pytest.raises(ValueError, match="at least one parameter"):
        GradientChain([])


def test_one_parameter_in_two_chains_is_refused():
    given = leaves()
    with samebits.accumulate(parameters(given)):
        with pytest.raises(RuntimeError, match="belongs to another one"), samebits.accumulate([given.bias]):
            pass
        with samebits.accumulate(parameters(leaves())):
            pass


def test_a_gradient_beside_the_chain_is_refused():
    given = leaves()
    streams = run(given)
    with pytest.raises(RuntimeError, match="did not pass through the chain"), samebits.accumulate(parameters(given)):
        streams.backward(upstream())


def test_a_backward_behind_the_block_is_refused():
    given = leaves()
    with samebits.accumulate(parameters(given)):
        streams = run(given)
    with pytest.raises(RuntimeError, match="reached a gradient chain that was finished"):
        streams.backward(upstream())


def test_an_error_inside_leaves_no_gradients_and_no_chain():
    given = leaves()
    with pytest.raises(ZeroDivisionError), samebits.accumulate(parameters(given)):
        run(given).backward(upstream())
        raise ZeroDivisionError
    assert given.weight.grad is None
    given = given.fresh()
    run(given).backward(upstream())
    assert differing(given.grads(), single(7)) == []


@pytest.mark.parametrize("traced_before", [False, True])
def test_a_compiled_forward_is_refused(traced_before):
    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    given = leaves()
    if traced_before:
        compiled(given)
    with (
        pytest.raises(RuntimeError, match=r"samebits\.accumulate cannot follow a compiled forward"),
        samebits.accumulate(parameters(given)),
    ):
        compiled(given)


# --- scales -----------------------------------------------------------------------------------------------------------


def test_the_fold_of_a_gain_is_ascending_within_each_segment():
    grad = upstream(1, 8)[0].float().flatten()[:24]
    grad[5] = -0.0
    folded = fold_gain(grad)
    for value, part in zip(folded, grad.split([4, 4, 16]), strict=True):
        acc = torch.zeros(())
        for term in part:
            acc = acc + term
        assert same(value.clone(), acc)


def test_the_gain_repeats_the_scale_and_folds_its_gradient():
    scale = torch.tensor([1.5, -2.0, 0.25], requires_grad=True)
    gain = expand_gain(scale)
    assert gain.tolist() == [1.5] * 4 + [-2.0] * 4 + [0.25] * 16
    grad = upstream(1, 8)[0].float().flatten()[:24]
    gain.backward(grad)
    assert same(scale.grad, fold_gain(grad))
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(expand_gain(scale), scale, grad, create_graph=True)


# --- modules ----------------------------------------------------------------------------------------------------------


def test_a_module_is_its_two_calls():
    torch.manual_seed(0)
    connection = HyperConnection(12, contract="ascending-dsv4", backend="reference")
    streams = leaves().residual.detach()
    x, link = connection.open(streams)
    assert same(connection(streams, sublayer).detach(), link.close(sublayer(x)).detach())
    assert sorted(connection.state_dict()) == ["base", "fn", "norm.weight", "scale"]
    assert sorted(HyperConnection(12, norm=False).state_dict()) == ["base", "fn", "scale"]
    assert sorted(HyperHead(12).state_dict()) == ["hc_base", "hc_fn", "hc_scale"]
    assert {tuple(p.shape) for p in connection.parameters()} == {(24, 48), (24,), (3,), (12,)}


@pytest.mark.parametrize("kind", [HyperConnection, HyperHead, RMSNorm])
def test_a_module_names_an_unknown_contract_at_once(kind):
    with pytest.raises(ValueError, match="no family of contracts named 'quick'"):
        kind(12, contract="quick")
