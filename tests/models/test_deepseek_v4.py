"""The real transformers class with our operators in it."""

import json
from contextlib import suppress

import pytest
import torch

import samebits
from samebits.models.deepseek_v4 import compare_hyper_connection, compare_layer, known, replaced, subject
from samebits.models.deepseek_v4.compare import compare
from samebits.models.deepseek_v4.record import boundaries
from samebits.models.deepseek_v4.replace import SITES, _Streams


@pytest.fixture(scope="module")
def layer():
    return subject.decoder_layer(batch=2, sequence=8)


@pytest.fixture(scope="module")
def part():
    return subject.hyper_connection_part(hidden_size=256, rows=6)


@pytest.fixture(scope="module")
def prompt():
    """160 positions, so that the compressor takes part and enough elements round."""
    return compare_layer(rows=4)


def failed(comparison):
    return [check.name for check in comparison.checks if not check.passed]


def test_layer_holds_and_every_difference_is_explained(prompt):
    assert failed(prompt) == []
    assert sum(cause.unexplained for cause in prompt.causes) == 0
    assert prompt.first is not None
    assert prompt.first.name in ("attn_hc.collapsed", "input_layernorm")
    for name in ("attn_hc.streams", "attn_hc.post", "attn_hc.comb"):
        assert next(d for d in prompt.chained if d.name == name).same
    assert prompt.chained[-1].name == "layer"
    assert {"self_attn.compressor.kv_norm", "ffn_hc.streams", "mlp.experts"} <= {d.name for d in prompt.chained}


def test_what_the_class_does_with_dtypes(prompt):
    found = {finding.question: finding.answer for finding in prompt.findings}
    rounds_first = known.norm_rounds_before_weight()
    assert found["What does a norm with FP32 weight return for a BF16 input?"] == (
        "float32" if rounds_first else "bfloat16"
    )
    assert found["Does the BF16 layer run as loaded?"].startswith("no: self_attn.q_a_proj:" if rounds_first else "yes")


def test_hyper_connection_part_at_the_official_width():
    comparison = compare_hyper_connection(rows=4)
    assert failed(comparison) == []
    assert sum(cause.unexplained for cause in comparison.causes) == 0


@pytest.mark.parametrize("contracts", [{"rmsnorm_residual": "tree512"}, {"h_aggregate": "tree256"}])
def test_other_contracts_are_used_and_recorded(part, contracts):
    comparison = compare(part, contracts, rows=3)
    assert failed(comparison) == []
    assert contracts.items() <= comparison.contracts.items()


def test_json_is_strict(prompt):
    read = json.loads(json.dumps(prompt.to_json(), allow_nan=False))
    assert read["first"]["name"] == prompt.first.name
    assert read["passed"] is True


# --- the checks can fail ----------------------------------------------------------------------------------------------


def test_an_operator_that_depends_on_the_batch_is_caught(part, monkeypatch):
    honest = samebits.h_aggregate

    def depends(pre, residual, **options):
        hidden = honest(pre, residual, **options)
        return hidden if pre.shape[:-1].numel() == 1 else hidden * 1.01

    monkeypatch.setattr(samebits, "h_aggregate", depends)
    assert failed(compare(part, rows=3)) == ["our operators give a row the same bits alone as in the batch"]


def test_a_norm_that_depends_on_the_batch_is_caught(part, monkeypatch):
    honest = samebits.rmsnorm_residual

    def depends(x, gamma, *rest, **options):
        y, residual = honest(x, gamma, *rest, **options)
        return (y if x.shape[:-1].numel() == 1 else y * 1.01), residual

    monkeypatch.setattr(samebits, "rmsnorm_residual", depends)
    assert failed(compare(part, rows=3)) == ["our operators give a row the same bits alone as in the batch"]


def test_a_wrong_stream_order_is_caught(part, monkeypatch):
    honest = samebits.h_aggregate
    monkeypatch.setattr(samebits, "h_aggregate", lambda pre, r, **options: honest(pre.flip(-1), r, **options))
    comparison = compare(part, rows=3)
    assert failed(comparison) == ["each replaced module alone is within the BF16 tolerance of the class"]
    assert sum(cause.unexplained for cause in comparison.causes) == 0, "the causes explain the class, not the fault"
    assert comparison.causes[0].steps[0].moved > comparison.causes[0].elements // 2


# --- replacing and restoring ------------------------------------------------------------------------------------------


def bits_of(given):
    with subject.norms_cast_to_input(given.module):
        return boundaries(given.module, given)


def test_the_patch_is_undone_also_after_an_error(layer):
    before = bits_of(layer)
    with suppress(ZeroDivisionError), replaced(layer.module):
        raise ZeroDivisionError
    members = [layer.module.get_submodule(name) for site in SITES for name in site]
    assert not any("forward" in vars(member) for member in members)
    after = bits_of(layer)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_only_this_instance_changes(part):
    other = subject.hyper_connection_part(hidden_size=256, rows=6)
    with replaced(part.module) as state:
        other()
        assert not state.calls
        part()
    assert state.calls == dict.fromkeys([name for site in SITES for name in site], 1)


def test_the_norm_returns_bfloat16_and_the_bits_of_the_operator(part):
    norm = part.module.input_layernorm
    x = part.streams[:, :, 0]
    with replaced(part.module):
        y = norm(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, samebits.rmsnorm_residual(x, norm.weight, norm.variance_epsilon)[0])


def test_gradients_reach_every_parameter():
    given = subject.hyper_connection_part(hidden_size=64, rows=3)
    given.module.requires_grad_(True)
    with replaced(given.module):
        post, comb, collapsed = given.module.attn_hc(given.streams)
        normalised = given.module.input_layernorm(collapsed)
    (normalised.float().square().sum() + post.sum() + comb.square().sum()).backward()
    for name in ("attn_hc.fn", "attn_hc.base", "attn_hc.scale", "input_layernorm.weight"):
        gradient = given.module.get_parameter(name).grad
        assert gradient is not None and gradient.isfinite().all() and gradient.any(), name


def test_strict_list_is_read_as_from_pretrained_reads_it(tmp_path):
    code = known.modeling()
    model = code.DeepseekV4Model(code.DeepseekV4Config(**subject.SMALL))
    model.save_pretrained(tmp_path)
    loaded = code.DeepseekV4Model.from_pretrained(tmp_path, dtype=torch.bfloat16)
    subject.strict_bfloat16(model)
    ours = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert ours == {name: parameter.dtype for name, parameter in loaded.named_parameters()}
    assert set(ours.values()) == {torch.float32, torch.bfloat16}


# --- what is refused --------------------------------------------------------------------------------------------------


def refused(module, error, match, **options):
    with pytest.raises(error, match=match), replaced(module, **options):
        pass
    assert not any("forward" in vars(member) for member in module.modules() if member is not module)


def test_refuses_another_class():
    refused(torch.nn.Linear(4, 4), TypeError, "no module 'attn_hc'")


def test_refuses_a_subclass():
    given = subject.hyper_connection_part(hidden_size=64, rows=1)
    given.module.attn_hc.__class__ = type("Special", (type(given.module.attn_hc),), {})
    refused(given.module, TypeError, "attn_hc is a .*Special; only .*DeepseekV4HyperConnection itself")


def test_refuses_a_second_patch(part):
    with replaced(part.module):
        with pytest.raises(TypeError, match="already has a forward of its own"), replaced(part.module):
            pass
        assert "forward" in vars(part.module.attn_hc), "the first patch stays"


def test_refuses_a_bfloat16_weight():
    given = subject.hyper_connection_part(hidden_size=64, rows=1)
    given.module.bfloat16()
    refused(given.module, TypeError, "input_layernorm.weight is torch.bfloat16, but the operator takes FP32")


def test_refuses_code_that_was_never_verified(part, monkeypatch):
    monkeypatch.setitem(known.DIGESTS, known.HYPER_CONNECTION, {})
    refused(part.module, RuntimeError, r"is not one that samebits was verified against: transformers 5\.17\.0")


def test_refuses_unknown_contracts(part):
    refused(part.module, ValueError, "no contract named 'fast'", contracts={"h_aggregate": "fast"})
    refused(part.module, ValueError, "which this layer does not use", contracts={"mhc_post": "published"})


def test_the_stand_in_knows_only_what_the_forward_asks():
    streams = _Streams(torch.zeros(1, 2, 4, 8, dtype=torch.bfloat16), samebits.h_aggregate)
    with pytest.raises(AttributeError):
        streams.sum  # noqa: B018
    with pytest.raises(RuntimeError, match="expected a sum of weights"):
        (torch.zeros(1, 2, 4, 1) * streams).sum(dim=1)


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
