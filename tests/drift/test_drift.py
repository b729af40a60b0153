"""A planted fault of each kind is found where it was planted."""

from __future__ import annotations

import pytest
import torch
from drift.models import Net, Nudged, batch, nudge, wrong_gradient
from torch import nn

import samebits
from samebits.verify.drift import DriftError, drift
from samebits.verify.drift.align import align
from samebits.verify.drift.compare import judge
from samebits.verify.drift.show import lines
from samebits.verify.trace import trace


def record(model, x=None, backward=True, **options):
    """A trace of one step; ``model`` without gradients of before."""
    model.zero_grad()
    x = (batch() if x is None else x).clone().requires_grad_()
    with trace(model, **options) as recording:
        y = model(x)
        if backward:
            (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    return recording.trace


def replaced(path, make, **options):
    """The network with one module replaced; it keeps its path."""
    model = Net(blocks=3, **options)
    parent, _, name = path.rpartition(".")
    home = model.get_submodule(parent)
    setattr(home, name, make(getattr(home, name)))
    return model


class NudgedNorm(nn.LayerNorm):
    def forward(self, x):
        return nudge(super().forward(x), 2)


def patch_class(kind):
    def change(module):
        module.__class__ = kind
        return module

    return change


def test_the_same_run_agrees_everywhere():
    result = drift(record(Net()), record(Net()))
    assert result.exit_code == 0 and not result.drifted and result.first() is None
    assert {j.judgement for judged in result.phases.values() for j in judged} == {"same"}
    assert result.counts("forward") == {"same": 9} and list(lines(result))[-1] == "same bits"


def test_a_fault_of_one_ulp_is_named_with_row_and_size():
    faulty = replaced("blocks.1.norm", patch_class(NudgedNorm))
    result = drift(record(Net(blocks=3), rows=True, tensors=True), record(faulty, rows=True, tensors=True))
    first = result.first()
    assert first.event.path == "blocks.1.norm" and first.judgement == "origin" and result.exit_code == 1
    (output,) = first.outputs
    assert output.rows == ((2, 2),) and "row 2 first, 1 of 4 rows" in output.detail
    assert "element 0:" in output.detail and "at most 1 ulp apart" in output.detail
    judged = {j.event.path: j.judgement for j in result.phases["forward"]}
    assert judged["blocks.0"] == judged["blocks.0.down"] == "same"
    assert judged["blocks.1.up"] == judged["blocks.2.norm"] == judged["blocks.2"] == "carried"
    assert judged["blocks.1"] == judged["(model)"] == "origin"  # both contain it
    norm = repr(Net(blocks=3).blocks[1].norm)  # another torch writes its settings otherwise
    assert result.settings == [f"blocks.1.norm: {norm} against {norm.replace('LayerNorm', 'NudgedNorm')}"]


def test_a_fault_between_modules_is_put_between_them():
    class Between(Net):
        def forward(self, x):
            for index, block in enumerate(self.blocks):
                x = block(x + 0.25 if index == 2 else x)
            return x

    result = drift(record(Net(blocks=3)), record(Between(blocks=3)))
    assert result.first().event.path == "(model)"
    before, after = result.between()
    assert (before.event.path, after.event.path) == ("blocks.1", "blocks.2")
    assert any("behind blocks.1 (Block), which agrees" in line for line in lines(result))


def test_a_wrong_gradient_is_named_though_the_forward_agrees():
    class Wrong(nn.LayerNorm):
        def forward(self, x):
            return super().forward(wrong_gradient(x))

    result = drift(record(Net(blocks=3)), record(replaced("blocks.1.norm", patch_class(Wrong))))
    assert result.first("forward") is None
    first = result.first("backward")
    assert (first.event.path, first.judgement) == ("blocks.1.norm", "origin")
    judged = {j.event.path: j.judgement for j in result.phases["backward"]}
    assert judged["blocks.2"] == judged["blocks.1.up"] == judged["blocks.1.up.weight"] == "same"
    assert judged["blocks.0.down"] == judged["blocks.0.down.weight"] == "carried"


def test_a_wrong_parameter_gradient_is_named():
    class Wrong(nn.Linear):
        def forward(self, x):
            return nn.functional.linear(x, wrong_gradient(self.weight), self.bias)

    result = drift(record(Net(blocks=3)), record(replaced("blocks.2.up", patch_class(Wrong))))
    different = [j for j in result.phases["backward"] if j.judgement != "same"]
    assert [(j.event.path, j.judgement) for j in different] == [("blocks.2.up.weight", "origin")]


def test_gradients_made_of_another_number_of_parts_are_not_compared_part_by_part():
    class Twice(nn.LayerNorm):
        def forward(self, x):
            return super().forward(x * 0.5 + x * 0.5)

    class Once(nn.LayerNorm):
        def forward(self, x):
            return super().forward((x * 2) * 0.5)

    made = []
    for kind in (Twice, Once):
        torch.manual_seed(0)
        made.append(record(nn.Sequential(nn.Linear(8, 8), kind(8))))
    result = drift(*made)
    (norm,) = [j for j in result.phases["backward"] if j.event.path == "1" and j.event.kind == "module"]
    assert norm.judgement == "incomparable" and "made of 2 parts against 1" in norm.outputs[0].detail
    assert result.exit_code == 0  # halves are exact, so the sums that arrive in front of it agree


def test_a_backward_is_not_blamed_for_its_forward():
    result = drift(record(Net(blocks=3)), record(replaced("blocks.1.norm", patch_class(NudgedNorm))))
    judged = [j for j in result.phases["backward"] if j.event.path.startswith("blocks.2") and j.event.kind == "module"]
    assert {j.judgement for j in judged} <= {"carried", "recovered"} and len(judged) == 4
    assert any("forward of this call differs" in place.detail for j in judged for place in j.inputs)
    assert not any(j.judgement == "origin" for j in result.phases["backward"] if j.event.path.startswith("blocks.2"))


def test_a_fault_of_the_recomputation_alone():
    class Flaky(nn.LayerNorm):
        count = 0

        def forward(self, x):
            self.count += 1
            y = super().forward(x)
            return nudge(y) if self.count > 1 else y

    for reentrant in (False, True):
        good, bad = (
            Net(blocks=3, reentrant=reentrant),
            replaced("blocks.1.norm", patch_class(Flaky), reentrant=reentrant),
        )
        result = drift(record(good), record(bad))
        assert result.first("forward") is None
        assert result.first("recompute").event.path == "blocks.1.norm"
        assert result.drifted


def test_other_parameters_and_inputs_are_named_first():
    other = Net(blocks=3)
    with torch.no_grad():
        other.blocks[2].up.weight[0, 0] += 1e-6
    result = drift(record(Net(blocks=3)), record(other))
    assert [j.event.path for j in result.differing_parameters] == ["blocks.2.up.weight"]
    text = list(lines(result))
    assert text.index("PARAMETERS DIFFER:") < next(i for i, line in enumerate(text) if line.startswith("forward"))
    assert result.first().event.path == "blocks.2.up"

    result = drift(record(Net(blocks=3)), record(Net(blocks=3), nudge(batch())))
    (outermost,) = result.differing_inputs
    assert outermost.event.path == "(model)" and result.first().judgement == "carried"
    assert any(line.startswith("MODEL INPUTS DIFFER: (model) (Net): args.0: bits") for line in lines(result))


def test_calls_that_one_run_does_not_have_are_tolerated():
    wrapped = replaced("blocks.1.norm", lambda norm: nn.Sequential(norm, nn.Identity()))
    result = drift(record(Net(blocks=3)), record(wrapped))
    assert result.exit_code == 0
    only_b = [j.event.path for j in result.phases["forward"] if j.judgement == "only_b"]
    assert only_b == ["blocks.1.norm.0", "blocks.1.norm.1"]
    back = drift(record(wrapped), record(Net(blocks=3)))
    assert back.counts("forward")["only_a"] == 2 and back.exit_code == 0
    broken = replaced("blocks.1.norm", lambda norm: nn.Sequential(Nudged(norm), nn.Identity()))
    assert drift(record(Net(blocks=3)), record(broken)).first().event.path == "blocks.1.norm"


def test_other_shapes_and_dtypes_are_differences_of_their_own():
    a = record(nn.Sequential(nn.Linear(8, 4)), backward=False)
    shape = drift(a, record(nn.Sequential(nn.Linear(8, 6)), backward=False))
    dtype = drift(a, record(nn.Sequential(nn.Linear(8, 4)).bfloat16(), batch().bfloat16(), backward=False))
    assert shape.first().outputs[0].verdict == "shape" and shape.first().outputs[0].detail == "[4, 4] against [4, 6]"
    assert dtype.first().outputs[0].verdict == "dtype" and "float32 against bfloat16" in dtype.first().outputs[0].detail
    assert {j.outputs[0].verdict for j in shape.differing_parameters} == {"shape"}


def test_values_of_arguments_count():
    class Scale(nn.Module):
        def forward(self, x, eps):
            return x + eps

    class Outer(nn.Module):
        def __init__(self, eps):
            super().__init__()
            self.scale, self.eps = Scale(), eps

        def forward(self, x):
            return self.scale(x, self.eps)

    result = drift(record(Outer(1e-5)), record(Outer(1e-6)))
    judged = {j.event.path: j for j in result.phases["forward"]}
    assert judged["scale"].judgement == "carried"
    assert ("args.1", "value", "1e-05 against 1e-06") in [
        (p.where, p.verdict, p.detail) for p in judged["scale"].inputs
    ]
    assert result.first().event.path == "(model)" and result.between()[1].event.path == "scale"


def test_arguments_given_by_keyword_in_one_run():
    class Inner(nn.Module):
        def forward(self, x, y):
            return x - y

    class Outer(nn.Module):
        def __init__(self, named):
            super().__init__()
            self.inner, self.named = Inner(), named

        def forward(self, x):
            return self.inner(x, y=x * 2) if self.named else self.inner(x, x * 2)

    assert drift(record(Outer(True)), record(Outer(False))).exit_code == 0


def test_what_cannot_be_compared_is_said():
    class Sparse(nn.Module):
        def forward(self, x):
            return x.to_sparse()

    result = drift(record(Sparse(), backward=False), record(Sparse(), backward=False))
    assert result.exit_code == 2 and result.counts("forward") == {"incomparable": 1}
    a, b = record(Net()), record(Net())
    b.header["digest"] = "other"
    with pytest.raises(DriftError, match="other"):
        drift(a, b)
    with trace(Net()) as nothing:
        pass
    with pytest.raises(DriftError, match="B recorded nothing"):
        drift(a, nothing.trace)
    assert drift(record(nn.Sequential(nn.Linear(8, 8)), backward=False), record(Net(), backward=False)).exit_code == 1


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex64, torch.bool, torch.int64, torch.bfloat16])
def test_sizes_of_differences_in_every_kind_of_number(dtype):
    class Cast(nn.Module):
        def __init__(self, shift):
            super().__init__()
            self.shift = shift

        def forward(self, x):
            y = x.clone()
            y[3, 1] += self.shift
            return y.to(dtype)

    a, b = (record(Cast(shift), torch.zeros(4, 8), backward=False, tensors=True, rows=True) for shift in (0, 4))
    (output,) = drift(a, b).first().outputs
    assert "row 3 first, 1 of 4 rows differ" in output.detail and "element 1" in output.detail


def test_judgements():
    assert judge(True, True) == "same" and judge(True, False) == "origin" and judge(False, False) == "carried"
    assert judge(None, False) == "unclear" and judge(False, True) == "recovered"
    assert judge(True, None) == judge(None, None) == "incomparable" and judge(False, None) == "carried"
    assert judge(None, True) == "same"


def test_alignment():
    assert align("abc", "abc") == [(0, 0), (1, 1), (2, 2)]
    assert align("abcd", "acd") == [(0, 0), (1, None), (2, 1), (3, 2)]
    assert align("acd", "axcd") == [(0, 0), (None, 1), (1, 2), (2, 3)]
    assert align("", "ab") == [(None, 0), (None, 1)]
    assert sorted(align("abx", "xab"), key=str) == sorted([(0, 1), (1, 2), (2, 0)], key=str)  # moved
    assert align("aab", "ab")[-1] == (2, 1)


def test_an_operator_with_another_contract_is_named():
    class Uses(nn.Module):
        def __init__(self, contract):
            super().__init__()
            self.contract = contract

        def forward(self, x):
            y, residual = samebits.rmsnorm_residual(x.bfloat16(), torch.ones(64), eps=1e-6, contract=self.contract)
            return y.float() + residual.float()

    with samebits.policy("silent"):
        made = [record(Uses(contract), batch(40, 64), backward=False) for contract in ("ascending", "tree512")]
    result = drift(*made)
    first = result.first()
    assert (first.event.kind, first.event.path, first.judgement) == ("operator", "samebits::rmsnorm_residual", "origin")
    assert first.notes == ["contract ascending", "contract tree512"]
    assert any("FIRST DRIFT operator samebits::rmsnorm_residual" in line for line in lines(result))
