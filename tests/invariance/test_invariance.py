"""Batch invariance of whole models: what is planted is found, what is invariant passes, and a real model is judged truly."""

from __future__ import annotations

import pytest
import torch
from drift.models import batch, nudge
from torch import nn

import samebits
from samebits.exact.compare import same_bits
from samebits.verify.invariance import CHANGES
from samebits.verify.trace import trace


class Exact(nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2


class BySize(nn.Module):
    """Another bit in every row as soon as the batch is larger than four rows, as a kernel that switches its tile."""

    def forward(self, x):
        return torch.stack([nudge(row[None])[0] for row in x]) if x.shape[0] > 4 else x * 1


class ByPlace(nn.Module):
    """Another bit in the first row."""

    def forward(self, x):
        return nudge(x, 0)


class ByOthers(nn.Module):
    """One scale for the whole tensor, as a dynamic quantisation has."""

    def forward(self, x):
        return x / x.abs().max()


class ByLuck(nn.Module):
    """Another bit at every call."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        y = x.clone()
        y[..., 0] += self.calls
        return y


def statuses(result):
    return {change: {f.status for f in result[change]} for change in CHANGES if result[change]}


def model_with(module):
    return nn.Sequential(Exact(), nn.Sequential(Exact(), module), Exact())


def test_a_model_without_faults_passes_everything():
    result = samebits.invariance(model_with(Exact()), batch(6), backward=True)
    assert statuses(result) == {change: {"pass"} for change in ("repeat", "split", "permute", "pad")}
    assert result.exit_code == 0 and all(f.first is None and f.compared > 5 for f in result.findings)


@pytest.mark.parametrize(
    ("module", "failing"),
    [
        (BySize, {"split"}),
        (ByPlace, {"split", "permute"}),
        (ByOthers, {"split", "pad"}),
        (ByLuck, {"repeat", "split", "permute", "pad"}),
    ],
)
def test_each_planted_fault_breaks_the_changes_that_it_must_break(module, failing):
    result = samebits.invariance(model_with(module()), batch(6))
    found = {change for change, status in statuses(result).items() if "fail" in status}
    assert found == failing and result.exit_code == 1
    for finding in result.findings:
        if finding.status == "fail":
            assert finding.first.event.path == "1.1" and finding.first.event.cls == module.__name__


def test_a_backward_that_depends_on_the_batch():
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            return grad * grad.shape[0]

    class Module(nn.Module):
        def forward(self, x):
            return Function.apply(x)

    model = nn.Sequential(nn.LayerNorm(8), Module())
    assert samebits.invariance(model, batch(6), only=["pad"]).exit_code == 0
    (finding,) = samebits.invariance(model, batch(6), only=["pad"], backward=True).findings
    assert finding.status == "fail" and finding.first.event.path == "1" and finding.first.event.phase == "backward"


def test_padded_sequences():
    class Causal(nn.Module):
        def __init__(self, causal):
            super().__init__()
            self.causal = causal

        def forward(self, x):
            return x.cumsum(1) if self.causal else x - x.amax(1, keepdim=True)

    x = batch(3 * 5).view(3, 5, 8) - 10  # the padding of zeros is the largest
    good = samebits.invariance(Causal(True), x, sequence_axis=1)
    bad = samebits.invariance(Causal(False), x, sequence_axis=1)
    assert statuses(good) == {change: {"pass"} for change in CHANGES}
    assert {c for c, status in statuses(bad).items() if status == {"fail"}} == {"pad_sequence"}


def test_inputs_in_every_form_and_what_they_share():
    class Takes(nn.Module):
        def forward(self, x, more, table):
            return {"y": x + more[0] * table}

    x, table = batch(4), batch(4, 8, 1)[:, :1]
    inputs = {"x": x, "more": [x * 2, None], "table": table}
    assert samebits.invariance(Takes(), inputs).exit_code == 0

    # a table that all rows share, as long as the batch by chance: taken for rows unless it is named
    class Gathers(Takes):
        def forward(self, x, more, table):
            return {"y": x + table.sum()}

    assert samebits.invariance(Gathers(), inputs).exit_code == 1
    assert samebits.invariance(Gathers(), inputs, shared=["table"]).exit_code == 0
    assert samebits.invariance(model_with(Exact()), (x.t().contiguous(),), batch_axis=1).exit_code == 0
    assert samebits.invariance(model_with(ByOthers()), (x.t().contiguous(),), batch_axis=1).exit_code == 1


def test_the_model_is_given_back_as_it_was():
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5))
    model[0].weight.grad = torch.ones(8)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    seed = torch.random.get_rng_state()
    result = samebits.invariance(model, batch(6), backward=True, only=["repeat"])
    assert result.exit_code == 0  # each run starts from the same random numbers and statistics
    assert all(same_bits(t, before[name]) for name, t in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.ones(8)) and model[0].bias.grad is None
    assert torch.equal(seed, torch.random.get_rng_state())
    assert not any(module._forward_hooks for module in model.modules())
    result = samebits.invariance(model, batch(6), only=["split", "pad"])
    assert [f.status for f in result.findings] == ["error"] * 3 + ["fail"] * 2  # it refuses a batch of one
    assert "more than 1 value" in result.findings[0].error and result.findings[-1].first.event.path == "0"


def test_results_without_rows_are_not_called_invariant():
    class Loss(nn.Module):
        def forward(self, x):
            return x.sum()

    result = samebits.invariance(Loss(), batch(4), only=["split"])
    assert {f.status for f in result.findings} == {"not comparable"} and result.exit_code == 2


def test_a_model_of_our_operators_passes():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.gamma = nn.Parameter(torch.linspace(0.5, 2, 64))

        def forward(self, x):
            y, residual = samebits.rmsnorm_residual(x, self.gamma, eps=1e-6)
            return residual + y

    x = batch(5 * 7, 64).view(5, 7, 64).bfloat16()
    with samebits.policy("silent"):
        result = samebits.invariance(nn.Sequential(Layer(), Layer()), x, backward=True, sequence_axis=1)
    assert statuses(result) == {change: {"pass"} for change in CHANGES}


# --- a real model -----------------------------------------------------------------------------------------------------


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    ids = torch.randint(0, 64, (4, 6))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    return LlamaForCausalLM(config).eval(), inputs


def test_a_real_model_is_judged_truly_and_a_planted_fault_in_it_is_found():
    """Whether a CPU's matrix product varies with the number of rows is up to the CPU; what is said of it must be true."""
    model, inputs = llama()
    result = samebits.invariance(model, inputs, sequence_axis=1)
    assert statuses(result)["repeat"] == {"pass"}
    for finding in result["split"]:
        if finding.status == "fail":
            assert isinstance(model.get_submodule(finding.first.event.path), nn.Linear)
            assert _varies(model, inputs, finding)
        else:
            assert finding.status == "pass" and finding.compared >= 30

    class BySizeOfBatch(nn.Embedding):
        def forward(self, ids):
            y = super().forward(ids)
            return y if ids.shape[0] == 4 else nudge(y, -1)

    model.model.embed_tokens.__class__ = BySizeOfBatch
    planted = samebits.invariance(model, inputs, only=["split", "permute"])
    assert {f.first.event.path for f in planted["split"]} == {"model.embed_tokens"}
    assert all(f.first is None or f.first.event.path != "model.embed_tokens" for f in planted["permute"])


def _varies(model, inputs, finding):
    """The module that was named, called by itself on what the model gives it: with all rows and with one."""
    path = finding.first.event.path
    with trace(model, modules=path, tensors=path) as recording, torch.no_grad():
        model(**inputs)
    event = next(e for e in recording.trace.events if e.path == path and e.kind == "module")
    given = recording.trace.tensor(event.inputs[0].kept)
    module = model.get_submodule(path)
    with torch.no_grad():
        together = module(given)
        return any(
            not same_bits(together[i : i + n], module(given[i : i + n])) for n in (1, 2) for i in range(4 - n + 1)
        )


# --- misuse -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"inputs": batch(1)}, "at least 2"),
        ({"inputs": {"n": 3}}, "no input has a batch axis"),
        ({"batch_axis": 2}, "no input has a batch axis 2"),
        ({"only": ["luck"]}, "unknown change"),
        ({"only": ["pad_sequence"]}, "sequence axis"),
        ({"sequence_axis": 7}, "sequence axis 7"),
    ],
)
def test_misuse(arguments, word):
    with pytest.raises(ValueError, match=word):
        samebits.invariance(Exact(), **{"inputs": batch(4)} | arguments)
