"""The qualification of a whole transformer: what holds is seen to hold beside the class, and each planted fault is named."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

import samebits
from samebits import cli
from samebits.exact.compare import same_bits
from samebits.models.minimax_h3 import (
    classes,
    geometry,
    known,
    model_backward,
    model_replay,
    model_run,
    model_source,
    patching,
    peer,
)
from samebits.models.minimax_h3.model_replay import KIND, replay_model
from samebits.models.minimax_h3.subject import Subject, rows
from samebits.report import model_replays
from samebits.report.pages import tables_page

SITES = "every call site runs our operator"
REPEAT = "every boundary repeats bit for bit"
ROWS = "a sequence has the same bits alone and at another place in the batch, at every boundary"
GOLDEN = "no boundary is further from FP64, in the mean, than 1.25 times the class, plus 0.001"
RESTORED = "unpatched again, the model has its own bits"
GRADIENT_REPEAT = "every gradient repeats bit for bit"
GRADIENT_ROWS = "the gradient of a row has the same bits with its sequence alone and at another place in the batch"
GRADIENT_ERROR = (
    "no gradient is further from FP64 than 1.5 times the class's, plus 0.005, or than the class's and 6 ulps"
)
BOUNDARIES = (
    "proj_in", "audio_proj_in", "context_embedder", "token_refiner.refiner_blocks.0", "token_refiner", "time_embedder",
    "packed rows", "transformer_blocks.0", "transformer_blocks.1", "norm_out", "proj_out", "audio_proj_out",
    "video velocity", "audio velocity",
)  # fmt: skip


@pytest.fixture(scope="module")
def source():
    return model_source.synthetic(0, geometry.reduced(16))


@pytest.fixture(scope="module")
def honest(source):
    return replay_model(source, layouts=["mini"], backend="reference", with_backward=True)


@pytest.fixture
def run(source, monkeypatch):
    monkeypatch.setattr(model_run, "ROUNDS", 1)

    def run(with_backward=False):
        return replay_model(source, layouts=["mini"], backend="reference", with_backward=with_backward)

    return run


@pytest.fixture
def subject(source):
    return Subject(source.model, rows(source.model.config, "mini", 2, 0, "cpu"))


def broken(result):
    return {check.name: check.detail for check in result.checks if not check.passed}


# --- what holds -------------------------------------------------------------------------------------------------------


def test_the_patched_model_keeps_every_promise_beside_the_class(honest, source):
    assert honest.kind == KIND and honest.peer == peer.version() and honest.weights == "synthetic, seed 0"
    names = [SITES, REPEAT, ROWS, GOLDEN, RESTORED, GRADIENT_REPEAT, GRADIENT_ROWS, GRADIENT_ERROR]
    assert [check.name for check in honest.checks] == names
    assert broken(honest) == {} and honest.passed
    (case,) = honest.cases
    assert tuple(at.name for at in case.boundaries) == BOUNDARIES
    parameters = [name for name, _ in source.model.named_parameters()]
    # 14 boundaries; gradients of all parameters and three kinds of rows, and those that arrive at 11 places and at the rows
    leaves, reached = len(parameters) + 3, 3 + len(BOUNDARIES) - 3
    assert [check.judged for check in honest.checks] == [
        len(case.sites),
        14,
        14,
        14,
        1,
        leaves + reached,
        reached,
        leaves,
    ]
    assert case.first_repeat_drift is None and case.first_batch_drift is None
    checked = {at.name: at.rows.checked for at in case.boundaries}
    assert checked["time_embedder"] == 3 and checked["packed rows"] == 46 and checked["audio velocity"] == 12


def test_it_says_where_the_model_leaves_the_class(honest):
    (case,) = honest.cases
    by_name = {at.name: at for at in case.boundaries}
    assert case.first_drift == case.first_isolated_drift == "proj_in", "the FP32 product of a CPU has another order"
    for at in case.boundaries:
        assert at.chained.same == (at.digest == at.peer_digest) == (at.apart == 0)
        assert 0 <= at.apart < 0.01 and 0 < at.peer_error.relative < 0.05
        assert (at.isolated is None) == (at.name in ("packed rows", *model_run.VELOCITIES))
    assert by_name["packed rows"].dtype == "bfloat16" and by_name["proj_out"].shape == (2, 23, 96)
    assert set(case.costs) == {
        f"{how} forward{more}" for how in ("patched", "unpatched") for more in ("", " and backward")
    }


def test_the_class_beside_itself_never_parts(source, monkeypatch):
    """What compares sees no difference where there is none; and nothing of ours ran, which is noticed."""
    monkeypatch.setattr(patching, "patch", lambda model, contracts, backend: None)
    monkeypatch.setattr(patching, "unpatch", lambda model: None)
    report = patching.Patched("", {}, None, (patching.SiteReport("proj_in", "fp32_linear", "lanes32", 0),), ())
    monkeypatch.setattr(patching, "patched", lambda model: report)
    result = replay_model(source, layouts=["mini"], with_backward=True)
    (case,) = result.cases
    assert case.first_drift is None and case.first_isolated_drift is None
    assert all(at.error == at.peer_error for at in case.boundaries)
    assert all(leaf.chained.same for leaf in case.gradients.leaves)
    assert broken(result)[SITES] == "mini, S = 23: proj_in"


def test_fp64_is_the_class_in_fp64(subject):
    """One block at a time, and all at once with gradients; and every bit of the model is back afterwards."""
    before = {name: value.detach().clone() for name, value in subject.model.state_dict().items()}
    one_by_one = model_run.exact(subject)
    with torch.no_grad(), model_run.widened(subject.model):
        assert {value.dtype for value in subject.model.parameters()} == {torch.float64}
        assert subject.model.rope.inv_freq.dtype == torch.float64
        at_once = model_run.run(subject).made
    for name, value in one_by_one.items():
        assert value.dtype == torch.float64 and same_bits(value, at_once[name]), name
    after = subject.model.state_dict()
    assert all(same_bits(value, after[name]) for name, value in before.items())
    with pytest.raises(KeyError), model_run.widened(subject.model):
        raise KeyError
    assert all(same_bits(value, after[name]) for name, value in before.items())
    bad = Subject(subject.model, subject.inputs | {"token_tags": subject.inputs["token_tags"] + 3})
    with pytest.raises(IndexError):  # in the middle of the first block
        model_run.exact(bad)
    assert {value.dtype for value in subject.model.parameters()} == {torch.bfloat16, torch.float32}
    assert subject.model.rope.inv_freq.dtype == torch.float32


def test_gradients_are_those_of_autograd(subject):
    outputs = subject.model(**subject.inputs)
    given = model_backward.upstream(subject, outputs, 0)
    found = model_backward.gradients(subject, given)
    torch.autograd.backward(outputs, given)
    for name, value in subject.model.named_parameters():
        assert same_bits(found[name], value.grad), name
    subject.model.zero_grad()


# --- planted faults ---------------------------------------------------------------------------------------------------


def test_a_site_that_does_not_run(run, monkeypatch):
    monkeypatch.setattr(classes.SwiGLU, "forward", known.home(known.SWIGLU).forward)
    assert "mini, S = 23: transformer_blocks.1.ff.net.0" in broken(run())[SITES]


def test_an_operator_that_does_not_repeat(run, monkeypatch):
    calls, honest = [], samebits.final_adaln_out

    def fault(*given, **options):
        calls.append(None)
        return honest(*given, **options) * (1 + 2.0**-7 * (len(calls) % 2))

    monkeypatch.setattr(samebits, "final_adaln_out", fault)
    result = run()
    assert broken(result)[REPEAT].startswith("mini, S = 23: norm_out; mini, S = 23: proj_out")
    assert result.cases[0].first_repeat_drift == "norm_out"


def test_attention_that_sees_its_neighbour_in_the_batch(run, monkeypatch):
    honest, calls = samebits.attention, []

    def fault(q, k, v, **options):
        calls.append(None)
        last = q.shape[1] == 23 and len(calls) % 3 == 0  # one in the refiner, then two blocks
        return honest(q, k, v + v.roll(1, 0) * 2.0**-4 if last and len(v) > 1 else v, **options)

    monkeypatch.setattr(samebits, "attention", fault)
    result = run()
    assert broken(result).keys() == {ROWS}
    assert result.cases[0].first_batch_drift == "transformer_blocks.1"


def test_an_operator_that_is_wrong(run, monkeypatch):
    honest = samebits.swiglu
    monkeypatch.setattr(samebits, "swiglu", lambda x, **options: honest(x.roll(x.shape[-1] // 2, -1), **options))
    found = broken(run())
    assert found.keys() == {GOLDEN} and "token_refiner.refiner_blocks.0" in found[GOLDEN]


def test_a_model_that_is_not_restored(run, source, monkeypatch):
    honest, weight = patching.unpatch, source.model.proj_out.weight

    def fault(model):
        honest(model)
        weight.data.neg_()

    monkeypatch.setattr(patching, "unpatch", fault)
    assert broken(run()) == {RESTORED: "mini, S = 23"}
    weight.data.neg_()


class _Scaled(torch.autograd.Function):
    """The identity, whose gradient is multiplied by what a function says."""

    @staticmethod
    def forward(context, value, factor):
        context.factor = factor
        return value.clone()

    @staticmethod
    def backward(context, grad):
        return grad * context.factor(grad), None


@pytest.mark.parametrize(
    ("claim", "factor"),
    [
        (GRADIENT_REPEAT, lambda calls, grad: 1 + 2.0**-7 * (calls % 2)),
        (GRADIENT_ROWS, lambda calls, grad: 1 + 2.0**-8 * (grad.shape[0] > 1)),
        (GRADIENT_ERROR, lambda calls, grad: 1.25),
    ],
)
def test_a_gradient_at_fault(run, monkeypatch, claim, factor):
    honest, calls = samebits.final_adaln_out, []

    def scale(grad):
        calls.append(None)
        return factor(len(calls), grad)

    def fault(x, *given, **options):
        return honest(_Scaled.apply(x, scale), *given, **options)

    monkeypatch.setattr(samebits, "final_adaln_out", fault)
    result = run(with_backward=True)
    found = broken(result)
    assert claim == GRADIENT_REPEAT or GRADIENT_REPEAT not in found
    assert "proj_out.weight" not in found[claim], "what is behind the fault is right"
    place = "transformer_blocks.0.attn.to_v.weight" if claim == GRADIENT_ERROR else "at transformer_blocks.1"
    assert place in found[claim]


# --- sources, records and the command ---------------------------------------------------------------------------------


def test_a_released_configuration_is_the_class_by_default():
    with torch.device("meta"):
        made = known.home(known.MODEL)(**model_source.config(geometry.OFFICIAL, 50))
        default = known.home(known.MODEL)()
    ours, theirs = ({k: v for k, v in one.config.items() if not k.startswith("_")} for one in (made, default))
    assert ours == theirs
    assert sum(value.numel() for value in made.parameters()) == 33_122_992_896


def test_weights_have_their_dtypes_and_follow_from_the_seed(source):
    kept = {name for name, value in source.model.named_parameters() if value.dtype == torch.float32}
    words = ("proj_in", "audio_proj_in", "time_embedder", "proj_out", "audio_proj_out")
    assert {name.split(".")[0] for name in kept if ".linear" not in name or name.startswith("time")} <= set(words)
    assert len(kept) == 12
    assert model_source.synthetic(0, geometry.reduced(16)).digest() == source.digest()
    assert model_source.synthetic(1, geometry.reduced(16)).digest() != source.digest()


def test_a_checkpoint_in_a_folder(source, tmp_path):
    source.model.save_pretrained(tmp_path)
    again = model_source.load(tmp_path)
    assert again.digest() == source.digest() and again.weights == f"the checkpoint in {tmp_path}"
    less = model_source.load(tmp_path, blocks=1)
    assert less.sizes.startswith("1 blocks of hidden size 16")
    with pytest.raises(ValueError, match=r"3 blocks: the model in .* has 1 to 2"):
        model_source.load(tmp_path, blocks=3)
    (tmp_path / "diffusion_pytorch_model.safetensors").rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match=r"proj_in\.weight is in no \*\.safetensors of"):
        model_source.load(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"config\.json does not exist"):
        model_source.load(tmp_path / "nowhere")


def test_json_is_strict_and_the_page_shows_what_was_found(honest):
    read = json.loads(json.dumps(honest.to_json(), allow_nan=False))
    assert read["stage"] == "model" and read["passed"] is True and read["cases"][0]["first_drift"] == "proj_in"
    assert read["contracts"]["attention"] == "cudnn"
    text = tables_page(model_replays.page(read))
    for part in ("Replay of minimax-h3, model", "8 of 8 hold", "transformer_blocks.1", "Gradients that arrive"):
        assert part in text
    read["checks"][0]["passed"] = False
    assert "7 of 8 hold" in tables_page(model_replays.page(read))


def _invoke(*words):
    words = ("replay", "minimax-h3", "--stage", "model", "--device", "cpu", "--backend", "reference", *words)
    return CliRunner().invoke(cli.build(words), words)


def test_the_command(tmp_path, monkeypatch):
    result = _invoke("--width", "16", "--blocks", "1", "--out", str(tmp_path), "--json", str(tmp_path / "mine.json"))
    assert result.exit_code == 0, result.output
    assert "What must hold" in result.stdout and "transformer_blocks.1" not in result.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"replay.json", "index.html", "mine.json", "figures"}
    honest = samebits.swiglu
    monkeypatch.setattr(samebits, "swiglu", lambda x, **options: honest(x, **options) * 2)
    result = _invoke("--width", "16", "--blocks", "1")
    assert result.exit_code == 1 and "broken" in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--blocks", "0"), "error: --blocks 0: expected at least 1"),
        (("--bind", "swiglu=a:b"), "error: --bind: --stage model does not have it"),
        (("--steps", "3"), "error: --steps: --stage model does not have it"),
        (("--json", "nowhere/r.json"), "error: no folder nowhere to write r.json in"),
        (("--layouts", "huge"), "error: --layouts huge: choose of mini, tiny, small, medium"),
        (("--weights", "nowhere"), "error: no model: nowhere/config.json does not exist"),
        (("--width", "17"), "error: width 17: expected a multiple of 16 from 16 to 5376"),
        (("--width", "16", "--contract", "linear=x"), "error: linear: no contract named 'x'; choose one of 'kchain'"),
        (("--width", "16", "--contract", "mhc=x"), "error: contracts names 'mhc'"),
    ],
)
def test_wrong_use_is_one_line(words, message):
    result = _invoke(*words)
    assert result.exit_code == 2
    assert result.stderr.startswith(message) and result.stderr.count("\n") == 1


def test_code_that_was_never_read_is_refused_before_the_run(monkeypatch):
    monkeypatch.setitem(known.DIGESTS, known.BLOCK, {"0" * 16: "0.0"})
    result = _invoke("--width", "16")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: MiniMaxH3TransformerBlock of diffusers") and result.stderr.count("\n") == 1


@pytest.mark.gpu
@pytest.mark.big
def test_the_model_on_a_gpu():
    """At the released width, two blocks of fifty: every promise."""
    drawn = model_source.synthetic(0, geometry.OFFICIAL, 2, "cuda")
    assert broken(model_replay.replay_model(drawn, layouts=["tiny"], with_backward=True)) == {}
