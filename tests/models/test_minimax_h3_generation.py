"""The generation gate: what holds is seen to hold in the real pipeline, and each planted fault is named."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from typer.testing import CliRunner

import samebits
from samebits import cli
from samebits.exact.compare import same_bits
from samebits.models.minimax_h3 import generation, generation_process, layouts, patching, sealed
from samebits.models.minimax_h3.generation import ALONE, Beside, Request, generate
from samebits.models.minimax_h3.generation_process import Order, fulfil
from samebits.models.minimax_h3.generation_replay import ELSEWHERE, KIND, replay_generation
from samebits.models.minimax_h3.generation_rules import near
from samebits.models.minimax_h3.model_source import Recipe
from samebits.models.minimax_h3.subject import PER_ROW
from samebits.report import model_replays
from samebits.report.pages import tables_page

SITES = "every call site runs our operator"
LAYOUT = "the pipeline's layout and timesteps are those of our own packing"
RUNS = "every step has the same bits again, beside other sequences in the batch, and in another process"
GOLDEN = (
    "given the class's latents, no velocity is further from FP64, in the mean, than 1.25 times the class's, plus 0.001"
)
RESTORED = "unpatched again, the model generates its own bits"
EARLIER = "the earlier sealed record has come out again"
TITLE = "mini, S = 33, 2 steps"
RECIPE = Recipe(width=16, blocks=1)
REQUEST = Request(steps=2)


@pytest.fixture(scope="module")
def honest():
    """The other process is a real one."""
    return replay_generation(RECIPE, REQUEST, backend="reference")


@pytest.fixture(scope="module")
def model():
    return RECIPE.build().model


@pytest.fixture
def run(honest):
    """With the records of the honest run in place of another process."""
    (case,) = honest.cases

    def run(**options):
        options = {"elsewhere": lambda order: [case.record] * len(ELSEWHERE)} | options
        return replay_generation(RECIPE, REQUEST, backend="reference", **options)

    return run


def broken(result):
    return {check.name: check.detail for check in result.checks if not check.passed}


# --- what holds -------------------------------------------------------------------------------------------------------


def test_every_run_has_the_same_bits_at_every_step(honest):
    assert honest.kind == KIND and honest.stage == "generation"
    assert [check.name for check in honest.checks] == [SITES, LAYOUT, RUNS, GOLDEN, RESTORED, EARLIER]
    assert broken(honest) == {} and honest.passed
    (case,) = honest.cases
    assert [check.judged for check in honest.checks] == [len(case.sites), 7, 5, 2, 1, 0]
    assert list(case.runs) == ["a second run", "the first of two", "the second of three", *ELSEWHERE]
    assert set(case.runs.values()) == {None} and case.title == TITLE
    assert len(case.record["steps"]) == len(case.steps) == 2


def test_it_says_where_it_leaves_the_class(honest):
    (case,) = honest.cases
    assert case.first_drift == "steps.0.video velocity"
    assert case.first_step_drift == "proj_in", "the FP32 product of a CPU has another order"
    first, second = case.steps
    assert first.rows_apart == 0 and first.velocity_apart == first.forced_apart > 0, "both start from one noise"
    assert 0 < second.rows_apart < 0.01 and second.velocity_apart != second.forced_apart
    assert not second.forced.same and second.peer_rms > 0 and case.psnr > 40
    assert [place.name for place in case.first_step][-2:] == ["video velocity", "audio velocity"]


def test_a_generation_is_the_pipelines_own_loop(model):
    """The schedule, by hand, from the velocities that were seen: the loop did with them what it should."""
    made = generate(model, Request(steps=3, seed=5))
    conditions = len(made.conditions)
    assert made.steps[0].given["return_dict"] is False and len(made.steps) == 3
    for at, sigmas in enumerate(made.sigmas):
        assert len(sigmas) == 4 and sigmas[0] == 1 and sigmas[-1] == 0
        skip = conditions if at == 0 else 0
        for step, after, sigma, less in zip(made.steps, made.steps[1:], sigmas, sigmas[1:], strict=False):
            rows, velocity = step.rows[at][0, skip:], step.velocities[at][0, skip:]
            sigma, less = torch.tensor(sigma), torch.tensor(less)
            clean = rows + (1 - (1 - sigma)) * velocity
            ratio = less / sigma
            assert same_bits(after.rows[at][0, skip:], ratio * rows + (1 - ratio) * clean)
    for step in made.steps:
        assert same_bits(step.rows[0][0, :conditions], made.conditions), "keyframes stay as they are"
    assert made.result[0].shape == (1, 24, 2, 4, 4) and made.result[1].shape[::2] == (2, 8)


def test_neighbours_are_in_the_batch_and_are_not_the_same(model):
    seen = []
    handle = model.register_forward_pre_hook(lambda module, given, named: seen.append(named), with_kwargs=True)
    try:
        made = generate(model, Request(steps=1), Beside(2, 1))
    finally:
        handle.remove()
    # the hook was put on first, so that it saw the one sequence; what went in is rebuilt here
    (given,) = seen
    for kind, name in enumerate(PER_ROW):
        assert given[name].shape[0] == 1
        among = generation._among(given[name], Request(steps=1), Beside(2, 1), kind)
        assert among.shape[0] == 3 and same_bits(among[1:2], given[name])
        assert not any(same_bits(among[at], among[to]) for at, to in ((0, 1), (0, 2), (1, 2)))
    assert made.steps[0].velocities[0].shape[0] == 1
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_a_seed_is_a_video_of_its_own(model):
    one, same, other = (
        sealed.seal(generate(model, Request(steps=1, seed=seed)), Request(steps=1), "", {}, "") for seed in (0, 0, 1)
    )
    assert one == same and sealed.first_difference(one, other) == "text"


@pytest.mark.parametrize("name", [name for name in layouts.NAMED if name != "mini"])
def test_named_layouts_are_what_the_pipeline_packs(name):
    """The frames that a request asks for give the very latents of the layout, sound included."""
    from diffusers.modular_pipelines.minimax_h3.modular_pipeline import audio_latent_num_frames, video_latent_num_frames

    request = Request(name)
    assert video_latent_num_frames(request.frames, 17, 5) == request.sizes.latent_frames
    assert audio_latent_num_frames(request.frames) == request.sizes.audio_latents
    assert request.sizes.latent_height * 16 % 32 == request.sizes.latent_width * 16 % 32 == 0


# --- planted faults ---------------------------------------------------------------------------------------------------


def test_an_operator_that_does_not_repeat(run, monkeypatch):
    calls, honest = [], samebits.final_adaln_out

    def fault(*given, **options):
        calls.append(None)
        return honest(*given, **options) * (1 + 2.0**-7 * (len(calls) > 2))  # all but the first generation

    monkeypatch.setattr(samebits, "final_adaln_out", fault)
    assert f"{TITLE}: a second run, at steps.0.video velocity" in broken(run())[RUNS]


def test_attention_that_sees_its_neighbour_in_the_batch(run, monkeypatch):
    honest = samebits.attention

    def fault(q, k, v, **options):
        return honest(q, k, v + v.roll(1, 0) * 2.0**-4 if len(v) == 3 else v, **options)

    monkeypatch.setattr(samebits, "attention", fault)
    assert broken(run()) == {RUNS: f"{TITLE}: the second of three, at steps.0.video velocity"}


def test_another_process_with_other_bits(run, honest):
    other = copy.deepcopy(honest.cases[0].record)
    other["steps"][1]["audio velocity"] = "0" * 64
    result = run(elsewhere=lambda order: [honest.cases[0].record, other])
    assert broken(result) == {RUNS: f"{TITLE}: another process, the second of two, at steps.1.audio velocity"}


def test_an_operator_that_is_wrong(run, monkeypatch):
    honest = samebits.swiglu
    monkeypatch.setattr(samebits, "swiglu", lambda x, **options: honest(x.roll(x.shape[-1] // 2, -1), **options))
    result = run(elsewhere=fulfil)
    assert broken(result) == {GOLDEN: f"{TITLE}: step 0; {TITLE}: step 1"}
    places = {place.name: place.chained.same for place in result.cases[0].first_step}
    assert places["context_embedder"] and not places["token_refiner.refiner_blocks.0"], "the diagnostic names it"


def test_a_site_that_does_not_run_and_a_model_that_is_not_restored(run, monkeypatch):
    honest, report = patching.unpatch, patching.patched

    def fault(model):
        honest(model)
        model.proj_out.bias.data.add_(1)

    def unused(model):
        found = report(model)
        sites = [patching.SiteReport(site.name, site.operator, site.contract, 0) for site in found.sites[:1]]
        return patching.Patched(found.release, found.contracts, found.backend, (*sites, *found.sites[1:]), ())

    monkeypatch.setattr(patching, "unpatch", fault)
    monkeypatch.setattr(patching, "patched", unused)
    found = broken(run())
    assert found.keys() == {SITES, RESTORED} and found[RESTORED] == f"{TITLE}: at steps.0.video velocity"


def test_a_layout_that_is_not_ours(run, monkeypatch):
    honest = layouts.row_timesteps
    monkeypatch.setattr(layouts, "row_timesteps", lambda packed, video, *rest: honest(packed, video + 0.001, *rest))
    assert broken(run()) == {LAYOUT: f"{TITLE}: timesteps of step 0; {TITLE}: timesteps of step 1"}


def test_an_earlier_record_that_does_not_come_out_again(run, honest):
    record = honest.cases[0].record
    assert broken(run(earlier=record)) == {}
    other = copy.deepcopy(record)
    other["noise"]["audio rows"] = "0" * 64
    assert broken(run(earlier=other)) == {EARLIER: f"{TITLE}: at noise.audio rows"}


def test_the_rule_of_distance():
    assert near(0.0135, 0.01) and not near(0.0136, 0.01)
    assert not near(None, 0.01) and not near(None, None) and near(1.0, None)


# --- the sealed record ------------------------------------------------------------------------------------------------


def test_a_seal_that_was_broken_is_refused(honest, tmp_path):
    record, path = honest.cases[0].record, tmp_path / "sealed.json"
    path.write_text(json.dumps(record))
    assert sealed.read(path) == record
    changed = copy.deepcopy(record)
    changed["sigmas"]["video"][1] += 2.0**-24
    path.write_text(json.dumps(changed))
    with pytest.raises(ValueError, match="the seal is broken"):
        sealed.read(path)
    for text, message in (("{", "not JSON"), ("[]", "not a sealed generation"), ("{}", "not a sealed generation")):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            sealed.read(path)


def test_the_first_difference_is_the_earliest():
    one = {"a": 1, "steps": [{"x": 1, "y": 2}, {"x": 3}], sealed.SEAL: "p"}
    assert sealed.first_difference(one, copy.deepcopy(one) | {sealed.SEAL: "q"}) is None
    assert sealed.first_difference(one, {"a": 1, "steps": [{"x": 1, "y": 3}, {"x": 4}]}) == "steps.0.y"
    assert sealed.first_difference(one, {"a": 1, "steps": [{"x": 1, "y": 2}]}) == "steps"
    assert sealed.first_difference({"a": 1}, {"a": 1, "b": 2}) == "b"


# --- another process, the record and the command ----------------------------------------------------------------------


def test_another_process_that_fails_says_why(monkeypatch):
    monkeypatch.setattr(generation_process.sys, "executable", "/bin/false")
    with pytest.raises(ChildProcessError, match="failed: nothing"):
        generation_process.elsewhere(Order(RECIPE, REQUEST, [ALONE], {}, None))


def test_an_order_survives_being_written():
    order = Order(RECIPE, REQUEST, [ALONE, Beside(2, 1)], {"attention": "fa2"}, "reference")
    from dataclasses import asdict

    assert generation_process._read(json.loads(json.dumps(asdict(order)))) == order


def test_json_is_strict_and_the_page_shows_what_was_found(honest):
    read = json.loads(json.dumps(honest.to_json(), allow_nan=False))
    assert read["passed"] is True and read["cases"][0]["first_drift"] == "steps.0.video velocity"
    text = tables_page(model_replays.page(read))
    for part in ("Replay of minimax-h3, generation", "5 of 5 hold", "the second of three", "First step", "dB"):
        assert part in text


def _invoke(*words):
    words = ("replay", "minimax-h3", "--stage", "generation", "--device", "cpu", "--backend", "reference", *words)
    return CliRunner().invoke(cli.build(words), words)


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(replay_generation, "__kwdefaults__", replay_generation.__kwdefaults__ | {"elsewhere": fulfil})
    small = ("--width", "16", "--blocks", "1", "--steps", "1")
    result = _invoke(*small, "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "What must hold" in result.stdout and "Sealed digests" not in result.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"replay.json", "index.html", "sealed.json", "figures"}
    result = _invoke(*small, "--seed", "1", "--sealed", str(tmp_path / "sealed.json"))
    assert result.exit_code == 1 and "request.seed" in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--steps", "0"), "error: 0 steps: expected at least 1"),
        (("--backward",), "error: --backward: --stage generation does not have it"),
        (("--layouts", "tiny,small"), "error: --layouts tiny,small: --stage generation makes one video, of one layout"),
        (("--sealed", "nowhere.json"), "error: nowhere.json: No such file"),
        (("--blocks", "0"), "error: --blocks 0: expected at least 1"),
        (
            ("--contract", "linear=x"),
            "error: linear: no contract named 'x'",
        ),
    ],
)
def test_wrong_use_is_one_line(words, message):
    result = _invoke(*words)
    assert result.exit_code == 2
    assert result.stderr.startswith(message) and result.stderr.count("\n") == 1


@pytest.mark.gpu
@pytest.mark.big
def test_the_generation_on_a_gpu():
    """At the released width, two blocks of fifty: the same bits in every run."""
    result = replay_generation(Recipe(device="cuda"), Request("tiny"))
    assert broken(result) == {}
