"""The replay of block 0: what holds is seen to hold beside the real block, and each planted fault is named."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

import samebits
from samebits import cli
from samebits.bench.timing import Failure, Sample
from samebits.exact.compare import same_bits
from samebits.models.minimax_h3 import (
    block,
    block_backward,
    block_peer,
    block_rules,
    controls,
    geometry,
    golden,
    latency,
    measure,
    peer,
    provider,
    record,
    weights,
)
from samebits.models.minimax_h3.block_replay import KIND, OURS, replay_block
from samebits.models.minimax_h3.candidate import PROVIDER
from samebits.models.minimax_h3.forward import stages
from samebits.report import replays
from samebits.report.pages import tables_page

REPEAT = "every node repeats bit for bit"
ROWS = "a row has the same bits alone, in half of the rows, and beside another sequence"
PROMISE = "fed by the peer, every node that promises it has the peer's bits"
GOLDEN = "no node is further from the golden than 1.25 times the peer, plus 0.001"
WHOLE = "the peer's block, run whole, has the bits of its parts"
GRADIENT_REPEAT = "every gradient repeats bit for bit"
BESIDE = "the gradient that reaches a node has the same bits beside another sequence"
GRADIENT_ERROR = (
    "no gradient is further from the golden than 1.5 times the peer's, plus 0.005, or than the peer's and 6 ulps"
)
PATCHED = "the block with our operators patched in has the bits of the nodes"
PLANTED = "every planted fault is noticed"
NAMES = tuple(stage.name for stage in block.NODES)


@pytest.fixture(scope="module")
def small():
    return weights.synthetic(0, geometry.reduced(16), block=True)


@pytest.fixture(scope="module")
def case(small):
    return block.make_block_case(small, "mini")


@pytest.fixture(scope="module")
def honest(small):
    return replay_block(small, layouts=["mini"], candidate=OURS(backend="reference"), with_backward=True)


@pytest.fixture
def run(small):
    def run(with_backward=False, **faulty):
        return replay_block(
            small,
            layouts=["mini"],
            candidate=OURS(faulty, "reference"),
            against="provider",
            with_backward=with_backward,
        )

    return run


def broken(result):
    return {check.name: check.detail for check in result.checks if not check.passed}


# --- what holds -------------------------------------------------------------------------------------------------------


def test_our_operators_keep_every_promise_beside_the_real_block(honest):
    assert honest.peer == peer.version() and honest.kind == KIND
    names = [REPEAT, ROWS, PROMISE, GOLDEN, WHOLE, GRADIENT_REPEAT, BESIDE, GRADIENT_ERROR, PATCHED, PLANTED]
    assert [check.name for check in honest.checks] == names
    assert broken(honest) == {} and honest.passed
    # 17 nodes, of which 4 promise bits on a CPU; gradients of 14 leaves and at 17 nodes, of which one is of no row
    assert [check.judged for check in honest.checks] == [17, 17, 4, 17, 17, 31, 16, 14, 2, 7]
    (case,) = honest.cases
    assert tuple(stage.name for stage in case.stages) == NAMES and len(NAMES) == 17
    assert all(stage.owner.startswith("samebits:") and stage.contract for stage in case.stages)
    assert all(stage.launches for stage in case.stages)
    assert all(stage.rows.checked == (case.num_timesteps if i == 0 else 23) for i, stage in enumerate(case.stages))
    assert case.first_repeat_drift is None and case.first_batch_drift is None


def test_gradients_are_there_for_every_leaf_and_node(honest):
    (case,) = honest.cases
    assert tuple(leaf.name for leaf in case.gradients.leaves) == block_backward.LEAVES
    assert len(block_backward.LEAVES) == 14
    assert tuple(node.name for node in case.gradients.nodes) == NAMES
    assert all(leaf.golden_absmax > 0 and leaf.peer_error.relative is not None for leaf in case.gradients.leaves)
    by_node = {node.name: node.isolated for node in case.gradients.nodes}
    assert set(by_node["attention"]) == set("qkv") and set(by_node["rope_q"]) == {"x"}
    for name in ("rope_q", "rope_k"):  # the model's own operations, on any machine
        assert by_node[name]["x"].same
    for name in ("residual_attn", "residual_mlp"):
        assert by_node[name]["residual"].same and by_node[name]["y"].same


def test_every_node_reads_what_was_made_before(case):
    """And nothing but the case: the arguments of each node follow from the nodes above it in the table."""
    made = {}
    for stage in block.NODES:
        arguments = stage.arguments(case, made)
        assert set(stage.rows) <= set(arguments) and set(stage.narrow) <= set(arguments)
        assert set(stage.batch) <= set(arguments)
        made[stage.name] = stage.run(block.BLOCK.by(provider), arguments)
    assert tuple(made) == NAMES
    assert made[block.OUTPUT][0].shape == case.hidden.shape


def test_the_shapes_are_those_of_the_released_model():
    sizes = geometry.OFFICIAL
    assert geometry.reduced(5376) == sizes
    assert (6 * sizes.rope_frequencies, sizes.head_dim, sizes.inner_dim) == (96, 128, 7168)
    with torch.device("meta"):
        module = block_peer.block_module(sizes)
    shapes = {block.PREFIX + name: tuple(p.shape) for name, p in module.named_parameters()}
    ours = {name: shape for name, (_, shape) in sizes.block_shapes().items() if name.startswith(block.PREFIX)}
    assert ours == shapes


def test_the_provider_never_leaves_the_real_block(small):
    """Bit for bit through nodes and gradients, which is why it may stand in for diffusers; and stand-ins are not judged."""
    names = {name: f"{PROVIDER}:{block.BLOCK.operator(name)}" for name in NAMES}
    result = replay_block(small, layouts=["mini"], candidate=OURS(names), against="diffusers", with_backward=True)
    (case,) = result.cases
    assert case.first_drift is None and case.first_isolated_drift is None
    assert all(leaf.chained.same and leaf.error == leaf.peer_error for leaf in case.gradients.leaves)
    assert all(found.same for node in case.gradients.nodes for found in node.isolated.values())
    assert {check.name for check in result.checks if check.judged} == {WHOLE, PLANTED}


def test_rotation_tables_are_the_models(case):
    module = peer.modeling().MiniMaxH3RotaryPosEmbed(case.geometry.rope_frequencies)
    positions = block.named("mini")[0].position_ids
    for ours, theirs in zip((case.cos, case.sin), module(positions), strict=True):
        assert same_bits(ours, theirs)


def test_what_is_caught_of_the_real_block_is_all_of_it(case):
    with torch.no_grad():
        caught = block_peer.whole(case)
    assert set(caught) == set(NAMES)
    attend = peer.modeling().dispatch_attention_fn
    assert attend.__name__ == "dispatch_attention_fn", "the module is as it was"


# --- planted faults ---------------------------------------------------------------------------------------------------


def test_a_part_that_is_not_what_the_block_runs(small, monkeypatch):
    honest = peer.linear
    monkeypatch.setattr(peer, "linear", lambda x, weight: honest(x, weight) * (1 + 2.0**-7))
    result = replay_block(small, layouts=["mini"], candidate=OURS(backend="reference"), against="diffusers")
    assert "mini, S = 23: q_proj" in broken(result)[WHOLE]


def test_a_node_that_does_not_repeat(run):
    calls = []

    def rope(x, cos, sin):
        calls.append(None)
        return provider.rope_3axis(x, cos, sin) + (len(calls) % 2) * 2.0**-6

    result = run(rope_k=rope)
    assert broken(result)[REPEAT] == "mini, S = 23: rope_k"
    assert result.cases[0].first_repeat_drift == "rope_k"


def attention(q, k, v):
    """In FP32 head by head, rounded once: rows do not depend on one another on any machine."""
    parts = [part.float().movedim(-2, 1) for part in (q, k, v)]
    scores = (parts[0].unsqueeze(-2) * parts[1].unsqueeze(-3)).sum(-1) * q.shape[-1] ** -0.5
    weighed = scores.softmax(-1).unsqueeze(-1) * parts[2].unsqueeze(-3)
    return weighed.sum(-2).movedim(1, -2).to(q.dtype)


def test_attention_that_depends_on_the_number_of_queries(run):
    assert ROWS not in broken(run(attention=attention))
    result = run(attention=lambda q, k, v: attention(q, k, v) * (1 + 2.0**-7 * (q.shape[1] == 1)))
    assert broken(result)[ROWS] == "mini, S = 23: attention"
    assert result.cases[0].first_batch_drift == "attention"


def test_attention_that_sees_the_neighbour_in_the_batch(run):
    """Rows alone would not show it."""

    def leaking(q, k, v):
        return attention(q, k, v + v.roll(1, 0) * 2.0**-7) if q.shape[0] > 1 else attention(q, k, v)

    result = run(attention=leaking)
    assert broken(result)[ROWS] == "mini, S = 23: attention"
    assert result.cases[0].stages[9].rows.varying == 23


def test_a_rotation_with_the_convention_of_pairs(run):
    """Neighbouring channels in place of halves: other bits at the first rotation, and the chain differs from there on."""

    def pairs(x, cos, sin):
        width = cos.shape[-1]
        order = torch.arange(width).view(2, -1).mT.flatten()
        turned = provider.rope_3axis(torch.cat((x[..., order], x[..., width:]), -1), cos, sin)
        return torch.cat((turned[..., order.argsort()], turned[..., width:]), -1)

    result = run(rope_q=pairs)
    assert broken(result)[PROMISE] == "mini, S = 23: rope_q"
    assert result.cases[0].first_isolated_drift == "rope_q"
    assert "mini, S = 23: rope_q" in broken(result)[GOLDEN]


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("swiglu", lambda x: provider.swiglu(x.roll(x.shape[-1] // 2, -1))),
        ("q_norm", lambda x, weight: provider.qk_rmsnorm(x, weight, eps=1.0)),
        ("norm2", lambda shift, scale, **rest: provider.rmsnorm_modulated(shift=scale, scale=shift, **rest)),
        ("ffn_down", lambda x, weight: provider.linear(x[..., :-1], weight[:, :-1])),
        ("residual_mlp", lambda residual, y, gate, index: provider.adaln_gate_residual(residual, y, gate, index // 3)),
        ("attention", lambda q, k, v: attention(q, k.roll(1, 1), v)),
    ],
)
def test_wrong_values_are_too_far_from_the_golden(run, name, fault):
    assert f"mini, S = 23: {name}" in broken(run(**{name: fault}))[GOLDEN]


class _Scaled(torch.autograd.Function):
    """The identity, whose gradient is multiplied by what a function says."""

    @staticmethod
    def forward(context, value, factor):
        context.factor = factor
        return value.clone()

    @staticmethod
    def backward(context, grad):
        return grad * context.factor(grad), None


def test_a_gradient_that_does_not_repeat(run):
    calls = []

    def factor(grad):
        calls.append(None)
        return 1 + 2.0**-7 * (len(calls) % 2)

    result = run(True, swiglu=lambda x: provider.swiglu(_Scaled.apply(x, factor)))
    assert "mini, S = 23, at ffn_gate_up" in broken(result)[GRADIENT_REPEAT]
    assert "at swiglu" not in broken(result)[GRADIENT_REPEAT], "what reaches it comes from behind it"
    assert result.to_json()["cases"][0]["first_grad_repeat_drift"] == "ffn_gate_up"


def test_a_gradient_that_depends_on_the_batch(run):
    def factor(grad):
        return 1 + 2.0**-7 * (grad.shape[0] > 1)

    result = run(True, swiglu=lambda x: provider.swiglu(_Scaled.apply(x, factor)))
    assert broken(result)[BESIDE].startswith("mini, S = 23, at norm1; mini, S = 23, at q_proj")
    assert "at swiglu" not in broken(result)[BESIDE] and "at ffn_gate_up" in broken(result)[BESIDE]
    assert result.cases[0].first_grad_batch_drift == "ffn_gate_up"


def test_a_gradient_that_is_wrong(run):
    result = run(True, k_norm=lambda x, weight: provider.qk_rmsnorm(_Scaled.apply(x, lambda grad: 1.25), weight))
    assert "attn.to_k.weight" in broken(result)[GRADIENT_ERROR] and "to_v" not in broken(result)[GRADIENT_ERROR]
    found = {node.name: node.isolated for node in result.cases[0].gradients.nodes}
    assert not found["k_norm"]["x"].same and found["k_norm"]["weight"].same


def test_a_backward_that_fails_is_named(run):
    def factor(grad):
        raise RuntimeError("no gradient here")

    with pytest.raises(block_backward.StageError, match="gradients, ours: RuntimeError: no gradient here"):
        run(True, o_proj=lambda x, weight: provider.linear(_Scaled.apply(x, factor), weight))


def test_a_patch_that_is_not_the_nodes(small, monkeypatch):
    honest = samebits.swiglu
    monkeypatch.setattr(samebits, "swiglu", lambda x, **options: honest(x, **options) * (1 + 2.0**-7))
    candidate = OURS({}, "reference")
    candidate._found["swiglu"] = lambda x: honest(x, backend="reference")
    result = replay_block(small, layouts=["mini"], candidate=candidate, against="provider", with_backward=True)
    assert broken(result) == {PATCHED: "mini, S = 23; mini, S = 23, gradients"}


def test_a_measure_that_sees_nothing_is_noticed(run, monkeypatch):
    """The controls themselves can fail."""
    blind = measure.Agreement(True, 0, 1)
    monkeypatch.setattr(controls, "agreement", lambda ours, theirs: blind)
    monkeypatch.setattr(controls, "repeats", lambda one, other: True)
    missed = broken(run())[PLANTED]
    assert missed == (
        "mini, S = 23, k_norm: the last bit of one element; "
        "mini, S = 23, norm2: every second call is scaled by 1 + 2^-7; "
        "mini, S = 23, swiglu: no gradient of the activation"
    )


def test_the_rule_for_gradients():
    off = measure.Error(0.5, 0.01, 1.0, 0.0)
    leaf = block_backward.BlockLeaf("x", "bfloat16", 64.0, True, True, measure.Agreement(True, 0, 1), off, off)
    assert block_backward.ulp(64.0) == 0.5 and block_backward.ulp(63.9) == 0.25 and block_backward.ulp(0.0) == 0.0
    assert block_rules.leaf_close(leaf) and leaf.closer
    for relative, largest, holds in ((0.0199, 9.0, True), (0.0201, 9.0, False), (0.5, 3.5, True), (0.5, 3.51, False)):
        changed = replace(leaf, error=measure.Error(largest, relative, 1.0, 0.0))
        assert block_rules.leaf_close(changed) == holds and not changed.closer
    assert not block_rules.leaf_close(replace(leaf, dtype="float32", error=measure.Error(3.5, 0.5, 1.0, 0.0)))
    assert not block_rules.leaf_close(replace(leaf, error=measure.Error(None, None, None, 0.0)))
    assert block_rules.leaf_close(replace(leaf, peer_error=measure.Error(None, None, None, 0.0)))


# --- the golden -------------------------------------------------------------------------------------------------------


def test_a_golden_that_rounds_nothing_is_the_provider_in_fp64(case):
    judge = golden.Golden(torch.float64)
    exact = block_backward._exact(case)
    exact = replace(exact, cos=case.cos.double(), sin=case.sin.double())
    ours, theirs = {}, {}
    for stage in block.NODES:
        ours[stage.name] = stage.run(block.BLOCK.by(judge), stage.arguments(exact, ours))
        theirs[stage.name] = stage.run(block.BLOCK.by(provider), stage.arguments(exact, theirs))
        torch.testing.assert_close(ours[stage.name][0], theirs[stage.name][0], rtol=1e-6, atol=1e-6)


def test_the_golden_rounds_where_the_model_stores(case):
    judge = golden.Golden(torch.bfloat16)
    x = torch.tensor([[1 + 2.0**-9, 3.0]], dtype=torch.float64)
    weight = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    assert judge.linear(x, weight).item() == 1.0
    assert judge.swiglu(torch.tensor([1 + 2.0**-9, 100.0], dtype=torch.float64)).item() == 100.0
    one = torch.ones(1, 1, 1, 4, dtype=torch.float64)
    angles = torch.full((1, 2), 1 + 2.0**-9)
    assert judge.rope_3axis(one, angles, angles).flatten().tolist() == [0.0, 2.0, 1.0, 1.0]


# --- records and the command ------------------------------------------------------------------------------------------


def test_json_is_strict_and_says_what_was_run(honest):
    read = json.loads(json.dumps(honest.to_json(), allow_nan=False))
    assert read["kind"] == KIND and read["stage"] == "block" and read["passed"] is True
    assert read["cases"][0]["first_batch_drift"] is None and read["cases"][0]["layout"] == "mini"
    assert read["candidate"]["q_proj"] == "samebits:linear" and read["candidate"]["swiglu"] == "samebits:swiglu"
    assert read["cases"][0]["gradients"]["nodes"][9]["isolated"]["q"]["elements"] > 0
    assert read["cases"][0]["first_grad_repeat_drift"] is None and read["cases"][0]["first_grad_batch_drift"] is None


def test_the_page_shows_what_was_found(honest, run):
    text = tables_page(replays.page(honest.to_json()))
    assert "Replay of minimax-h3, block" in text and "10 of 10 hold" in text
    for part in (
        "Planted faults, mini, S = 23",
        "Gradients by node",
        "Gradients of inputs and parameters",
        "ffn_gate_up",
    ):
        assert part in text
    bad = run(rope_q=lambda x, cos, sin: x)
    text = tables_page(replays.page(bad.to_json()))
    assert "broken" in text and "Gradients by node" not in text


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.delenv(weights.VARIABLE, raising=False)
    words = ["replay", "minimax-h3", "--stage", "block", "--device", "cpu", "--width", "16", "--backend", "reference"]
    result = CliRunner().invoke(cli.build(words), [*words, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "Planted faults, mini, S = 23" in result.stdout and "Gradients" not in result.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"replay.json", "index.html", "figures"}
    (case,) = json.loads((tmp_path / "replay.json").read_text())["cases"]
    times = [stage["latency_us"] for stage in case["stages"]]
    assert len(times) == 17 and all(found["ours"] > 0 and found["peer"] > 0 and found["calls"] > 1 for found in times)
    command = "samebits replay minimax-h3 --stage block --width 16 --backend reference --device cpu"
    assert json.loads((tmp_path / "replay.json").read_text())["command"] == command
    text = (tmp_path / "index.html").read_text()
    assert f"Again: <code>{command}</code>" in text
    assert text.count("data:image/png;base64,") == 2, "nodes, whole, not its parts once more, and latency"
    assert "Latency, mini, S = 23" in text and "block_bench" in text
    (tmp_path / "mine.py").write_text("def swiglu(x):\n    return x.chunk(2, -1)[0]\n")
    words += ["--against", "provider", "--bind", f"swiglu={tmp_path / 'mine.py'}:swiglu"]
    result = CliRunner().invoke(cli.build(words), words)
    assert result.exit_code == 1 and "broken" in result.stdout


class Machine:
    """Says how long each call takes, and remembers what it made."""

    device = torch.device("cpu")
    copy_gbps = launch_floor_us = 1.0

    def __init__(self):
        self.seen = []

    def measure(self, works):
        ours, peers = (made.prepare() for made in works)
        self.seen.append((ours(), peers()))
        return {
            made.name: Sample(us, us, us, 7, method, us, 0)
            for made, us, method in zip(works, (2.0, 4.125), ("graph", "events"), strict=True)
        }

    def free_bytes(self):
        raise NotImplementedError

    def release(self):
        pass


def test_what_is_timed_is_the_isolated_call_of_both(case):
    """Ours and the peer's on the same arguments: those that make what the peer's chain has."""
    machine, theirs = Machine(), block.BLOCK.by(provider)
    bound = {name: theirs(name) for name in NAMES} | {"swiglu": lambda x: -x.chunk(2, -1)[0]}
    result, _, history = stages(block.BLOCK, case, OURS(bound), theirs, theirs, clock=latency.on(machine))
    assert [stage.latency_us for stage in result] == [
        latency.Latency(2.0, 4.12, 7, f"ours: {latency.METHODS['graph']}; peer: {latency.METHODS['events']}")
    ] * 17
    for name, (ours, peers) in zip(NAMES, machine.seen, strict=True):
        assert all(map(same_bits, peers, history[name])), name
        assert all(map(same_bits, ours, history[name])) == (name != "swiglu"), "the candidate's, fed by the peer"


def test_what_cannot_be_timed_says_why(case):
    stage = block.NODES[1]

    class Absent(Machine):
        def measure(self, works):
            return {made.name: Failure("out of memory") for made in works}

    found = latency.on(Absent())(block.BLOCK, stage, block.BLOCK.by(provider), {})
    assert found == latency.Latency(None, None, 0, "not measured: out of memory")


def test_an_unknown_layout_or_stage_is_an_error(small):
    with pytest.raises(ValueError, match="no layout named 'huge'"):
        replay_block(small, layouts=["huge"], against="provider")
    with pytest.raises(ValueError, match="no stage named 'timestep_mlp'"):
        OURS({"timestep_mlp": "a:b"})
    assert record.the_peer("diffusers")[1] is peer


@pytest.mark.gpu
@pytest.mark.big
def test_the_block_on_a_gpu():
    """At the released width: every promise, and all seventeen nodes with the bits of the unmodified block."""
    drawn = weights.synthetic(0, geometry.OFFICIAL, block=True, device=torch.device("cuda"))
    result = replay_block(drawn, layouts=["tiny"], against="diffusers", with_backward=True)
    assert broken(result) == {}
    (case,) = result.cases
    promised = {stage.name for stage in case.stages if stage.promised}
    assert promised == {
        "norm1",
        "q_norm",
        "k_norm",
        "rope_q",
        "rope_k",
        "residual_attn",
        "norm2",
        "swiglu",
        "residual_mlp",
    }
