"""``hc_split_sinkhorn``: everything an operator must do, its schedule and edges, and the published bits."""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from samebits import hc_split_sinkhorn, hc_split_sinkhorn_backward, registry
from samebits.audit import compile as compiling
from samebits.exact import fold
from samebits.exact.bits import digest
from samebits.ops.hc_split_sinkhorn import reference
from samebits.verify import inputs
from samebits.verify.conformance import Conformance


class TestHcSplitSinkhorn(Conformance):
    op = "hc_split_sinkhorn"


def _generator(case: str) -> torch.Generator:
    word = int.from_bytes(hashlib.sha256(case.encode()).digest()[:4], "little")
    return torch.Generator().manual_seed(2026 + word)


def _logits(rows: int, scale: float = 1.0) -> Tensor:
    return inputs.row_tensor("sinkhorn-test", range(rows), (24,), torch.float32) * scale


# --- the published bits -----------------------------------------------------------------------------------------------


def test_published_digests_of_the_edge_rows() -> None:
    """Case ``sinkhorn_edges`` of the public manifest (profile oracle-fp32-mhc-v1).

    The upstream gradients come from torch.randn, pre and comb from torch.sigmoid and torch.exp, whose bits depend on the
    vector unit: the manifest was made with AVX2 or later.
    """
    logits = torch.zeros(4, 24)
    logits[0] = torch.tensor([-30.0, -8.0, 8.0, 30.0] * 6)
    logits[1, 8:] = 0.75
    logits[3, :10] = torch.tensor([0.5, -0.5, 2.0, -2.0, 1.0, -1.0, 3.0, -3.0, 40.0, -40.0])
    upstream = _generator("sinkhorn_edges.grad")
    grads = [torch.randn(shape, generator=upstream) for shape in ((4, 4), (4, 4), (4, 4, 4))]

    results = hc_split_sinkhorn(logits)
    grad_logits = hc_split_sinkhorn_backward(*grads, logits)
    assert [r.shape for r in results] == [(4, 4), (4, 4), (4, 4, 4)]
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        assert [digest(t)[:8] for t in (*results, grad_logits)] == ["b017dde9", "73ed0fc6", "23eecc3b", "f073cb7f"]


# --- the schedule -----------------------------------------------------------------------------------------------------


def _balanced(logits: Tensor, sums: str) -> Tensor:
    """comb in FP64 by another route: ``sums`` names the index summed over, step by step."""
    comb = torch.exp(logits[:, 8:].double()).view(-1, 4, 4)
    comb = comb / torch.einsum("tij->ti", comb)[:, :, None] + 1e-6
    for index in sums:
        kept = "j" if index == "i" else "i"
        denominator = torch.einsum(f"tij->t{kept}", comb) + 1e-6
        comb = comb / (denominator[:, None, :] if index == "i" else denominator[:, :, None])
    return comb


def test_twenty_column_and_nineteen_row_steps_columns_first() -> None:
    """Few of 39 steps matter to the result, so each wrong schedule is shown to be far from the right one on this data."""
    logits = _logits(200, scale=3.0)
    _, _, comb = hc_split_sinkhorn(logits)
    right = "i" + "ji" * 19
    error = (comb - _balanced(logits, right)).abs().max()
    assert error < 2e-6
    for wrong in ("j" + "ij" * 19, "i" + "ji" * 18, "i" + "ji" * 20, right + "j", right[1:]):
        assert (comb - _balanced(logits, wrong)).abs().max() > 20 * error, wrong
    assert ((comb.double().sum(1) - 1).abs() < 3e-6).all()  # columns: over the sources
    assert (comb.double().sum(2) - 1).abs().max() > 1e-2  # rows are not balanced to the end, and must not be


@pytest.mark.parametrize("steps", [(-1, -2) * 19 + (-1,), (-2, -1) * 19, (-2,) + (-1, -2) * 18])
def test_a_planted_schedule_changes_bits(monkeypatch: pytest.MonkeyPatch, steps: tuple[int, ...]) -> None:
    logits = _logits(20, scale=3.0)  # far from balanced: each step still counts
    honest = reference.forward(logits)[2]
    monkeypatch.setattr(reference, "STEPS", steps)
    assert (reference.forward(logits)[2] != honest).float().mean() > 0.5


def test_sums_are_trees_and_divisions_are_divisions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A left fold in the place of a tree, no eps, or a clamp would be seen; so would products with reciprocals."""
    logits = _logits(50)
    honest = reference.forward(logits)[2]
    faults: dict[str, Callable[[], None]] = {
        "fold": lambda: monkeypatch.setattr(
            fold, "tree4", lambda t, dim: ((t.select(dim, 0) + t.select(dim, 1)) + t.select(dim, 2)) + t.select(dim, 3)
        ),
        "eps": lambda: monkeypatch.setattr(reference, "_plus_eps", lambda value: value),
        "clamp": lambda: monkeypatch.setattr(reference, "_plus_eps", lambda value: value.clamp(min=1e-6)),
    }  # fmt: skip
    for name, plant in faults.items():
        plant()
        assert (reference.forward(logits)[2] != honest).float().mean() > 0.1, name
        monkeypatch.undo()
    assert digest(reference.forward(logits)[2]) == digest(honest)
    denominator = fold.tree4(honest, -1)[..., None]
    assert (honest / denominator != honest * (1 / denominator)).any()


def test_comb_leads_from_the_first_index_to_the_second() -> None:
    """The softmax normalises over the destinations of a source; only then do columns follow."""
    logits = torch.zeros(1, 24)
    logits[0, 8 + 4 * 1 + 2] = 5.0  # source 1 to destination 2
    _, _, comb = hc_split_sinkhorn(logits)
    assert comb[0].argmax() == 4 * 1 + 2
    assert not torch.equal(comb[0], comb[0].T)


def test_the_assembler_fused_nothing() -> None:
    """The contract has fused multiply-adds in it, so the audit does not look for others: here they are counted.

    Each multiplication and addition of the PTX must still be one in the machine code of Blackwell, where ptxas would fuse
    packed ones; the division's own subroutine adds a few.
    """
    pytest.importorskip("triton")
    op = registry.operator("hc_split_sinkhorn")
    for build in (*op.backend("cuda").builds(), *op.backend("triton").builds()):
        read = compiling.read(compiling.compile_build(build, "sm_100"))
        written: collections.Counter[str] = collections.Counter()
        for instruction in (i for f in read.ptx.functions for i in f.instructions):
            written[instruction.base] += ("f32" in instruction.modifiers) + 2 * ("f32x2" in instruction.modifiers)
        made = collections.Counter(i.base for i in read.kernel.instructions)
        assert made["FMUL"] + 2 * made["FMUL2"] == written["mul"] > 0, build.label
        assert made["FADD"] + 2 * made["FADD2"] >= written["add"] + written["sub"] > 0, build.label
        assert not made["FFMA2"]


# --- the gradient -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.25, 1.0, 3.0])
def test_the_gradient_is_that_of_finite_differences(scale: float) -> None:
    """In FP64, of a formula written anew: the reference's step-by-step walk has no autograd in it to agree with itself."""
    logits = _logits(6, scale)
    weights = [inputs.row_tensor(f"sinkhorn-{s}", range(6), s, torch.float32) for s in ((4,), (4,), (4, 4))]
    found = hc_split_sinkhorn_backward(*weights, logits)

    def loss(x: Tensor) -> Tensor:
        gates = 1 / (1 + torch.exp(-x[:, :8]))
        parts = (gates[:, :4], 2 * gates[:, 4:], _balanced(x, "i" + "ji" * 19))
        return torch.stack([(w.double() * p).flatten(1).sum(1) for w, p in zip(weights, parts, strict=True)]).sum(0)

    step = 2.0**-16
    for n in range(24):
        moved = torch.zeros(24, dtype=torch.float64)
        moved[n] = step
        slope = (loss(logits.double() + moved) - loss(logits.double() - moved)) / (2 * step)
        torch.testing.assert_close(found[:, n].double(), slope, rtol=2e-4, atol=2e-5)


def test_the_row_maximum_is_a_constant() -> None:
    """Adding a constant to a row of logits changes nothing, so the gradient of a row sums to zero, rounding aside."""
    grads = [inputs.row_tensor(f"sinkhorn-{s}", range(9), s, torch.float32) for s in ((4,), (4,), (4, 4))]
    found = hc_split_sinkhorn_backward(*grads, _logits(9))[:, 8:].view(9, 4, 4)
    assert (found.double().sum(-1).abs() < 1e-6).all() and found.abs().max() > 1e-2


# --- edges ------------------------------------------------------------------------------------------------------------


def test_all_zero_logits() -> None:
    pre, post, comb = hc_split_sinkhorn(torch.zeros(2, 24))
    assert (pre == torch.tensor(0.5) + torch.tensor(1e-6)).all() and (post == 1).all()
    assert (comb == torch.tensor(0.24999976)).all()


def test_saturated_gates() -> None:
    pre, post, _ = hc_split_sinkhorn(torch.stack([torch.full((24,), 100.0), torch.full((24,), -100.0)]))
    assert (pre[0] == torch.tensor(1.00000095)).all() and (post[0] == 2).all()
    assert (pre[1] == torch.tensor(1e-6)).all() and not post[1].any()


def test_saturated_gates_pass_no_gradient() -> None:
    ones = torch.ones(2, 4), torch.ones(2, 4), torch.zeros(2, 4, 4)
    logits = torch.stack([torch.full((24,), 200.0), torch.full((24,), -200.0)])
    assert not hc_split_sinkhorn_backward(*ones, logits)[:, :8].any()


def test_one_logit_of_minus_infinity_is_finite() -> None:
    logits = torch.zeros(1, 24)
    logits[0, 8 + 4 * 2 + 1] = -torch.inf
    _, _, comb = hc_split_sinkhorn(logits)
    assert comb.isfinite().all()
    assert comb[0, 2, 1].item() == pytest.approx(1.5e-6, rel=0.05)
    grads = torch.ones(1, 4), torch.ones(1, 4), inputs.row_tensor("sinkhorn-inf", [1], (4, 4), torch.float32)
    grad_logits = hc_split_sinkhorn_backward(*grads, logits)
    assert grad_logits.isfinite().all() and grad_logits[0, 8 + 4 * 2 + 1] == 0


@pytest.mark.parametrize("kind", ["+inf", "nan", "a row of -inf"])
def test_a_poisoned_matrix_is_that_of_its_token_alone(kind: str) -> None:
    """E8, E6: gates and neighbours keep their bits; an upstream of zeros does not hide the NaN."""
    clean = _logits(3)
    logits = clean.clone()
    if kind == "a row of -inf":
        logits[1, 8 + 4 : 8 + 8] = -torch.inf
    else:
        logits[1, 13] = float(kind.removeprefix("+"))
    results, expected = hc_split_sinkhorn(logits), hc_split_sinkhorn(clean)
    assert results[2][1].isnan().all()
    for found, usual in zip(results, expected, strict=True):
        assert digest(found[[0, 2]]) == digest(usual[[0, 2]])
    assert digest(results[0]) == digest(expected[0]) and digest(results[1]) == digest(expected[1])
    zeros = torch.zeros(3, 4), torch.zeros(3, 4), torch.zeros(3, 4, 4)
    grad_logits = hc_split_sinkhorn_backward(*zeros, logits)
    assert grad_logits[1, 8:].isnan().all() and not grad_logits[1, :8].any()
    assert not grad_logits[[0, 2]].any()


def test_a_zero_is_a_zero_whatever_its_sign() -> None:
    """Which zero the row maximum is, -0 or +0, shows in no bit: it is only subtracted, and exp(+-0) = 1."""
    plus = torch.zeros(1, 24)
    for minus in (-plus, torch.where(torch.arange(24) % 2 == 0, -0.0, 0.0)[None]):
        for one, two in zip(hc_split_sinkhorn(plus), hc_split_sinkhorn(minus), strict=True):
            assert digest(one) == digest(two)


def test_a_width_other_than_24_is_refused() -> None:
    with pytest.raises(ValueError, match="N must be 24, got 23"):
        hc_split_sinkhorn(torch.zeros(2, 23))
