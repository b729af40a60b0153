"""The real transformer of diffusers with our operators at every call site."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import asdict

import pytest
import torch
from torch import nn

import samebits
from samebits.exact.compare import same_bits
from samebits.models.minimax_h3 import __main__ as program
from samebits.models.minimax_h3 import block_bench, classes, compare, known, patching, subject
from samebits.models.minimax_h3.geometry import reduced
from samebits.models.minimax_h3.patching import to_bfloat16
from samebits.models.sites import SITES

build = subject.build


def inputs(batch=1):
    return subject.subject(batch=batch).inputs


@pytest.fixture
def model():
    return to_bfloat16(build())


@pytest.fixture
def patched(model):
    samebits.patch(model)
    return model


def run(model, given=None):
    with torch.no_grad():
        return model(**(given or inputs()))


def equal(one, other):
    return len(one) == len(other) and all(same_bits(a, b) for a, b in zip(one, other, strict=True))


def close(one, other, limit=0.02):
    """Within a few BF16 roundings of a chain of two blocks."""
    return all((a - b).abs().max() <= limit * b.abs().max() for a, b in zip(one, other, strict=True))


def state_of(model):
    return [(name, type(m), {k: id(v) for k, v in vars(m).items()}) for name, m in model.named_modules()]


# --- patching and restoring -------------------------------------------------------------------------------------------


def test_patch_and_unpatch_leave_no_trace(model):
    before, outputs = state_of(model), run(model)
    samebits.patch(model)
    ours = run(model)
    assert close(ours, outputs) and not equal(ours, outputs)
    samebits.unpatch(model)
    assert state_of(model) == before
    assert equal(run(model), outputs)


def test_every_operator_of_the_forward_is_ours(patched):
    """Each site runs once, and torch computes no product, norm or attention beside them."""
    seen = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(getattr(function, "__name__", ""))
            return function(*args, **kwargs or {})

    report = samebits.patched(patched)
    assert report.unused == tuple(site.name for site in report.sites), "nothing has run"
    with torch.no_grad(), Watch():
        patched(**inputs())
    theirs = {"linear", "rms_norm", "scaled_dot_product_attention", "silu", "matmul", "exp", "index_select"}
    assert theirs & set(seen) == {"index_select"}, "the rows of the two outputs"
    report = samebits.patched(patched)
    assert set(report.hits.values()) == {1} and report.unused == ()
    assert {site.operator for site in report.sites} == set(patching.OPERATORS)
    assert report.adapters == () and report.release == f"diffusers {known.version()}"
    json.dumps(asdict(report))


def test_sites_of_a_block(patched):
    names = {site.name: site.operator for site in samebits.patched(patched).sites}
    inside = {name.removeprefix("transformer_blocks.1."): op for name, op in names.items() if "blocks.1." in name}
    assert inside == {
        "adaln_proj": "adaln_projection",
        "norm1": "rmsnorm_modulated",
        "attn": "attention",
        **{f"attn.to_{part}": "linear" for part in ("q", "k", "v", "out.0")},
        **{f"attn.norm_{part}": "qk_norm_rope" for part in "qk"},
        "attn_residual": "adaln_gate_residual",
        "norm2": "rmsnorm_modulated",
        "ff.net.0": "swiglu",
        "ff.net.0.proj": "linear",
        "ff.net.2": "linear",
        "ff_residual": "adaln_gate_residual",
    }
    assert names["token_refiner.refiner_blocks.0.attn.norm_q"] == "qk_rmsnorm"


def test_only_this_model_changes(patched):
    other = build()
    assert type(other.transformer_blocks[0]) is known.home(known.BLOCK)
    assert type(other.proj_in) is nn.Linear and type(other.norm_out.norm) is nn.RMSNorm
    assert type(other.transformer_blocks[0].attn.processor) is known.home(known.PROCESSOR)


def test_names_of_classes_stay_and_so_does_isinstance(patched):
    for member in patched.modules():
        if SITES in vars(member):
            (base,) = type(member).__bases__
            assert type(member).__name__ == base.__name__ and isinstance(member, base)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_patched_and_stands_alone(patched, again):
    outputs = run(patched)
    twin = again(patched)
    assert equal(run(twin), outputs)
    with torch.no_grad():
        twin.transformer_blocks[0].ff.net[2].weight.zero_()
    assert equal(run(patched), outputs) and not equal(run(twin), outputs)
    samebits.unpatch(twin)
    assert samebits.patched(patched).sites
    with pytest.raises(RuntimeError, match="not patched"):
        samebits.patched(twin)


def test_a_block_alone_can_be_patched():
    block = build().transformer_blocks[0].to(torch.bfloat16)
    report = samebits.patch(block)
    assert {"MiniMaxH3TransformerBlock.attn", "MiniMaxH3TransformerBlock.norm1"} <= {site.name for site in report.sites}
    samebits.unpatch(block)
    assert type(block) is known.home(known.BLOCK)


def test_a_model_inside_of_another_module(model):
    whole = nn.ModuleDict({"student": model})
    report = samebits.patch(whole)
    assert all(site.name.startswith("student.") for site in report.sites)
    assert {"student.proj_in", "student.norm_out", "student.transformer_blocks.0.attn"} <= set(report.hits)
    assert samebits.patched(model).sites, "seen from inside, too"
    samebits.unpatch(whole)


def test_a_batch_and_its_sequences_alone_have_the_same_bits(patched):
    given = inputs(2)
    both = run(patched, given)
    for item in range(2):
        alone = {name: v[item : item + 1] if v.dim() == 3 else v for name, v in given.items() if torch.is_tensor(v)}
        made = run(patched, alone | {"return_dict": False})
        assert equal(made, [value[item : item + 1] for value in both])


def test_state_dicts_are_the_same(model):
    before = {name: id(value) for name, value in model.named_parameters()}
    samebits.patch(model)
    assert {name: id(value) for name, value in model.named_parameters()} == before


# --- gradients, checkpoints, adapters, hooks --------------------------------------------------------------------------


def step(model):
    model.zero_grad()
    outputs = model(**inputs())
    sum(value.square().sum() for value in outputs).backward()
    return outputs, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_gradients_reach_every_parameter_and_are_near_those_of_diffusers(model):
    _, theirs = step(model)
    samebits.patch(model)
    _, ours = step(model)
    assert set(ours) == set(theirs) == {name for name, _ in model.named_parameters()}
    for name, grad in ours.items():
        assert grad.dtype == theirs[name].dtype
        assert (grad.float() - theirs[name].float()).abs().max() <= 0.06 * theirs[name].abs().max(), name


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_no_bit(patched, reentrant):
    outputs, grads = step(patched)

    def checkpoint(function, *args):
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=reentrant)

    patched.enable_gradient_checkpointing(checkpoint)
    patched.train()
    again, repeated = step(patched)
    assert equal(outputs, again)
    assert [name for name in grads if name in repeated and not same_bits(grads[name], repeated[name])] == []
    assert samebits.patched(patched).hits["transformer_blocks.0.attn"] > 2, "the forward ran again"
    if not reentrant:  # a reentrant checkpoint needs an input that asks for a gradient, which the refiner's has
        assert set(repeated) == set(grads)


def test_a_compiled_block_has_the_bits_of_the_eager_one():
    given = block_bench.subject(9, reduced(16), torch.device("cpu"))
    compiled = torch.compile(given.ours, backend="aot_eager", fullgraph=True)
    found = []
    for block in (given.ours, compiled):
        output = block(given.hidden, given.temb, given.index, given.rotary)
        found.append((output, *torch.autograd.grad(output, given.leaves(given.ours), given.upstream)))
    assert equal(*found)


class Adapter(nn.Module):
    """A low-rank adapter as ``peft`` puts one around a linear: the linear is its ``base_layer``."""

    def __init__(self, base_layer, scale):
        super().__init__()
        self.base_layer = base_layer
        dtype = base_layer.weight.dtype
        self.lora_A = nn.Linear(base_layer.in_features, 2, bias=False, dtype=dtype)
        self.lora_B = nn.Linear(2, base_layer.out_features, bias=False, dtype=dtype)
        self.scale = scale

    @property
    def weight(self):
        return self.base_layer.weight

    def forward(self, x):
        return self.base_layer(x) + self.scale * self.lora_B(self.lora_A(x))


def adapt(model, scale):
    torch.manual_seed(2)
    for block in model.transformer_blocks:
        block.attn.to_q = Adapter(block.attn.to_q, scale)
        block.attn.to_out[0] = Adapter(block.attn.to_out[0], scale)
        block.ff.net[0].proj = Adapter(block.ff.net[0].proj, scale)
        block.adaln_proj.linear = Adapter(block.adaln_proj.linear, scale)
    model.time_embedder.linear_1 = Adapter(model.time_embedder.linear_1, scale)
    model.norm_out.linear = Adapter(model.norm_out.linear, scale)
    model.context_embedder = Adapter(model.context_embedder, scale)
    return model


def test_adapters_put_on_before_or_after_are_the_same(model):
    after = adapt(samebits.patch(twin := copy.deepcopy(model)) and twin, 0.5)
    before = adapt(model, 0.5)
    theirs = run(before)
    report = samebits.patch(before)
    ours = run(before)
    assert equal(run(after), ours) and close(ours, theirs)
    blocks = [f"transformer_blocks.{i}" for i in range(2)]
    wrapped = ("attn.to_q", "attn.to_out.0", "ff.net.0.proj", "adaln_proj.linear")
    expected = {f"{block}.{name}" for block in blocks for name in wrapped}
    assert set(report.adapters) == expected | {"time_embedder.linear_1", "norm_out.linear", "context_embedder"}
    assert set(samebits.patched(after).adapters) == set(report.adapters)
    hits = samebits.patched(before).hits
    assert hits["transformer_blocks.0.adaln_proj.linear.base_layer"] == 1
    assert type(before.transformer_blocks[0].attn.to_q.lora_A) is nn.Linear
    _, grads = step(before)
    assert grads["transformer_blocks.0.attn.to_q.lora_B.weight"].any()
    samebits.unpatch(before)
    assert equal(run(before), theirs)


def test_an_adapter_that_adds_nothing_changes_no_bit(patched):
    outputs = run(patched)
    assert equal(run(adapt(patched, 0.0)), outputs)


def test_hooks_see_every_module(patched):
    outputs, seen = run(patched), []
    for name, member in patched.named_modules():
        if SITES in vars(member):
            member.register_forward_hook(lambda m, args, out, name=name: seen.append(name))
    assert equal(run(patched), outputs)
    assert set(seen) == {name for name, member in patched.named_modules() if SITES in vars(member)}


@pytest.mark.parametrize(
    "name",
    ["transformer_blocks.0.norm1", "transformer_blocks.1.attn.norm_k", "transformer_blocks.0.adaln_proj.linear",
     "norm_out.norm", "norm_out.linear", "time_embedder.linear_1", "time_embedder.linear_2"],
)  # fmt: skip
def test_a_hook_that_would_change_a_fused_module_is_refused(patched, name):
    module = patched.get_submodule(name)
    for register, hook in (
        (module.register_forward_hook, lambda m, args, out: out * 2),
        (module.register_forward_pre_hook, lambda m, args: (args[0] + 1,)),
        (module.register_full_backward_hook, lambda m, given, made: None),
    ):
        handle = register(hook)
        with pytest.raises(RuntimeError, match=f"{name}: a hook changes what this module".replace(".", r"\.")):
            run(patched)
        handle.remove()
    run(patched)


def test_fused_projections(model):
    apart = run(samebits.patch(twin := copy.deepcopy(model)) and twin)
    model.fuse_qkv_projections()
    report = samebits.patch(model)
    assert "transformer_blocks.0.attn.to_qkv" in {site.name for site in report.sites}
    assert equal(run(model), apart), "columns of a product do not depend on one another"
    twin.fuse_qkv_projections()
    with pytest.raises(RuntimeError, match="projections were fused in a patched model"):
        run(twin)


def test_contracts_by_operator(model):
    report = samebits.patch(model, {"attention": "fa2"})
    assert report.contracts["attention"] == "fa2" and report.contracts["linear"] == "kchain"
    assert {site.contract for site in report.sites if site.operator == "attention"} == {"fa2"}
    fa2 = run(model)
    samebits.unpatch(model)
    samebits.patch(model, "published", backend="reference")
    assert samebits.patched(model).backend == "reference"
    assert close(run(model), fa2)


# --- what is refused --------------------------------------------------------------------------------------------------


def refused(model, error, match, *words, **options):
    before = state_of(model)
    with pytest.raises(error, match=match):
        samebits.patch(model, *words, **options)
    assert state_of(model) == before, "nothing was touched"


def test_refuses_twice_and_undoing_nothing(patched):
    refused(patched, RuntimeError, r"patched already; samebits\.unpatch it first")
    samebits.unpatch(patched)
    for call in (samebits.unpatch, samebits.patched):
        with pytest.raises(RuntimeError, match=r"not patched; samebits\.patch it first"):
            call(patched)


def test_refuses_other_models():
    with pytest.raises(TypeError, match="holds no MiniMaxH3TransformerBlock of diffusers"):
        patching.patch(nn.Linear(4, 4))
    refused(nn.Linear(4, 4), TypeError, "holds no DeepseekV4DecoderLayer")


def test_refuses_a_subclass_and_a_forward_of_its_own(model, monkeypatch):
    norm = model.transformer_blocks[1].norm2
    monkeypatch.setitem(vars(norm), "forward", norm.forward)
    refused(model, TypeError, r"transformer_blocks\.1\.norm2 already has a forward of its own")
    monkeypatch.undo()
    block = model.transformer_blocks[0]
    monkeypatch.setattr(block, "__class__", type("Special", (type(block),), {}))
    refused(model, TypeError, r"transformer_blocks\.0 is a .*Special; only .*MiniMaxH3TransformerBlock itself")


def test_refuses_a_quantised_linear(model):
    class Int8(nn.Module):
        pass

    model.transformer_blocks[0].ff.net[2] = Int8()
    refused(
        model,
        TypeError,
        r"transformer_blocks\.0\.ff\.net\.2 is a .*Int8; only torch\.nn\.modules\.linear\.Linear itself",
    )


def test_refuses_another_processor_or_backend(model):
    attention = model.transformer_blocks[0].attn
    original = attention.processor
    attention.set_processor(type("Mine", (), {"__call__": lambda *_: None})())
    refused(model, TypeError, r"transformer_blocks\.0\.attn has the processor .*Mine; only MiniMaxH3AttnProcessor")
    attention.set_processor(original)
    model.set_attention_backend("native")
    refused(model, RuntimeError, "the attention backend .* was chosen; reset_attention_backend")


def test_refuses_what_was_set_up_after_the_patch(patched):
    attention = patched.transformer_blocks[1].attn
    rows, angles = torch.zeros(1, 3, 32, dtype=torch.bfloat16), (torch.ones(3, 48), torch.zeros(3, 48))
    with torch.no_grad():
        assert attention(rows, angles).shape == rows.shape
        with pytest.raises(ValueError, match=r"blocks\.1\.attn: an attention mask was given"):
            attention(rows, angles, torch.ones(3, 3))
        attention.set_attention_backend("native")
        with pytest.raises(RuntimeError, match="was set on a patched model"):
            attention(rows, angles)
        attention.processor._attention_backend = None
        attention.processor._parallel_config = object()
        with pytest.raises(RuntimeError, match="context parallelism"):
            attention(rows, angles)


def test_refuses_dtypes_that_the_class_does_not_have():
    refused(
        build(), TypeError, r"context_embedder\.weight is torch\.float32, expected torch\.bfloat16 or torch\.float16"
    )
    refused(build().bfloat16(), TypeError, r"proj_in\.weight is torch\.bfloat16, expected torch\.float32")
    mixed = to_bfloat16(build())
    mixed.transformer_blocks[1].norm1.half()
    refused(mixed, TypeError, r"several dtypes \(torch\.bfloat16, torch\.float16\)")


def test_the_cast_keeps_what_the_class_keeps():
    """The twelve FP32 parameters that ``from_pretrained(torch_dtype=torch.bfloat16)`` leaves."""
    linears = (
        "proj_in",
        "audio_proj_in",
        "time_embedder.linear_1",
        "time_embedder.linear_2",
        "proj_out",
        "audio_proj_out",
    )
    kept = {f"{name}.{part}" for name in linears for part in ("weight", "bias")}
    found = {name: parameter.dtype for name, parameter in to_bfloat16(build()).named_parameters()}
    assert {name for name, dtype in found.items() if dtype == torch.float32} == kept
    assert set(found.values()) == {torch.float32, torch.bfloat16}


def test_refuses_a_configuration_that_the_operators_do_not_have():
    refused(to_bfloat16(build(attention_head_dim=16, rope_freq_dim=2)), ValueError, "heads have 16 channels")
    model = to_bfloat16(build())
    model.time_proj.downscale_freq_shift = 1
    refused(model, ValueError, "time_proj: downscale_freq_shift is 1, expected 0")


@pytest.mark.parametrize("name", known.DIGESTS)
def test_refuses_code_that_was_never_verified(model, monkeypatch, name):
    monkeypatch.setitem(known.DIGESTS, name, {})
    refused(model, RuntimeError, rf"{name} of diffusers .* verified against: diffusers 0\.42\.1")


def test_refuses_unknown_contracts(model):
    refused(model, ValueError, "no contracts named 'quick'; choose one of 'fast', 'published'", "quick")
    refused(model, ValueError, "'mhc_post', which is not used here", {"mhc_post": "fast"})
    refused(model, ValueError, "attention has no contract 'fa3'", {"attention": "fa3"})
    refused(model, ValueError, "linear: no contract named 'fast'", {"linear": "fast"})


# --- the comparison of a whole model ----------------------------------------------------------------------------------

CHECKS = [
    "every call site runs our operator",
    "patched, a second run has the same bits",
    "patched, a sequence has the same bits alone and in a batch",
    "patched, outputs are within 0.03 of the class's largest",
    "unpatched again, the model has its own bits",
]


def broken(comparison):
    return [check.name for check in comparison.checks if not check.passed]


def test_a_whole_model_keeps_every_promise():
    found = compare.compare_model(subject.subject(batch=2))
    assert [check.name for check in found.checks] == CHECKS and broken(found) == [] and found.passed
    assert [check.judged for check in found.checks] == [found.sites, 1, 2, 1, 1]
    assert 0 < found.distance < compare.LIMIT and 0 < found.equal < found.elements
    json.dumps(found.to_json(), allow_nan=False)


def test_the_program(tmp_path, monkeypatch, capsys):
    out = tmp_path / "model.json"
    monkeypatch.setattr("sys.argv", ["minimax_h3", "--layers", "1", "--out", str(out)])
    assert program.main() == 0
    assert capsys.readouterr().out.count("ok    ") == len(CHECKS)
    assert json.loads(out.read_text())["passed"] is True
    monkeypatch.setattr("sys.argv", ["minimax_h3", "--batch", "1"])
    with pytest.raises(SystemExit):
        program.main()


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        (lambda honest, calls, x: honest(x) + 2.0**-6 * len(calls), CHECKS[1]),
        (lambda honest, calls, x: honest(x) * (1 + 2.0**-7 * (x.shape[0] > 1)), CHECKS[2]),
        (lambda honest, calls, x: honest(x.roll(1, -1)), CHECKS[3]),
    ],
)
def test_a_model_that_breaks_a_promise(monkeypatch, fault, check):
    honest, calls = samebits.swiglu, []

    def faulty(x, **options):
        calls.append(None)
        return fault(honest, calls, x)

    monkeypatch.setattr(samebits, "swiglu", faulty)
    assert check in broken(compare.compare_model(subject.subject(batch=2, num_layers=1)))


def test_a_site_that_is_passed_over(monkeypatch):
    monkeypatch.setattr(classes.SwiGLU, "forward", classes.SwiGLU.__bases__[0].forward)
    found = compare.compare_model(subject.subject(batch=2, num_layers=1))
    assert broken(found) == CHECKS[:1]
    assert "transformer_blocks.0.ff.net.0" in found.checks[0].detail


@pytest.mark.gpu
def test_the_patched_model_on_a_gpu(model):
    """Near diffusers, the same bits for a sequence in any batch, and for the same call twice, gradients included."""
    model = model.cuda()
    given = {name: v.cuda() if torch.is_tensor(v) else v for name, v in inputs(2).items()}
    theirs = run(model, given)
    samebits.patch(model)
    ours = run(model, given)
    assert close(ours, theirs) and equal(run(model, given), ours)
    alone = {name: v[1:2] if torch.is_tensor(v) and v.dim() == 3 else v for name, v in given.items()}
    assert equal(run(model, alone), [value[1:2] for value in ours])


def test_every_class_of_ours_has_one_base():
    for base, ours in classes.REPLACED.items():
        assert ours.__bases__ == (base,) and ours.__name__ == base.__name__
