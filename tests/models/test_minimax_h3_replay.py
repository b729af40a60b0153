"""The replay of the conditioning chain: that what holds is seen to hold, and that each planted fault is named.

The peer here is the eager provider; ``test_minimax_h3_peer`` has diffusers itself.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from models import h3_exact
from typer.testing import CliRunner

from samebits import cli, observers, registry
from samebits.models.minimax_h3 import (
    backward,
    block_replay,
    chain,
    forward,
    geometry,
    golden,
    latency,
    measure,
    provider,
    record,
    replay,
    stages,
    weights,
)
from samebits.models.minimax_h3.candidate import PROVIDER, Candidate
from samebits.report import replays
from samebits.report.pages import tables_page
from samebits.verify.tolerance import Tolerance

REPEAT = "every stage repeats bit for bit"
ROWS = "a row has the same bits alone as in the batch"
PROMISE = "fed by the peer, every stage that promises it has the peer's bits"
GOLDEN = "every stage is within its tolerance of the golden"
FORWARD = "fused, the forward has the bits of projection and gather"
GRADIENT_REPEAT = "every gradient repeats bit for bit"
GRADIENT_ERROR = "no gradient is further from the golden than 1.5 times the peer's, plus 0.005"
FUSED = (
    "fused, gradients of the time embedder are within 1e-05 of the golden, and of those of the projection 99% are "
    "correctly rounded"
)
ALL = [REPEAT, ROWS, PROMISE, GOLDEN, FORWARD, GRADIENT_REPEAT, GRADIENT_ERROR, FUSED]


@pytest.fixture(scope="module")
def small():
    return weights.synthetic(0, geometry.reduced(32))


@pytest.fixture(scope="module")
def run(small):
    def run(timesteps=(3,), seq_lens=(37,), with_backward=False, **faulty):
        candidate = Candidate(h3_exact.bindings(**faulty))
        return replay.replay(
            small,
            timesteps=timesteps,
            seq_lens=seq_lens,
            candidate=candidate,
            against="provider",
            with_backward=with_backward,
        )

    return run


@pytest.fixture(scope="module")
def honest(run):
    return run(timesteps=(1, 3), seq_lens=(3, 37), with_backward=True)


def broken(result):
    return {check.name: check.detail for check in result.checks if not check.passed}


# --- what holds -------------------------------------------------------------------------------------------------------


def test_an_honest_candidate_keeps_every_promise(honest):
    assert [check.name for check in honest.checks] == ALL
    assert broken(honest) == {} and honest.passed
    # 4 cases: 7 stages, 2 of them with a promise on a CPU; 6 leaves in two modes, the last claim in one
    assert [check.judged for check in honest.checks] == [28, 28, 8, 28, 4, 48, 48, 24]
    assert [case.title for case in honest.cases] == ["T = 1, S = 3", "T = 3, S = 3", "T = 1, S = 37", "T = 3, S = 37"]
    assert not any(stage.stand_in for case in honest.cases for stage in case.stages)


def test_every_stage_is_reported_with_its_owner(honest):
    for case in honest.cases:
        assert [stage.name for stage in case.stages] == [stage.name for stage in stages.STAGES]
        assert all(stage.owner == f"models.h3_exact:{stage.name}" for stage in case.stages)
        assert all(
            stage.rows.checked == (case.seq_len if i > 2 else case.num_timesteps) for i, stage in enumerate(case.stages)
        )


def test_the_peer_is_compared_with_itself(honest):
    """A GEMM of the CPU's library gives a row of the embedder other bits alone, at least on machines with AVX-512."""
    for case in honest.cases:
        assert all(stage.peer_repeat for stage in case.stages)
        for stage in case.stages:
            assert 0 <= stage.peer_rows.varying <= stage.peer_rows.checked
            assert (stage.peer_rows.first is None) == (stage.peer_rows.varying == 0)


def test_gradients_are_there_for_every_leaf_and_mode(honest):
    for case in honest.cases:
        assert tuple(leaf.name for leaf in case.gradients.leaves) == stages.LEAVES
        for leaf in case.gradients.leaves:
            assert list(leaf.modes) == ["separate", "fused", "peer"]
            assert leaf.golden_absmax > 0
    big = honest.cases[-1].gradients.leaves
    for leaf in big[:4]:  # what the FP32 gradient of the table is for
        assert leaf.modes["fused"].relative < leaf.modes["peer"].relative / 10


def test_our_operators_keep_their_promises(small):
    """Every stage is an operator of ours; on a CPU by its reference."""
    result = replay.replay(
        small,
        timesteps=[3],
        seq_lens=[37],
        candidate=Candidate(backend="reference"),
        against="provider",
        with_backward=True,
    )
    assert broken(result) == {}
    for stage in result.cases[0].stages:
        assert stage.owner == f"samebits:{stage.name}" and not stage.stand_in
        assert bool(stage.contract) == (stage.name in registry.names())
    assert result.cases[0].gradients.stand_ins == ()
    assert all(check.judged for check in result.checks)
    leaves = result.cases[0].gradients.leaves
    for leaf in leaves[:4]:  # what the fused node is for: its table gradient is not rounded
        assert leaf.modes["fused"].relative < leaf.modes["separate"].relative / 100


def test_stand_ins_are_not_judged(small):
    """The provider varies and promises nothing; bound by name it is a stand-in, whatever it does."""
    names = {name: f"{PROVIDER}:{name}" for name in stages.CONDITIONING.names}
    result = replay.replay(
        small, timesteps=[3], seq_lens=[3], candidate=Candidate(names), against="provider", with_backward=True
    )
    (case,) = result.cases
    assert all(stage.stand_in for stage in case.stages) and result.passed
    assert not any(check.judged for check in result.checks)
    assert case.gradients.stand_ins == ("separate", "fused")
    assert case.first_drift is None and case.first_isolated_drift is None


def test_launches_of_operators_are_recorded(run):
    decision = SimpleNamespace(call=SimpleNamespace(contract="torch"), choice=SimpleNamespace(backend="reference"))

    def gate(residual, y, gate, index):
        observers.tell("adaln_gate_residual", False, [], [], decision)
        return provider.adaln_gate_residual(residual, y, gate, index)

    (case,) = run(adaln_gate_residual=gate).cases
    assert [stage.launches for stage in case.stages] == [()] * 5 + [("adaln_gate_residual torch reference",), ()]
    assert observers.OBSERVERS == []


# --- planted faults ---------------------------------------------------------------------------------------------------


def test_a_stage_that_does_not_repeat(run):
    calls = []

    def gate(residual, y, gate, index):
        calls.append(None)
        return provider.adaln_gate_residual(residual, y, gate, index) + (len(calls) % 2) * 2.0**-6

    found = broken(run(adaln_gate_residual=gate))
    assert found[REPEAT] == "T = 3, S = 37: adaln_gate_residual"


def test_a_row_that_depends_on_the_batch(run):
    def norm(x, weight, shift, scale, index, eps=1e-5):
        y = h3_exact.rmsnorm_modulated(x, weight, shift, scale, index, eps)
        return y if x.shape[1] > 1 else y + y.abs().max() * 2.0**-7

    result = run(rmsnorm_modulated=norm)
    assert broken(result) == {ROWS: "T = 3, S = 37: rmsnorm_modulated"}
    seen = result.cases[0].stages[4].rows
    assert seen.varying == seen.alone == seen.alone_varying == forward.ROWS < seen.checked


@pytest.mark.parametrize("fault", [lambda six: six[:5], lambda six: tuple(c.float() for c in six)])
def test_a_row_with_other_outputs_alone(run, fault):
    def gather(table, index):
        six = provider.adaln_row_gather(table, index)
        return six if len(index) > 1 else fault(six)

    assert broken(run(adaln_row_gather=gather)) == {ROWS: "T = 3, S = 37: adaln_row_gather"}


def test_a_row_that_depends_on_its_position(run):
    def norm(x, weight, shift, scale, index, eps=1e-5):
        y = h3_exact.rmsnorm_modulated(x, weight, shift, scale, index, eps).clone()
        y[:, 17:18] *= 1 + 2.0**-7
        return y

    assert broken(run(rmsnorm_modulated=norm)) == {ROWS: "T = 3, S = 37: rmsnorm_modulated"}


def test_a_row_that_depends_on_the_other_rows_of_the_table(run):
    """Its own x row alone would not show it: the table must be narrowed too."""

    def final(x, norm_weight, temb, weight, bias, timestep_indices, eps=1e-5):
        y = h3_exact.final_adaln_out(x, norm_weight, temb, weight, bias, timestep_indices, eps)
        return y if temb.shape[0] > 1 else y * (1 + 2.0**-7)

    assert broken(run(final_adaln_out=final)) == {ROWS: "T = 3, S = 37: final_adaln_out"}


def test_a_product_that_is_not_rounded_breaks_the_promise(run):
    """One rounding less than the model: more accurate, and not its bits."""

    def gate(residual, y, gate, index):
        return h3_exact.GOLDEN.adaln_gate_residual(residual, y, gate, index).to(residual.dtype)

    result = run(adaln_gate_residual=gate)
    assert broken(result) == {PROMISE: "T = 3, S = 37: adaln_gate_residual"}
    stage = result.cases[0].stages[5]
    assert 0 < stage.isolated.differing < stage.isolated.elements and "first at [" in stage.isolated.first
    assert stage.error.correctly_rounded > stage.peer_error.correctly_rounded


def test_only_isolated_bits_are_promised(run):
    """A stage before it that differs makes the chain differ behind it, which breaks no promise of what comes after."""

    def projection(temb, weight, bias):
        return h3_exact.adaln_projection(temb, weight, bias) * (1 + 2.0**-7)

    result = run(adaln_projection=projection)
    (case,) = result.cases
    assert broken(result) == {}
    gather = case.stages[3]
    assert not gather.chained.same and gather.isolated.same
    assert case.first_isolated_drift in ("timestep_sinusoid", "timestep_mlp", "adaln_projection")


def test_the_first_drift_is_named(small):
    only = {"adaln_gate_residual": lambda residual, y, gate, index: residual}
    providers = {name: getattr(provider, name) for name in stages.CONDITIONING.names}
    result = replay.replay(
        small, timesteps=[2], seq_lens=[5], candidate=Candidate(providers | only), against="provider"
    )
    (case,) = result.cases
    assert case.first_drift == case.first_isolated_drift == "adaln_gate_residual"
    assert [stage.chained.same for stage in case.stages] == [True] * 5 + [False] * 2
    assert case.stages[6].isolated.same
    assert PROMISE in broken(result) and GOLDEN in broken(result)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("timestep_sinusoid", lambda honest, timestep, num_channels=256: honest(timestep * 1000, num_channels)),
        ("timestep_sinusoid", lambda honest, timestep, num_channels=256: honest(timestep, num_channels).roll(128, -1)),
        ("timestep_mlp", lambda honest, x, **w: honest(x.bfloat16().float(), **w)),
        ("adaln_projection", lambda honest, temb, weight, bias: honest(temb, weight, bias * 0)),
        ("adaln_row_gather", lambda honest, table, index: honest(table, index.flip(0))),
        ("rmsnorm_modulated", lambda honest, shift, scale, **rest: honest(shift=scale, scale=shift, **rest)),
        ("rmsnorm_modulated", lambda honest, eps=1e-5, **rest: honest(eps=1.0, **rest)),
        ("adaln_gate_residual", lambda honest, gate, index, **rest: honest(gate=gate, index=index // 3, **rest)),
        ("final_adaln_out", lambda honest, bias, **rest: honest(bias=bias.roll(len(bias) // 2), **rest)),
    ],
)
def test_wrong_values_are_outside_of_the_tolerance(run, name, fault):
    honest = getattr(h3_exact, name)
    found = broken(run(**{name: lambda **arguments: fault(honest, **arguments)}))
    assert found[GOLDEN].startswith(f"T = 3, S = 37: {name}")


def test_a_result_that_is_not_finite_is_outside_of_the_tolerance(run):
    def final(**arguments):
        y = h3_exact.final_adaln_out(**arguments).clone()
        y[0, 0, 0] = float("nan")
        return y

    result = run(final_adaln_out=final)
    assert broken(result)[GOLDEN] == "T = 3, S = 37: final_adaln_out"
    assert result.cases[0].stages[6].error.max_abs is None
    json.dumps(result.to_json(), allow_nan=False)


def test_a_missing_output_is_a_difference(run):
    result = run(adaln_row_gather=lambda table, index: provider.adaln_row_gather(table, index)[:5])
    assert {PROMISE, GOLDEN} <= set(broken(result))
    assert result.cases[0].stages[3].isolated.first == "5 outputs against 6"


@pytest.mark.parametrize(
    ("callable_", "message"),
    [
        (lambda **_: 1 / 0, "stage final_adaln_out raised ZeroDivisionError: division by zero"),
        (lambda **_: "text", "stage final_adaln_out returned a str"),
    ],
)
def test_a_stage_that_fails_is_named(run, callable_, message):
    with pytest.raises(chain.StageError, match=message):
        run(final_adaln_out=callable_)


def test_a_fused_node_that_rounds_the_gradient_of_the_table(run):
    result = run(with_backward=True, adaln_modulation=lambda **arguments: provider.adaln_modulation(**arguments))
    (name,) = broken(result)
    assert name == FUSED
    assert "fused: time_embedder.linear_1.weight" in broken(result)[FUSED]


def test_a_fused_node_with_another_forward(run):
    def modulation(temb, weight, bias, index):
        *five, last = h3_exact.adaln_modulation(temb, weight, bias, index)
        return (*five, last * (1 + 2.0**-7))

    found = broken(run(with_backward=True, adaln_modulation=modulation))
    assert found[FORWARD] == "T = 3, S = 37" and FUSED in found


def test_a_backward_that_fails_is_named(run):
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(context, value):
            return value.clone()

        @staticmethod
        def backward(context, grad):
            raise RuntimeError("no gradient here")

    with pytest.raises(chain.StageError, match="gradients, separate: RuntimeError: no gradient here"):
        run(with_backward=True, timestep_mlp=lambda **a: Failing.apply(h3_exact.timestep_mlp(**a)))


def test_a_gradient_that_does_not_repeat(run):
    calls = []

    class Drifting(torch.autograd.Function):
        @staticmethod
        def forward(context, value):
            return value.clone()

        @staticmethod
        def backward(context, grad):
            calls.append(None)
            return grad * (1 + 2.0**-20 * len(calls))

    def mlp(x, w1, b1, w2, b2):
        return h3_exact.timestep_mlp(x, w1, b1, w2, Drifting.apply(b2))

    found = broken(run(with_backward=True, timestep_mlp=mlp))
    assert list(found) == [GRADIENT_REPEAT]
    names = ("separate: time_embedder.linear_2.bias", "fused: time_embedder.linear_2.bias")
    assert found[GRADIENT_REPEAT] == "; ".join(f"T = 3, S = 37, {name}" for name in names)


def test_a_gradient_that_is_wrong(run):
    def projection(temb, weight, bias):
        """The SiLU's gradient is forgotten."""
        act = provider.functional.silu(temb.detach()) + (temb - temb.detach())
        return provider.functional.linear(act.to(weight.dtype), weight, bias)

    found = broken(run(with_backward=True, adaln_projection=projection))
    assert "T = 3, S = 37, separate: time_embedder.linear_1.weight" in found[GRADIENT_ERROR]
    assert "fused" not in found[GRADIENT_ERROR]


# --- the golden -------------------------------------------------------------------------------------------------------


def made(dtype, num_timesteps=3, seq_len=20, width=32):
    drawn = weights.synthetic(3, geometry.reduced(width))
    as_dtype = {name: t if t.dtype == torch.float32 else t.to(dtype) for name, t in drawn.tensors.items()}
    return stages.make_case(weights.Weights("", drawn.geometry, as_dtype), num_timesteps, seq_len, seed=5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_golden_is_the_chain_of_the_model(dtype):
    """Beside the provider in both dtypes: FP32 leaves no room for a wrong formula, BF16 none for a missing rounding."""
    case, judge = made(dtype), golden.Golden(dtype)
    exact, eager = {}, {}
    for stage in stages.STAGES:
        exact[stage.name] = stage.run(lambda name: getattr(judge, name), stage.arguments(case, exact))
        eager[stage.name] = stage.run(lambda name: getattr(provider, name), stage.arguments(case, eager))
        off = measure.error(eager[stage.name], exact[stage.name], Tolerance(1, 1))
        assert all(value.dtype == torch.float64 for value in exact[stage.name])
        assert off.relative < (1e-6 if dtype == torch.float32 else 1.2e-2), stage.name


def test_the_golden_stores_what_the_model_stores():
    """Without the roundings of the normed row and of 1 + scale the provider's product would be off in most elements."""
    case, judge = made(torch.bfloat16, seq_len=200), golden.Golden(torch.bfloat16)
    history = {}
    for stage in stages.STAGES[:3]:
        history[stage.name] = stage.run(lambda name: getattr(provider, name), stage.arguments(case, history))
    norm = stages.STAGES[4]
    arguments = norm.arguments(case, history)
    arguments["shift"] = torch.zeros_like(arguments["shift"])
    rounded = judge.rmsnorm_modulated(**arguments).bfloat16()
    assert torch.equal(rounded, provider.rmsnorm_modulated(**arguments))
    unrounded = golden.Golden(torch.float64).rmsnorm_modulated(**arguments).bfloat16()
    assert (unrounded != rounded).float().mean() > 0.2


def test_the_golden_rounds_the_fp32_silu():
    """At ties of BF16 the rounded FP64 SiLU is another number; only the FP32 one is the model's activation."""
    temb = torch.linspace(-6, 6, 200_001)[:, None]
    eye, zero = torch.ones(1, 1, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.bfloat16)
    found = golden.Golden(torch.bfloat16).adaln_projection(temb, eye, zero)
    in_model = torch.nn.functional.silu(temb).bfloat16()
    assert torch.equal(found, in_model.double())
    wide = temb.double()
    assert not torch.equal(found, measure.rounded(wide * torch.sigmoid(wide), torch.bfloat16).double())


def test_roundings_of_the_golden_are_straight_through():
    judge = golden.Golden(torch.bfloat16)
    value = torch.tensor([1.001, -3.3], dtype=torch.float64, requires_grad=True)
    stored = judge.stored(value)
    assert torch.equal(stored, value.detach().bfloat16().double()) and not torch.equal(stored, value)
    (grad,) = torch.autograd.grad(stored.sum() * 3, value)
    assert grad.tolist() == [3.0, 3.0]
    temb = torch.tensor([[0.7]], dtype=torch.float64, requires_grad=True)
    table = judge.adaln_projection(temb, torch.ones(1, 1), torch.zeros(1))
    s = torch.sigmoid(temb.detach())
    torch.testing.assert_close(torch.autograd.grad(table.sum(), temb)[0], s * (1 + temb.detach() * (1 - s)))


def test_gradients_of_the_golden_are_those_of_finite_differences():
    case = made(torch.bfloat16, num_timesteps=2, seq_len=6, width=16)
    judge = golden.Golden(
        torch.float64
    )  # rounds nothing but the activation to FP64, so that a difference quotient works
    silu = torch.nn.functional.silu
    judge._activation = lambda temb: silu(temb.double())
    upstream = [torch.randn(6, 16, generator=torch.Generator().manual_seed(i)) for i in range(6)]
    grads = backward._run(case, lambda name: getattr(judge, name), False, upstream, exact=True)[1]

    def loss(**changed):
        tensors = {name: changed.get(name, case.weights[name].double()) for name in case.weights.tensors}
        given = backward._with_leaves(case, tensors)
        history = {}
        for stage in backward.CHAIN:
            history[stage.name] = stage.run(lambda name: getattr(judge, name), stage.arguments(given, history))
        return sum(float((out * up).sum()) for out, up in zip(history["adaln_row_gather"], upstream, strict=True))

    for name, grad in zip(stages.LEAVES, grads, strict=True):
        direction = torch.randn(grad.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
        leaf = case.weights[name].double()
        slope = (loss(**{name: leaf + 1e-5 * direction}) - loss(**{name: leaf - 1e-5 * direction})) / 2e-5
        assert slope == pytest.approx(float((grad * direction).sum()), rel=1e-6, abs=1e-6), name


# --- measures ---------------------------------------------------------------------------------------------------------


def test_agreement_counts_signed_zeros_and_outputs():
    zero, minus = torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])
    assert measure.agreement((zero,), (zero.clone(),)) == measure.Agreement(True, 0, 2)
    found = measure.agreement((zero, zero), (zero, minus))
    assert not found.same and found.differing == 1 and found.elements == 4 and found.first.startswith("output 1: ")
    assert not measure.agreement((zero,), (zero, zero)).same
    assert not measure.agreement((zero,), (zero.double(),)).same


def test_error_measures():
    true = torch.tensor([1.0, -4.0], dtype=torch.float64)
    found = measure.error((torch.tensor([1.5, -4.0]),), (true,), Tolerance(0.1, 0.1))
    assert (found.max_abs, found.relative, found.correctly_rounded) == (0.5, 0.125, 0.5)
    assert found.used == pytest.approx(2.5) and not found.within
    assert measure.error((true.float(),), (true,), Tolerance(0.1, 0.1)).within
    for bad in (float("nan"), float("inf")):
        off = measure.error((torch.tensor([bad, -4.0]),), (true,), Tolerance(0.1, 0.1))
        assert off.max_abs is None and not off.within
    assert not measure.error((true.float(), true.float()), (true,), Tolerance(9, 9)).within


def test_rounding_of_fp64_to_16_bits_is_one_rounding():
    tie, beside = 1 + 2.0**-8, 2.0**-40
    exact = torch.tensor(
        [tie, tie + beside, tie - beside, -tie - beside, 3 * tie, 0.0, -0.0, 1e300, 1e-60], dtype=torch.float64
    )
    found = measure.rounded(exact, torch.bfloat16)
    up = 1 + 2.0**-7
    assert found.tolist() == [1.0, up, 1.0, -up, 3.015625, 0.0, 0.0, float("inf"), 0.0]
    assert exact[1].bfloat16() == 1.0  # what a plain cast does
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(measure.rounded(values.double(), torch.bfloat16), values.bfloat16())
    assert measure.rounded(exact, torch.float32).dtype == torch.float32


def test_parts_of_a_stage_are_what_they_say():
    case = made(torch.bfloat16)
    history = {}
    for stage in stages.STAGES:
        arguments = stage.arguments(case, history)
        count = stage.count(arguments)
        assert count == (3 if stage.name in ("timestep_sinusoid", "timestep_mlp", "adaln_projection") else 20)
        part = stage.part(arguments, 1, 2)
        for name, axis in stage.rows.items():
            assert part[name].shape[axis] == 1
        for name in stage.narrow:
            assert part[name].shape[0] == 1
            row = int(arguments[stage.index][1])
            assert torch.equal(part[name][0], arguments[name][row])
        history[stage.name] = stage.run(lambda name: getattr(provider, name), arguments)


def test_what_a_candidate_may_be():
    with pytest.raises(ValueError, match="no stage named 'attention'"):
        Candidate({"attention": "a:b"})
    with pytest.raises(ValueError, match=r"stage final_adaln_out runs a:b, which has no contracts"):
        Candidate({"final_adaln_out": "a:b"}, contracts={"final_adaln_out": "ascending"})
    with pytest.raises(ValueError, match="no contract"):
        Candidate(contracts={"timestep_sinusoid": "quick"})
    with pytest.raises(ValueError, match="backend 'metal'"):
        Candidate(backend="metal")
    own = Candidate({"final_adaln_out": provider.final_adaln_out})
    assert own.owner("final_adaln_out") == f"{PROVIDER}:final_adaln_out"
    with pytest.raises(ValueError, match="peer 'transformers'"):
        record.the_peer("transformers")


# --- records and the command ------------------------------------------------------------------------------------------


def test_json_is_strict_and_says_what_was_run(honest):
    read = json.loads(json.dumps(honest.to_json(), allow_nan=False))
    assert read["kind"] == replay.KIND and read["passed"] is True
    assert read["weights"] == "synthetic, seed 0" and len(read["weights_sha256"]) == 64
    assert read["cases"][0]["first_drift"] == honest.cases[0].first_drift
    assert read["cases"][3]["stages"][3]["rows"] == {
        "checked": 37,
        "varying": 0,
        "first": None,
        "alone": 8,
        "alone_varying": 0,
    }
    assert read["environment"]["torch"]


def test_the_page_shows_what_was_found(honest, run):
    text = tables_page(replays.page(honest.to_json()))
    assert "Replay of minimax-h3, conditioning" in text and "8 of 8 hold" in text
    assert text.count("T = 3, S = 37") > 2 and "http" not in text.replace("http-equiv", "")
    bad = run(adaln_gate_residual=lambda residual, y, gate, index: residual)
    text = tables_page(replays.page(bad.to_json()))
    assert "2 of 4 hold" in text and '<td class="bad"><span class="mark">broken</span></td>' in text


def call(*words):
    return CliRunner().invoke(cli.build(words), list(map(str, words)))


REPLAY = ("replay", "minimax-h3", "--stage", "conditioning", "--device", "cpu", "--against", "provider")
BLOCK = ("replay", "minimax-h3", "--stage", "block", "--device", "cpu", "--against", "provider")
SMALL = (*REPLAY, "--width", "32", "--timesteps", "2", "--seq-lens", "5")


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.delenv(weights.VARIABLE, raising=False)
    result = call(*SMALL, "--backward", "--out", tmp_path / "out", "--json", tmp_path / "r.json")
    assert result.exit_code == 0, result.output
    assert "What must hold" in result.stdout and "Gradients, T = 2, S = 5" in result.stdout
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"replay.json", "index.html", "figures"}
    recorded = json.loads((tmp_path / "r.json").read_text())
    assert recorded == json.loads((tmp_path / "out" / "replay.json").read_text())
    assert "hidden_size 32" in recorded["geometry"]
    times = [stage["latency_us"] for stage in recorded["cases"][0]["stages"]]
    assert len(times) == 7 and all(found["ours"] > 0 and found["peer"] > 0 for found in times)


def test_where_nothing_can_be_timed_the_replay_goes_on(tmp_path, monkeypatch):
    def no_memory(device):
        raise RuntimeError("the machine's own floor could not be measured: out of memory")

    monkeypatch.setattr(latency, "clock", no_memory)
    result = call(*SMALL, "--json", tmp_path / "r.json")
    assert result.exit_code == 0 and "no latencies: the machine's own floor" in result.stderr
    (case,) = json.loads((tmp_path / "r.json").read_text())["cases"]
    assert {stage["latency_us"] for stage in case["stages"]} == {None}


def test_a_broken_promise_is_exit_code_1(tmp_path):
    (tmp_path / "mine.py").write_text("def gate(residual, y, gate, index):\n    return residual\n")
    result = call(*SMALL, "--bind", f"adaln_gate_residual={tmp_path / 'mine.py'}:gate")
    assert result.exit_code == 1 and "broken" in result.stdout
    (tmp_path / "mine.py").write_text("def gate(residual, y, gate):\n    return residual\n")
    result = call(*SMALL, "--bind", f"adaln_gate_residual={tmp_path / 'mine.py'}:gate")
    assert result.exit_code == 1 and "adaln_gate_residual raised TypeError" in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("replay", "minimax-h4", "--stage", "conditioning"), "no model 'minimax-h4'"),
        (
            ("replay", "minimax-h3", "--stage", "attention"),
            "--stage attention: of minimax-h3, choose conditioning, block",
        ),
        ((*REPLAY, "--timesteps", "0,1"), "--timesteps 0,1: expected positive numbers"),
        ((*REPLAY, "--timesteps", ""), "expected positive numbers"),
        ((*REPLAY, "--seq-lens", "3,x"), "--seq-lens 3,x: expected"),
        ((*REPLAY, "--layout", "spiral"), "--layout spiral"),
        ((*REPLAY, "--layout", "block", "--timesteps", "4", "--seq-lens", "3"), "3 rows cannot have a run"),
        ((*REPLAY, "--weights", "w", "--width", "32"), "leave --synthetic and --width out"),
        ((*REPLAY, "--weights", "not-here"), "does not exist"),
        ((*REPLAY, "--width", "33"), "width 33: expected a multiple of 16"),
        ((*REPLAY, "--bind", "final_adaln_out"), "--bind final_adaln_out: write STAGE=VALUE"),
        ((*REPLAY, "--bind", "attention=a:b"), "no stage named 'attention'"),
        ((*REPLAY, "--bind", "final_adaln_out=not_there:f"), "cannot import 'not_there:f'"),
        ((*REPLAY, "--bind", "final_adaln_out=a:b", "--contract", "final_adaln_out=c"), "has no contracts"),
        ((*REPLAY[:-1], "transformers"), "peer 'transformers': choose one of diffusers, provider"),
        (("replay", "minimax-h3", "--stage", "conditioning", "--device", "tpu"), "--device tpu: choose cpu or cuda"),
        ((*REPLAY, "--layouts", "mini"), "--layouts: --stage conditioning does not have it"),
        ((*BLOCK, "--layouts", "mini,huge"), "--layouts mini,huge: choose of mini, tiny, small, medium"),
        ((*BLOCK, "--layouts", ""), "choose of mini, tiny, small, medium"),
        ((*BLOCK, "--timesteps", "1"), "--timesteps: --stage block does not have it"),
        ((*BLOCK, "--seq-lens", "3"), "--seq-lens: --stage block does not have it"),
        ((*BLOCK, "--layout", "interleaved"), "--layout: --stage block does not have it"),
        (
            (*BLOCK, "--bind", "timestep_mlp=a:b"),
            "no stage named 'timestep_mlp'; choose one of adaln_projection, norm1",
        ),
        ((*BLOCK, "--contract", "attention=fa3"), "attention has no contract 'fa3'"),
    ],
)
def test_wrong_use_is_exit_code_2_before_anything_runs(words, message, monkeypatch):
    def never(*_, **__):
        raise AssertionError("something ran")

    monkeypatch.setattr(replay, "replay", never)
    monkeypatch.setattr(block_replay, "replay_block", never)
    monkeypatch.setattr(weights, "synthetic", never)
    result = call(*words)
    assert result.exit_code == 2, result.output
    assert message in result.stderr and len(result.stderr.strip().splitlines()) == 1


def test_a_backend_that_cannot_run_here_is_exit_code_2():
    result = call(*SMALL, "--backend", "cuda")
    assert result.exit_code == 2 and "needs a CUDA tensor" in result.stderr


def test_diffusers_that_is_not_there_is_exit_code_2(monkeypatch):
    from samebits.models.minimax_h3 import peer

    monkeypatch.setattr(peer, "missing", lambda: "No module named 'diffusers'; pip install it")
    result = call(*REPLAY[:-1], "diffusers")
    assert result.exit_code == 2 and "diffusers cannot be used: No module named" in result.stderr


def test_without_diffusers_the_provider_is_the_peer(monkeypatch):
    from samebits.models.minimax_h3 import peer

    monkeypatch.setattr(peer, "missing", lambda: "absent")
    name, implementation = record.the_peer(None)
    assert "provider" in name and implementation is provider
