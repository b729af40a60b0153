"""The real transformers classes with our operators at every call site."""

from __future__ import annotations

import copy
import json
import pickle
from functools import partial

import pytest
import torch

import samebits
from samebits.models.deepseek_v4 import classes, compare_layer, known, patching, subject, to_bfloat16
from samebits.models.deepseek_v4.compare import compare
from samebits.models.deepseek_v4.patching import CONNECTIONS
from samebits.models.deepseek_v4.sites import Options, call_sites
from samebits.models.sites import SITES

HERE = (known.LAYER, known.HYPER_CONNECTION, known.HYPER_HEAD, known.RMSNORM)
TWO_LAYERS = subject.SMALL | {
    "num_hidden_layers": 2,
    "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
    "mlp_layer_types": ["hash_moe", "moe"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 4},
}
MIXERS = ("fn", "base", "scale", "hc_fn", "hc_base", "hc_scale", "weight")


@pytest.fixture(scope="module")
def comparison():
    return compare_layer("published", batch=2, sequence=16, rows=3)


@pytest.fixture(scope="module")
def given():
    """One layer on eight positions. A test that patches it gives it back."""
    return subject.causal_lm(2, 4)


@pytest.fixture
def patched(given):
    samebits.patch(given.model, "published")
    yield given
    if patching.patched_modules(given.model):
        samebits.unpatch(given.model)


def failed(comparison):
    return [check.name for check in comparison.checks if not check.passed]


def found(comparison, question):
    return next(finding.answer for finding in comparison.findings if question in finding.question)


# --- what a comparison says -------------------------------------------------------------------------------------------


def test_everything_holds_and_every_difference_is_explained(comparison):
    assert failed(comparison) == []
    assert sum(cause.unexplained for cause in comparison.causes) == 0
    assert comparison.first.name == "layers.0.attn_hc.post"
    assert comparison.chained[-1].name == "logits"
    assert {"layers.0.self_attn.compressor.kv_norm", "layers.0.mlp.experts", "hc_head.streams"} <= {
        boundary.name for boundary in comparison.chained
    }


def test_every_site_is_hit_once(comparison):
    norms = ["self_attn." + n for n in ("q_a_norm", "kv_norm", "compressor.kv_norm", "compressor.indexer.kv_norm")]
    inside = ["attn_hc", "input_layernorm", "attn_post", "ffn_hc", "post_attention_layernorm", "ffn_post", *norms]
    expected = {f"model.layers.0.{name}" for name in inside} | {"model.hc_head", "model.norm"}
    assert comparison.sites == dict.fromkeys(expected, 1)


def test_the_causes_are_those_of_the_class(comparison):
    moved = {step.habit.partition(" (rstd")[0] for cause in comparison.causes for step in cause.steps if step.moved}
    assert "rounds post and comb to BF16 first" in moved
    assert "computes the RMS as sqrt(mean + eps), the published profile as sqrt(mean) + eps" in moved
    assert ("rounds x * rstd to BF16 before the weight" in moved) == known.norm_rounds_before_weight()


def test_what_the_class_does_with_dtypes(comparison):
    rounds_first = known.norm_rounds_before_weight()
    assert found(comparison, "What does a norm") == ("float32" if rounds_first else "bfloat16")
    runs = found(comparison, "Does the BF16 model run unpatched?")
    assert runs.startswith("no: model.layers.0.self_attn.q_a_proj:" if rounds_first else "yes")
    assert found(comparison, "second run").startswith("yes")
    assert found(comparison, "two backward passes").startswith("yes, all 15")


def test_json_is_strict(comparison):
    read = json.loads(json.dumps(comparison.to_json(), allow_nan=False))
    assert read["first"]["name"] == comparison.first.name
    assert read["passed"] is True and read["sites"]["model.norm"] == 1


def test_the_fast_contracts_hold_as_well(given):
    fast = compare(given, "fast", rows=2)
    assert failed(fast) == []
    assert fast.contracts == {
        "mhc_pre": "fast-dsv4",
        "mhc_pre_norm": "fast-dsv4",
        "mhc_post": "fast",
        "hyper_head": "fast-dsv4",
        "rmsnorm_residual": "tree512",
    }
    assert sum(cause.unexplained for cause in fast.causes) == 0


# --- the checks can fail ----------------------------------------------------------------------------------------------


def broken(given, monkeypatch, name, wrong):
    honest = getattr(classes, name)
    monkeypatch.setattr(classes, name, partial(wrong, honest))
    return failed(compare(given, rows=1))


def test_a_site_that_is_not_wired_to_its_operator_is_caught(given, monkeypatch):
    def wrong(honest, x, *parameters, **options):
        return honest(x.flip(-2), *parameters, **options)

    assert broken(given, monkeypatch, "hyper_head", wrong) == ["every site returns the bits of its operator"]


def test_an_operator_that_does_not_repeat_is_caught(given, monkeypatch):
    calls = []

    def wrong(honest, x, *parameters, **options):
        calls.append(x)
        return honest(x, *parameters, **options) * (1 + 0.25 * len(calls))

    checks = broken(given, monkeypatch, "rms_norm", wrong)
    assert "a second run of the patched model has the same bits at every site" in checks


def test_an_operator_that_depends_on_the_batch_is_caught(given, monkeypatch):
    from samebits.models.deepseek_v4 import sites

    honest = sites.rms_norm

    def depends(x, *rest, **options):
        y = honest(x, *rest, **options)
        return y if x.shape[0] > 1 else y * 1.01

    monkeypatch.setattr(sites, "rms_norm", depends)
    assert failed(compare(given, rows=1)) == ["our operators give a row the same bits in every batch"]


def test_a_wrong_direction_of_the_mix_is_caught(given, monkeypatch):
    """The class sums over the first index of comb; a transposed one is doubly stochastic, too."""
    from samebits.models.deepseek_v4 import sites

    operator = sites.operator

    class Transposed:
        def forward(self, streams, y, comb, post, **options):
            return operator("mhc_post").forward(streams, y, comb.mT, post, **options)

    monkeypatch.setattr(sites, "operator", lambda name: Transposed())
    assert "each site alone is within the tolerance of the class" in failed(compare(given, rows=1))


# --- patching and restoring -------------------------------------------------------------------------------------------


def state_of(model):
    return [(name, type(m), {k: id(v) for k, v in vars(m).items()}) for name, m in model.named_modules()]


def test_patch_and_unpatch_leave_no_trace(given):
    before = state_of(given.model)
    with subject.norms_cast_to_input(given.model), torch.no_grad():
        logits = given()
    report = samebits.patch(given.model, "published")
    with torch.no_grad():
        assert not torch.equal(given(), logits)
    assert report.unused != samebits.patched(given.model).unused, "a report is of its moment"
    samebits.unpatch(given.model)
    assert state_of(given.model) == before
    with subject.norms_cast_to_input(given.model), torch.no_grad():
        assert torch.equal(given(), logits)


def test_only_this_model_changes(patched):
    other = subject.causal_lm(1, 4)
    assert not patching.patched_modules(other.model)
    layer = other.model.model.layers[0]
    assert type(layer) is known.modeling().DeepseekV4DecoderLayer
    assert samebits.patched(patched.model).hits["model.norm"] == 0


def test_names_of_classes_stay_and_so_does_isinstance(patched):
    """What looks for classes by name (FSDP, device maps) or by type (captured outputs) still finds them."""
    for member in patched.model.modules():
        if SITES in vars(member):
            name = type(member).__name__
            assert name in HERE and isinstance(member, getattr(known.modeling(), name))


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_patched_and_stands_alone(patched, again):
    with torch.no_grad():
        logits = patched()
        twin = again(patched.model)
        twin.model.layers[0].attn_hc.fn.zero_()
        assert torch.equal(patched(), logits)
        assert not torch.equal(subject.replace(patched, model=twin)(), logits)
    samebits.unpatch(twin)
    assert patching.patched_modules(patched.model) and not patching.patched_modules(twin)


def test_hooks_see_every_module(patched):
    seen = {}
    names = ["attn_hc", "input_layernorm", "ffn_hc", "post_attention_layernorm"]
    layer = patched.model.model.layers[0]
    with torch.no_grad():
        logits = patched()
        handles = [
            layer.get_submodule(name).register_forward_hook(
                lambda m, args, out, name=name: seen.update({name: (args, out)})
            )
            for name in names
        ]
        assert torch.equal(patched(), logits)
    assert list(seen) == names
    post, comb, collapsed = seen["attn_hc"][1]
    assert post.shape == (2, 4, 4) and comb.shape == (2, 4, 4, 4)
    assert seen["input_layernorm"][0][0] is collapsed
    for handle in handles:
        handle.remove()


def test_a_hook_that_would_change_a_fused_module_is_refused(patched):
    norm = patched.model.model.layers[0].input_layernorm
    for register, hook in (
        (norm.register_forward_hook, lambda m, args, out: out * 2),
        (norm.register_forward_pre_hook, lambda m, args: (args[0] * 2,)),
    ):
        handle = register(hook)
        with pytest.raises(RuntimeError, match=r"model.layers.0.input_layernorm: a hook changes what this module"):
            patched()
        handle.remove()


def test_members_called_by_themselves(patched):
    """The norm alone, and the hyper-connection without its norm, have the bits that they have inside."""
    layer, streams = patched.model.model.layers[0], patched.streams
    with torch.no_grad():
        post, comb, collapsed = layer.attn_hc(streams)
        x, link = classes._opened(layer.attn_hc, layer.input_layernorm, streams)
        normalized = layer.input_layernorm(collapsed)
    for one, other in ((post, link.post), (comb, link.comb), (collapsed, link.hidden), (normalized, x)):
        assert torch.equal(one, other)


def test_contracts_by_operator(given):
    report = samebits.patch(given.model, {"mhc_pre_norm": "ascending-dsv4", "mhc_post": "fast"})
    samebits.unpatch(given.model)
    assert report.contracts["mhc_pre_norm"] == "ascending-dsv4" and report.contracts["hyper_head"] == "ascending"
    operators = {site.name.rpartition(".")[2]: (site.operator, site.contract) for site in report.sites}
    assert operators["attn_post"] == ("mhc_post", "fast")
    assert operators["input_layernorm"] == operators["attn_hc"] == ("mhc_pre_norm", "ascending-dsv4")
    assert operators["q_a_norm"] == ("rmsnorm_residual", "ascending")


# --- the whole model at work ------------------------------------------------------------------------------------------


def trainable(**options):
    made = subject.causal_lm(2, 8, config=TWO_LAYERS, **options)
    made.model.requires_grad_(True)
    samebits.patch(made.model, "published")
    return made


def step(model, ids):
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_training_step_with_and_without_checkpointing():
    made = trainable()
    loss, grads = step(made.model, made.ids)
    assert samebits.patched(made.model).unused == ()
    ours = {n for n, m in made.model.named_modules() if hasattr(m, "samebits_parameters")}
    without = {n for n in ours if n.endswith("indexer.kv_norm")}  # only its order is used
    for name, _ in made.model.named_parameters():
        owner = name.rpartition(".")[0]
        if owner in ours - without:
            assert grads[name].dtype == torch.float32 and grads[name].isfinite().all() and grads[name].any(), name
    for reentrant in (False, True):
        made.model.zero_grad()
        made.model.train()
        made.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        again, repeated = step(made.model, made.ids)
        assert torch.equal(loss, again)
        assert [name for name, grad in grads.items() if not torch.equal(grad, repeated[name])] == []
        assert samebits.patched(made.model).hits["model.layers.1.attn_post"] > 1
        made.model.gradient_checkpointing_disable()


def test_accumulated_micro_batches_have_the_bytes_of_one_batch():
    """At the boundaries themselves: given the same streams and upstream, whatever attention does to a batch."""
    made = trainable()
    layer = made.model.model.layers[1]
    streams, weight = (
        made.streams,
        torch.randn(made.streams.shape, generator=torch.Generator().manual_seed(3)).bfloat16(),
    )

    def block(rows):
        x, link = classes._boundary(layer.ffn_hc, layer.post_attention_layernorm, streams[rows])
        link.close(x).backward(weight[rows])

    members = {
        "fn": layer.ffn_hc.fn,
        "base": layer.ffn_hc.base,
        "scale": layer.ffn_hc.scale,
        "norm": layer.post_attention_layernorm.weight,
    }
    block(slice(None))
    whole = {name: p.grad for name, p in members.items()}
    made.model.zero_grad()
    with samebits.accumulate(made.model):
        block(slice(0, 1))
        block(slice(1, 2))
    assert [name for name, p in members.items() if not torch.equal(p.grad, whole[name])] == []


def test_generation_gives_a_row_the_same_bits_in_any_batch(patched):
    """Decode steps with a cache: every boundary of ours, given what it got, for four sequences and for each alone."""
    kept = {}

    def keep(name):
        return lambda m, args, out: kept.setdefault(name, []).append((args[0], out))

    layer = patched.model.model.layers[0]
    members = ["attn_hc", "input_layernorm", "ffn_hc", "post_attention_layernorm", "self_attn.q_a_norm"]
    handles = [layer.get_submodule(name).register_forward_hook(keep(name)) for name in members]
    handles.append(layer.register_forward_hook(keep("layer")))
    ids = torch.randint(0, 128, (4, 3), generator=torch.Generator().manual_seed(1))
    tokens = patched.model.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    for handle in handles:
        handle.remove()
    assert tokens.shape == (4, 6)
    assert [args.shape[:2] for args, _ in kept["attn_hc"]] == [(4, 3), (4, 1), (4, 1)]
    with torch.no_grad():
        for name in members:
            for given, output in kept[name]:
                for row in range(4):
                    alone = layer.get_submodule(name)(given[row : row + 1])
                    for one, whole in zip(
                        *((v if isinstance(v, tuple) else (v,)) for v in (alone, output)), strict=True
                    ):
                        assert torch.equal(one, whole[row : row + 1]), name


def test_captured_outputs_and_attention_arguments_pass(patched):
    with torch.no_grad():
        out = patched.model(patched.ids, output_hidden_states=True, use_cache=True)
    assert [tuple(h.shape) for h in out.hidden_states] == [(2, 4, 4, 64), (2, 4, 64)]
    assert torch.equal(out.logits, patched.model(patched.ids).logits)


def test_a_layer_alone_can_be_patched(given):
    layer = given.model.model.layers[0]
    report = samebits.patch(layer, "published")
    assert {site.name for site in report.sites} >= {"attn_hc", "DeepseekV4DecoderLayer.attn_post"}
    samebits.unpatch(layer)


def test_strict_list_is_read_as_from_pretrained_reads_it(tmp_path):
    code = known.modeling()
    model = code.DeepseekV4Model(code.DeepseekV4Config(**subject.SMALL))
    model.save_pretrained(tmp_path)
    loaded = code.DeepseekV4Model.from_pretrained(tmp_path, dtype=torch.bfloat16)
    to_bfloat16(model)
    ours = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert ours == {name: parameter.dtype for name, parameter in loaded.named_parameters()}
    assert set(ours.values()) == {torch.float32, torch.bfloat16}
    samebits.patch(loaded)


# --- what is refused --------------------------------------------------------------------------------------------------


def refused(model, error, match, **options):
    with pytest.raises(error, match=match):
        samebits.patch(model, **options)
    assert not patching.patched_modules(model)


def test_refuses_other_models():
    versions = ", ".join(known.VERIFIED).replace(".", r"\.")
    refused(torch.nn.Linear(4, 4), TypeError, f"holds no DeepseekV4DecoderLayer: .* of transformers {versions}")


def test_refuses_a_subclass(given, monkeypatch):
    connection = given.model.model.layers[0].attn_hc
    monkeypatch.setattr(connection, "__class__", type("Special", (type(connection),), {}))
    refused(given.model, TypeError, "layers.0.attn_hc is a .*Special; only .*DeepseekV4HyperConnection itself")


def test_refuses_a_forward_of_its_own(given, monkeypatch):
    norm = given.model.model.norm
    monkeypatch.setitem(vars(norm), "forward", norm.forward)
    refused(given.model, TypeError, "model.norm already has a forward of its own")


def test_refuses_twice_and_undoing_nothing(given):
    samebits.patch(given.model)
    with pytest.raises(RuntimeError, match=r"patched already; samebits\.unpatch it first"):
        samebits.patch(given.model)
    samebits.unpatch(given.model)
    for call in (samebits.unpatch, samebits.patched):
        with pytest.raises(RuntimeError, match=r"not patched; samebits\.patch it first"):
            call(given.model)


def test_refuses_what_is_not_bfloat16_with_strict_float32():
    code = known.modeling()
    model = code.DeepseekV4ForCausalLM(code.DeepseekV4Config(**subject.SMALL))
    refused(model, TypeError, r"o_b_proj is torch.float32, so the residual streams would not be BF16")
    refused(model.bfloat16(), TypeError, r"is torch.bfloat16, but the operator takes FP32")


@pytest.mark.parametrize("setting", [{"hc_sinkhorn_iters": 10}, {"hc_eps": 1e-5}, {"hc_mult": 2}])
def test_refuses_another_configuration(setting):
    name, value = next(iter(setting.items()))
    made = subject.causal_lm(1, 1, config=subject.SMALL | setting)
    refused(made.model, ValueError, f"{name} is {value}, but the operators have")


@pytest.mark.parametrize("name", HERE)
def test_refuses_code_that_was_never_verified(given, monkeypatch, name):
    monkeypatch.setitem(known.DIGESTS, name, {})
    refused(given.model, RuntimeError, rf"{name}.forward of transformers .* verified against: transformers 5\.17\.0")


def test_refuses_unknown_contracts(given):
    refused(given.model, ValueError, "no contracts named 'quick'; choose 'fast', 'published'", contracts="quick")
    refused(given.model, ValueError, "mhc_post: no contract named 'tree256'", contracts={"mhc_post": "tree256"})
    refused(given.model, ValueError, "'mhc_pre', which the model calls as a part of", contracts={"mhc_pre": "fast"})
    refused(given.model, ValueError, "'h_aggregate', which is not used here", contracts={"h_aggregate": "tree256"})


def test_refuses_float32_streams_at_the_call(patched):
    with pytest.raises(TypeError, match=r"residual has dtype torch.float32, expected torch.bfloat16"):
        patched.model.model.layers[0].attn_hc(patched.streams.float())


def test_the_digest_sees_code_and_not_layout():
    class One:
        def forward(self, x):
            """Says something."""
            return x + 1  # adds

    class Two:
        def forward(self, x):

            return x + 1

    class Three:
        def forward(self, x):
            return x + 2

    assert known.digest(One.forward) == known.digest(Two.forward) != known.digest(Three.forward)


def test_sites_cover_both_halves_of_every_layer():
    made = subject.causal_lm(1, 4, config=TWO_LAYERS)
    names = [site.name for site in call_sites(made.model)]
    assert len(names) == len(set(names))
    for layer in ("layers.0", "layers.1"):
        for pair in CONNECTIONS:
            assert {f"{layer}.{name}" for name in pair} <= set(names)
    assert next(s for s in call_sites(made.model) if s.name == "layers.0.ffn_post").outputs == (
        "layers.1.attn_hc.streams",
    )
    assert Options({}).backend is None


@pytest.mark.gpu
@pytest.mark.parametrize("contracts", ["fast", "published"])
def test_everything_holds_on_a_gpu(contracts):
    """At a small size; the official one is ``python -m samebits.models.deepseek_v4 --device cuda``."""
    comparison = compare_layer(contracts, batch=3, sequence=24, device="cuda", rows=6)
    assert failed(comparison) == []
    assert all(comparison.sites.values())
