"""``attention``: what is special to an operator of sequences. Everything here runs on a CPU but what is marked ``gpu``."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import struct
import subprocess
import sys
import warnings
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

import samebits
from samebits.dispatch import DeviceInfo, UnsupportedError
from samebits.exact.bits import bits
from samebits.sequence_ops.attention import contracts, golden, op, reference
from samebits.sequence_ops.attention.checks import Problem

ROOT = Path(__file__).parents[2]
CONTRACTS = tuple(contracts.RECIPES)
TOLERANCE = {torch.bfloat16: 1.2e-2, torch.float16: 1.6e-3}
"""Largest error over the largest value: about three roundings of the dtype."""


def inputs(
    queries: int,
    keys: int,
    heads: int = 2,
    kv_heads: int = 1,
    head_dim: int = 64,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch, queries, heads, head_dim), (batch, keys, kv_heads, head_dim), (batch, keys, kv_heads, head_dim))
    q, k, v = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    return q, k, v


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(bits(a.contiguous()), bits(b.contiguous()))


def error(ours: Tensor, exact: Tensor) -> float:
    return ((ours.double() - exact).abs().max() / exact.abs().max()).item()


# --- accuracy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize(
    ("causal", "dtype", "head_dim", "heads", "kv_heads"),
    [
        (False, torch.bfloat16, 128, 2, 2),
        (True, torch.bfloat16, 64, 4, 2),
        (True, torch.float16, 128, 3, 1),
        (False, torch.float16, 64, 1, 1),
    ],
)
def test_as_accurate_as_its_dtype_allows(
    contract: str, causal: bool, dtype: torch.dtype, head_dim: int, heads: int, kv_heads: int
) -> None:
    leaves = [t.requires_grad_() for t in inputs(33, 150, heads, kv_heads, head_dim, 1, dtype)]
    out, lse = samebits.attention(*leaves, causal=causal, contract=contract)
    exact, exact_lse = golden.forward(*leaves, causal, head_dim**-0.5)
    grad = torch.randn_like(out)
    gradients = torch.autograd.grad(out, leaves, grad)
    exact_gradients = golden.backward(*leaves, grad, causal, head_dim**-0.5)
    assert error(out, exact) < TOLERANCE[dtype]
    assert error(lse, exact_lse) < 1e-6
    for ours, theirs, leaf in zip(gradients, exact_gradients, leaves, strict=True):
        assert ours.dtype == leaf.dtype
        assert error(ours, theirs) < TOLERANCE[dtype]


def test_a_wrong_scale_is_not_accurate() -> None:
    """The bound above can fail: a scale that is off by one part in twenty fails it."""
    q, k, v = inputs(33, 150)
    out, lse = samebits.attention(q, k, v, scale=0.125 * 1.05)
    exact, exact_lse = golden.forward(q, k, v, False, 0.125)
    assert error(out, exact) > TOLERANCE[torch.bfloat16]
    assert error(lse, exact_lse) > 1e-6


def test_large_scores_and_a_scale_of_ones_own() -> None:
    q, k, v = inputs(5, 70)
    out, lse = samebits.attention(q * 30, k * 30, v, scale=0.5)
    exact, exact_lse = golden.forward(q * 30, k * 30, v, False, 0.5)
    assert lse.max() > 1000
    assert error(out, exact) < TOLERANCE[torch.bfloat16]
    assert error(lse, exact_lse) < 1e-6


# --- invariance -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("causal", [False, True])
def test_a_row_does_not_see_its_neighbours(contract: str, causal: bool) -> None:
    """H11: fewer queries (a decode step is the last row of a prefill), fewer heads, another batch: the same bits."""
    q, k, v = inputs(40, 140, 4, 2, batch=2)
    grad = inputs(40, 140, 4, 2, batch=2, seed=1)[0]
    options = {"causal": causal, "contract": contract}
    out, lse = samebits.attention(q, k, v, **options)
    grad_q, grad_k, grad_v = samebits.attention_backward(grad, q, k, v, out, lse, **options)
    for rows in (1, 7, 17):
        tail = slice(40 - rows, 40)
        few, few_lse = samebits.attention(q[:, tail], k, v, **options)
        assert same(few, out[:, tail])
        assert same(few_lse, lse[:, :, tail])
        few_q = samebits.attention_backward(grad[:, tail], q[:, tail], k, v, few, few_lse, **options)[0]
        assert same(few_q, grad_q[:, tail])
    some = (q[1:, :, 2:], k[1:, :, 1:], v[1:, :, 1:])
    part, part_lse = samebits.attention(*some, **options)
    assert same(part, out[1:, :, 2:])
    parts = samebits.attention_backward(grad[1:, :, 2:], *some, part, part_lse, **options)
    assert same(parts[0], grad_q[1:, :, 2:])
    assert same(parts[1], grad_k[1:, :, 1:])
    assert same(parts[2], grad_v[1:, :, 1:])


@pytest.mark.parametrize("contract", CONTRACTS)
def test_a_decode_step_has_the_bits_of_the_prefill(contract: str) -> None:
    """H5. Causal: query i over the keys 0 .. i alone, for every i around the edges of key blocks."""
    q, k, v = inputs(140, 140)
    out, lse = samebits.attention(q, k, v, causal=True, contract=contract)
    for i in (0, 1, 15, 63, 64, 127, 128, 139):
        step, step_lse = samebits.attention(
            q[:, i : i + 1], k[:, : i + 1], v[:, : i + 1], causal=True, contract=contract
        )
        assert same(step, out[:, i : i + 1])
        assert same(step_lse, lse[:, :, i : i + 1])


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_packed_documents_are_sequences_of_their_own(contract: str, causal: bool, index_dtype: torch.dtype) -> None:
    """H6"""
    bounds_q, bounds_k = (0, 1, 1, 20, 60), (0, 70, 75, 140, 141)
    q, k, v = inputs(60, 141)
    grad = inputs(60, 141, seed=1)[0]
    packing = {
        "cu_seqlens": torch.tensor(bounds_q, dtype=index_dtype),
        "cu_seqlens_k": torch.tensor(bounds_k, dtype=index_dtype),
    }
    options = {"causal": causal, "contract": contract}
    out, lse = samebits.attention(q, k, v, **packing, **options)
    gradients = samebits.attention_backward(grad, q, k, v, out, lse, **packing, **options)
    for (q0, q1), (k0, k1) in zip(pairwise(bounds_q), pairwise(bounds_k), strict=True):
        own = (q[:, q0:q1], k[:, k0:k1], v[:, k0:k1])
        alone, alone_lse = samebits.attention(*own, **options)
        assert same(alone, out[:, q0:q1])
        assert same(alone_lse, lse[:, :, q0:q1])
        results = samebits.attention_backward(grad[:, q0:q1], *own, alone, alone_lse, **options)
        for ours, theirs in zip(gradients, results, strict=True):
            place = slice(q0, q1) if ours is gradients[0] else slice(k0, k1)
            assert same(ours[:, place], theirs)


def test_the_contracts_differ() -> None:
    """Otherwise the tests of one would prove nothing of the other."""
    q, k, v = inputs(20, 200)
    assert not same(samebits.attention(q, k, v, contract="cudnn")[0], samebits.attention(q, k, v, contract="fa2")[0])


def test_another_order_of_key_blocks_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs(20, 200)
    out, lse = samebits.attention(q, k, v, contract="cudnn")
    other = dataclasses.replace(contracts.CUDNN, kv_blocks=((64, 64), (128, 64)))
    monkeypatch.setitem(contracts.RECIPES, "cudnn", other)
    changed, changed_lse = samebits.attention(q, k, v, contract="cudnn")
    assert not same(changed, out)
    assert not same(changed_lse, lse)


@pytest.mark.parametrize("contract", CONTRACTS)
def test_keys_that_no_query_sees_are_zero(contract: str) -> None:
    """More queries than keys: the first ones see nothing, and get no gradient."""
    leaves = [t.requires_grad_() for t in inputs(12, 5)]
    out, lse = samebits.attention(*leaves, causal=True, contract=contract)
    assert out[:, :7].count_nonzero() == 0
    assert bool((lse[:, :, :7] == -math.inf).all())
    assert bool(lse[:, :, 7:].isfinite().all())
    out.sum().backward()
    assert leaves[0].grad[:, :7].count_nonzero() == 0
    assert all(bool(t.grad.isfinite().all()) and t.grad.count_nonzero() for t in leaves)


def test_the_four_sums_of_a_row() -> None:
    """Written out a second time, a number at a time: which columns a partial owns, and in which order it adds them."""
    p = torch.rand(1, 128, generator=torch.Generator().manual_seed(3))
    start, a = torch.rand(1, 4), torch.rand(1)
    for recipe in contracts.RECIPES.values():
        block = p[:, : recipe.kv_block(128)]
        found = reference._row_sums(recipe, start, a, block)
        for i in range(4):
            owned = [block[0, 8 * j + 2 * i + e] for j in range(recipe.kv_block(128) // 8) for e in (0, 1)]
            if recipe.last_block_first:
                acc = (start[0, i].double() * a[0].double() + owned[0].double()).float()
                for value in owned[1:]:
                    acc = acc + value
            else:
                local = owned[0]
                for value in owned[1:]:
                    local = local + value
                acc = (start[0, i].double() * a[0].double() + local.double()).float()
            assert acc == found[0, i]


DIGESTS = {
    "cudnn": "4402abff3d29cc7d77b92cf8d6cf0b15bc934dc6d518a5f726a096d38809c507",
    "fa2": "3cb1a072452006cabe921ccb1a083a454f30ee261b20d966390ccca600cd084a",
}
"""Of out, lse and the gradients on a CPU, where all is IEEE arithmetic, the model of the tensor core, and tables."""


@pytest.mark.parametrize("contract", CONTRACTS)
def test_the_bits_of_a_cpu_are_as_recorded(contract: str) -> None:
    generator = torch.Generator().manual_seed(11)
    q, k, v, grad = (
        (torch.randint(-256, 257, (1, rows, heads, 64), generator=generator) / 96).bfloat16()
        for rows, heads in ((40, 4), (170, 2), (170, 2), (40, 4))
    )
    options = {"causal": True, "contract": contract}
    out, lse = samebits.attention(q, k, v, **options)
    results = (out, lse, *samebits.attention_backward(grad, q, k, v, out, lse, **options))
    digest = hashlib.sha256(b"".join(bits(t.contiguous()).numpy().tobytes() for t in results)).hexdigest()
    assert digest == DIGESTS[contract]


def chosen(asked: str | None, *tensors: Tensor, backward: bool = False) -> op.Decision:
    """What the monkeypatched device would run."""
    problem = op.check("attention", *tensors, None, None, 1.0, "cudnn")
    return op._decide(problem, contracts.CUDNN, backward, False, asked, tensors, ())


def test_a_slower_backend_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = inputs(65, 65)
    monkeypatch.setattr(op.devices, "info", lambda device: DeviceInfo("cuda", 75))
    monkeypatch.setattr(op, "_told", set())
    with pytest.warns(UserWarning, match=r"slower backend 'reference': backend 'triton' needs compute capability 8\.0"):
        assert chosen(None, *tensors).choice.backend == "reference"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen(None, *tensors).choice.backend == "reference", "said once"
    with samebits.policy("strict"), pytest.raises(UnsupportedError, match="policy 'strict' forbids this call"):
        chosen(None, *tensors)
    with pytest.raises(UnsupportedError, match=r"this GPU has 7\.5"):
        chosen("triton", *tensors)


# --- torch ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
def test_opcheck(packed: bool) -> None:
    q, k, v = (t.requires_grad_() for t in inputs(6, 6))
    cu = torch.tensor([0, 2, 6]) if packed else None
    arguments = (q, k, v, cu, None, True, 0.125, "cudnn", None)
    torch.library.opcheck(torch.ops.samebits.attention.default, arguments)


def test_compiled_and_checkpointed_calls_have_the_same_bits() -> None:
    leaves = [t.requires_grad_() for t in inputs(9, 20)]

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return samebits.attention(q, k, v, causal=True)[0]

    eager = torch.autograd.grad(run(*leaves).float().square().sum(), leaves)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for other in (compiled, lambda *t: torch.utils.checkpoint.checkpoint(run, *t, use_reentrant=False)):
        out = other(*leaves)
        assert same(out, run(*leaves))
        assert all(map(same, torch.autograd.grad(out.float().square().sum(), leaves), eager))


def test_strides_do_not_change_the_bits() -> None:
    """Fused q, k, v in one buffer, heads before positions, an expanded batch, a transposed upstream gradient."""
    q, k, v = inputs(20, 20, 2, 2)
    out, lse = samebits.attention(q, k, v)
    fused = torch.cat([q, k, v], 2)
    by_head = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    for tensors in (fused.split(2, 2), by_head):
        assert same(samebits.attention(*tensors)[0], out)
    twice = samebits.attention(*(t.expand(2, -1, -1, -1) for t in (q, k, v)))[0]
    assert same(twice, out.expand(2, -1, -1, -1))
    grad = torch.randn(1, 2, 64, 20).to(q.dtype).permute(0, 3, 1, 2)
    one = samebits.attention_backward(grad, q, k, v, out, lse)
    two = samebits.attention_backward(grad.contiguous(), q, k, v, out, lse)
    assert all(map(same, one, two))


def test_only_what_is_wanted() -> None:
    q, k, v = inputs(6, 9)
    out, lse = samebits.attention(q, k, v)
    grads = samebits.attention_backward(out, q, k, v, out, lse, wanted=(False, True, False))
    assert [g is None for g in grads] == [True, False, True]
    k.requires_grad_()
    (through,) = torch.autograd.grad(samebits.attention(q, k, v)[0], k, out)
    assert same(through, grads[1])


def test_derivatives_that_would_be_wrong_are_refused() -> None:
    q, k, v = (t.requires_grad_() for t in inputs(3, 3))
    out, lse = samebits.attention(q, k, v)
    assert not lse.requires_grad
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda t: samebits.attention(t, k, v)[0], (q.detach(),), (q.detach(),))


@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 4, 4), (2, 0, 4), (2, 4, 0)])
def test_nothing_to_do(batch: int, queries: int, keys: int) -> None:
    q, k, v = (t.requires_grad_() for t in inputs(queries, keys, batch=batch))
    out, lse = samebits.attention(q, k, v)
    assert out.shape == q.shape
    assert lse.shape == (batch, 2, queries)
    assert out.count_nonzero() == 0
    out.sum().backward()
    assert all(t.grad is not None and t.grad.count_nonzero() == 0 for t in (q, k, v))


# --- refusals ---------------------------------------------------------------------------------------------------------

REFUSED = {
    "dtype": (lambda q, k, v: (q.float(), k, v), {}, TypeError, "q has dtype torch.float32, expected torch.bfloat16 or"),
    "mixed": (lambda q, k, v: (q, k.half(), v), {}, TypeError, "they must agree"),
    "no tensor": (lambda q, k, v: (q, [1], v), {}, TypeError, "k must be a torch.Tensor, not list"),
    "axes": (lambda q, k, v: (q[0], k, v), {}, ValueError, r"expected \(B, S_q, H, D\)"),
    "head_dim": (lambda q, k, v: (q[..., :32], k[..., :32], v[..., :32]), {}, ValueError, "D = 32, expected 64 or 128"),
    "stride": (lambda q, k, v: (q, k.repeat(1, 1, 1, 2)[..., ::2], v), {}, ValueError, "stride 2 in its last axis"),
    "heads": (lambda q, k, v: (q[:, :, :1], *(t.repeat(1, 1, 2, 1) for t in (k, v))), {}, ValueError, "multiple of H_kv"),
    "keys": (lambda q, k, v: (q, k, v[:, 1:]), {}, ValueError, "v has shape"),
    "batch": (lambda q, k, v: (q, k.repeat(2, 1, 1, 1), v), {}, ValueError, "k has shape"),
    "device": (lambda q, k, v: (q, k.to("meta"), v), {}, ValueError, "k is on meta, but q is on cpu"),
    "scale": (lambda q, k, v: (q, k, v), {"scale": -1.0}, ValueError, "must be positive"),
    "nan scale": (lambda q, k, v: (q, k, v), {"scale": math.nan}, ValueError, "must be positive"),
    "scale type": (lambda q, k, v: (q, k, v), {"scale": "1"}, TypeError, "scale must be a number"),
    "causal": (lambda q, k, v: (q, k, v), {"causal": 1}, TypeError, "causal must be a bool"),
    "contract": (lambda q, k, v: (q, k, v), {"contract": "fast"}, ValueError, "no contract 'fast'; choose one of 'cudnn'"),
    "backend": (lambda q, k, v: (q, k, v), {"backend": "eager"}, UnsupportedError, "no backend named 'eager'"),
    "no gpu": (lambda q, k, v: (q, k, v), {"backend": "triton"}, UnsupportedError, "needs a CUDA tensor"),
    "no hopper": (lambda q, k, v: (q, k, v), {"backend": "cuda"}, UnsupportedError, "'cuda' needs a CUDA tensor"),
    "bounds dtype": (lambda q, k, v: (q, k, v), {"cu_seqlens": torch.tensor([0.0, 6])}, TypeError, "torch.int32 or"),
    "bounds shape": (lambda q, k, v: (q, k, v), {"cu_seqlens": torch.tensor([6])}, ValueError, r"\(documents \+ 1,\)"),
    "bounds start": (lambda q, k, v: (q, k, v), {"cu_seqlens": torch.tensor([1, 6])}, IndexError, "ascend from 0 to the 6"),
    "bounds end": (lambda q, k, v: (q, k, v), {"cu_seqlens": torch.tensor([0, 7])}, IndexError, "ascend from 0 to the 6"),
    "bounds order": (lambda q, k, v: (q, k, v), {"cu_seqlens": torch.tensor([0, 5, 2, 6])}, IndexError, "ascend"),
    "keys alone": (lambda q, k, v: (q, k, v), {"cu_seqlens_k": torch.tensor([0, 6])}, ValueError, "without cu_seqlens"),
    "documents": (
        lambda q, k, v: (q, k, v),
        {"cu_seqlens": torch.tensor([0, 6]), "cu_seqlens_k": torch.tensor([0, 3, 6])},
        ValueError,
        "cu_seqlens has 1 documents, cu_seqlens_k 2",
    ),
    "key packing": (lambda q, k, v: (q[:, :5], k, v), {"cu_seqlens": torch.tensor([0, 5])}, ValueError, "pass cu_seqlens_k"),
    "packed batch": (
        lambda q, k, v: [t.repeat(2, 1, 1, 1) for t in (q, k, v)],
        {"cu_seqlens": torch.tensor([0, 6])},
        ValueError,
        "q has batch 2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    change, options, kind, message = REFUSED[case]
    tensors = change(*inputs(6, 6))
    with pytest.raises(kind, match=message):
        samebits.attention(*tensors, **options)


@pytest.mark.parametrize(
    ("name", "change", "kind"),
    [
        ("grad_out", lambda t: t[:, :2], ValueError),
        ("grad_out", lambda t: t.float(), TypeError),
        ("out", lambda t: t.to("meta"), ValueError),
        ("lse", lambda t: t.double(), TypeError),
        ("lse", lambda t: t[:, :1], ValueError),
    ],
)
def test_a_backward_refuses(name: str, change: object, kind: type[Exception]) -> None:
    q, k, v = inputs(6, 6)
    out, lse = samebits.attention(q, k, v)
    given = {"grad_out": out, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    given[name] = change(given[name])  # type: ignore[operator]
    with pytest.raises(kind, match=f"attention_backward: {name} "):
        samebits.attention_backward(**given)


# --- kernels ----------------------------------------------------------------------------------------------------------


def test_the_kernels_compute_what_the_reference_does() -> None:
    """In Triton's interpreter, in a process of its own, which keeps what is compiled here from being interpreted."""
    here = Path(__file__)
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(here.parents[2] / "src")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(here.parent / "interpreted.py")],
        capture_output=True, text=True, env=environment, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "8 cases" in done.stdout


def test_every_launch_of_the_cuda_kernels_fits_into_a_multiprocessor() -> None:
    """Shared memory as the H200 has it; of registers, 65536 lie there, and the kernels' own counts are audited."""
    from samebits.runtime.device import H200
    from samebits.sequence_ops.attention import cuda, cuda_backward

    asked = []
    for head_dim in contracts.HEAD_DIMS:
        for recipe in contracts.RECIPES.values():
            for plan in cuda.plans(recipe, head_dim, False, 65, 1):
                asked.append(cuda._launch(recipe, plan, head_dim, False, "bfloat16", False, (7, 4)))
        for plan in cuda_backward.plans(head_dim, False, 65):
            kind = (head_dim, False, "bfloat16", False, (7, 4))
            asked.append(cuda_backward._launch("attention_grad_keys", plan.by_key, *kind))
            asked.append(cuda_backward._launch("attention_grad_queries", plan.by_query, *kind))
    assert max(launch.shared for launch in asked) <= H200.shared_bytes
    assert min(launch.shared for launch in asked) > 64 * 1024
    assert {launch.grid for launch in asked} == {(7, 4)}
    too_much = cuda._launch(contracts.CUDNN, cuda.Plan(3, 4), 128, False, "bfloat16", False, (7, 4))
    assert too_much.shared > H200.shared_bytes, "the bound can fail"


def test_what_the_copy_engine_can_read() -> None:
    """The CUDA kernel refuses the rest, in words, before a launch."""
    from samebits.sequence_ops.attention.hopper import unreadable, unsuited

    q, k, v = inputs(4, 6, batch=2)
    assert unsuited(90, q, k, v) is None
    assert "9.0" in unsuited(100, q, k, v)
    assert "nothing" in unsuited(90, q, k[:, :0], v[:, :0])
    assert unreadable(q, k, v) is None
    assert unreadable(q[:1].expand(1, -1, -1, -1), k, v) is None, "an axis of one element has no stride that counts"
    assert "multiples of 16 bytes" in unreadable(torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape), k, v)
    assert "multiples of 16 bytes" in unreadable(q, torch.empty(2, 6, 1, 68, dtype=q.dtype)[..., :64], v)
    assert "expanded" in unreadable(q, k, v[:1].expand(2, -1, -1, -1))


def test_boxes_hold_the_rows_of_one_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any strides: lines of 64 elements, the axes in the order in which the kernels count them."""
    from samebits.sequence_ops.attention import hopper

    monkeypatch.setattr(hopper, "tensor_map", lambda view, box: (view, box))
    for tensor in (
        inputs(5, 5, 3, 3, 128, 2)[0],
        inputs(5, 5, 3, 3, 128, 2)[0].transpose(1, 2),
        inputs(5, 5, 3)[0][:, 1:2],
    ):
        view, box = hopper.boxes(tensor, 96)
        lines = tensor.shape[3] // 64
        assert torch.equal(view, tensor.permute(0, 2, 3, 1).unflatten(2, (lines, 64)).transpose(3, 4))
        assert box == (1, 1, lines, 96, 64)
        assert all(stride % 8 == 0 for stride in view.stride()[:-1])
        assert view.stride(-1) == 1


def test_what_the_cuda_kernels_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grids, boxes, bounds, sizes and numbers as the kernels' parameters name them, in their order."""
    from samebits.sequence_ops.attention import cuda, cuda_backward, hopper

    found = []
    monkeypatch.setattr(hopper, "tensor_map", lambda view, box: ("map", tuple(view.shape), box[3]))
    monkeypatch.setattr(cuda_backward, "delta_of", lambda problem, out, grad_out, lse: lse)
    for module in (cuda, cuda_backward):
        monkeypatch.setattr(module, "launch", lambda *arguments: found.append(arguments))
    q, k, v = inputs(300, 500, 6, 2, 128, 2)
    problem = op.check("attention", q, k, v, None, None, 0.5, "fa2")
    plan, few = cuda.plans(contracts.FA2, 128, True, 300, 3)
    out, lse = cuda.forward(problem, contracts.FA2, plan, q, k, v, None, None, True, 0.5)
    backward = cuda_backward.SMALL
    cuda_backward.backward(problem, backward, q, k, v, out, lse, q, None, None, True, 0.5, (True, True))
    forward, by_key, by_query = found
    of_q, of_k = ("map", (2, 6, 2, 300, 64)), ("map", (2, 2, 2, 500, 64))

    def fp64(word: int) -> float:
        return struct.unpack("d", struct.pack("q", word))[0]

    def fp32(word: int) -> float:
        return struct.unpack("f", struct.pack("i", word))[0]

    numbers = [contracts.exponent_scale(0.5), 0.5]
    assert forward[0].grid == (2 * 3, 6)
    assert forward[1:4] == ((*of_q, 128), (*of_k, 64), (*of_k, 64))
    assert forward[4] is out
    assert forward[5] is lse
    assert forward[6:13] == (0, 0, 2, 300, 500, 6, 3)
    assert [fp64(word) for word in forward[13:]] == [*numbers, contracts.LN_2]
    assert by_key[0].grid == (2 * 4, 2)
    assert by_key[1:5] == ((*of_q, 64), (*of_k, 128), (*of_k, 128), (*of_q, 64))
    assert by_query[0].grid == (2 * 3, 6)
    assert by_query[1:5] == ((*of_q, 128), (*of_k, 64), (*of_k, 64), (*of_q, 128))
    for arguments, results in ((by_key, [k.shape] * 2), (by_query, [q.shape])):
        assert arguments[5] is arguments[6] is lse
        assert [t.shape for t in arguments[7:-10]] == results
        assert arguments[-10:-3] == (0, 0, 2, 300, 500, 6, 3)
        assert [fp32(word) for word in arguments[-3:]] == [*numbers, contracts.LOG2_E]

    found.clear()  # few queries: 21 of three heads are 63 rows
    cuda.forward(problem, contracts.FA2, few, q, k, v, None, None, True, 0.5)
    assert found[0][0].grid == (2 * 15, 2)
    assert found[0][1] == ("map", (2, 2, 300, 6, 64), 3)

    found.clear()  # packed: the kernels find a tile's document, so its bounds are all that they get
    q, k, v = inputs(300, 500, 6, 2, 128)
    cu_q, cu_k = torch.tensor([0, 1, 300]), torch.tensor([0, 0, 500])
    problem = op.check("attention", q, k, v, cu_q, cu_k, 0.5, "fa2")
    cuda.forward(problem, contracts.FA2, plan, q, k, v, cu_q, cu_k, True, 0.5)
    cuda_backward.backward(problem, backward, q, k, v, out, lse, q, cu_q, cu_k, True, 0.5, (True, True))
    assert [arguments[0].grid for arguments in found] == [(2 + 2, 6), (3 + 2, 2), (2 + 2, 6)]
    for arguments, at in zip(found, (6, 9, 8), strict=True):
        assert arguments[at] is cu_q
        assert arguments[at + 1] is cu_k
        assert arguments[at + 2 : at + 7] == (2, 300, 500, 6, 3)


def test_the_tiles_of_documents_have_room() -> None:
    """Document d works in the programs from bounds[d] // tile + d on: never more than there are, whatever the bounds."""
    generator = torch.Generator().manual_seed(5)
    for tile in (21, 64, 128, 192):
        for _ in range(50):
            lengths = torch.randint(0, 3 * tile, (7,), generator=generator) * torch.randint(
                0, 2, (7,), generator=generator
            )
            bounds = [0, *lengths.cumsum(0).tolist()]
            problem = Problem(1, bounds[-1], bounds[-1], 2, 2, 64, True, len(lengths))
            starts = [bound // tile + d for d, bound in enumerate(bounds)]
            assert all(b - a >= -(-int(n) // tile) for a, b, n in zip(starts, starts[1:], lengths, strict=False))
            assert problem.programs(bounds[-1], tile) == starts[-1]
    assert Problem(3, 130, 1, 2, 2, 64, False, 3).programs(130, 128) == 3 * 2


def test_which_kernel_runs_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op.devices, "info", lambda device: DeviceInfo("cuda", 90))
    monkeypatch.setattr(op.devices, "missing", lambda backend: None)
    monkeypatch.setattr(op, "_told", set())

    def backend(asked: str | None, *tensors: Tensor) -> str:
        return chosen(asked, *tensors).choice.backend

    many, few = inputs(65, 65), inputs(64, 65)
    assert backend(None, *many) == backend("cuda", *many) == backend("cuda", *few) == "cuda"
    assert backend(None, *few) == "cuda"
    assert chosen(None, *few).choice.plan.groups == 1
    assert chosen(None, *many).choice.plan.groups == 2
    assert chosen(None, *few, backward=True).choice.backend == backend("triton", *many) == "triton"
    shared = (
        torch.empty(1, 3, 65, 64, dtype=torch.half),
        *(torch.empty(1, 3, 1, 64, dtype=torch.half) for _ in range(2)),
    )
    assert backend(None, *shared) == "triton", "a tile has no room for the heads of a group"
    odd = (many[0], *(torch.empty(1, 65, 1, 68, dtype=t.dtype)[..., :64] for t in many[1:]))
    with pytest.warns(UserWarning, match="slower backend 'triton': the copy engine"):
        assert backend(None, *odd) == "triton"
    with pytest.raises(UnsupportedError, match="do not take this call: the copy engine"):
        backend("cuda", *odd)
    with samebits.policy("strict"), pytest.raises(UnsupportedError, match="policy 'strict' forbids this call"):
        backend(None, *odd)
    with samebits.policy("strict"):
        assert chosen(None, *few, backward=True).choice.backend == "triton", "as a matter of course"


def test_every_forced_plan_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what an observer and ``explain`` see: the sizes, the contract, who was passed over."""
    from samebits.sequence_ops.attention import cuda_backward

    monkeypatch.setattr(op.devices, "info", lambda device: DeviceInfo("cuda", 90))
    monkeypatch.setattr(op.devices, "missing", lambda backend: None)
    for backend, backward, count in (("cuda", False, 2), ("cuda", True, 2), ("triton", False, 2), ("triton", True, 3)):
        found = []
        for index in range(count + 1):
            with samebits.force_plan(index):
                found.append(chosen(backend, *inputs(65, 70, 4, 2), backward=backward))
        assert len({decision.choice.plan for decision in found}) == count
        assert found[0].choice.plan == found[-1].choice.plan
        assert dict(found[0].call.sizes) == {"B": 1, "S_q": 65, "S_k": 70, "H": 4, "H_kv": 2, "D": 64}
    for head_dim, causal, few, many in ((128, False, 4607, 4608), (128, True, 3071, 3072), (64, True, 9, None)):
        small, large = cuda_backward.plans(head_dim, causal, few)
        assert many is None or cuda_backward.plans(head_dim, causal, many) == (large, small)
    small = chosen(None, *inputs(3, 70), backward=True)
    assert "up to 64 queries" in small.choice.rejected[0]


# --- on a GPU ---------------------------------------------------------------------------------------------------------


def test_what_may_be_read_sixteen_bytes_at_a_time() -> None:
    from samebits.sequence_ops.attention.triton import aligned

    q, _, _ = inputs(4, 4)
    assert aligned(q)
    assert not aligned(q, torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape))
    assert not aligned(torch.empty(1, 4, 2, 68, dtype=q.dtype)[..., :64])
    assert not aligned(torch.empty_strided((1, 1, 1, 64), (68, 68, 64, 1), dtype=q.dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.bfloat16, 128), (torch.bfloat16, 64), (torch.float16, 128)])
def test_every_plan_gives_the_bits_of_the_reference(
    contract: str, causal: bool, dtype: torch.dtype, head_dim: int
) -> None:
    for queries, keys, batch, bounds in ((1, 300, 2, None), (37, 130, 1, None), (200, 200, 1, (0, 5, 5, 140, 200))):
        q, k, v = inputs(queries, keys, 4, 2, head_dim, batch, dtype, device="cuda")
        grad = torch.randn_like(q)
        cu = None if bounds is None else torch.tensor(bounds, device="cuda")
        options = {"causal": causal, "contract": contract, "cu_seqlens": cu}
        out, lse = samebits.attention(q, k, v, backend="reference", **options)
        gradients = samebits.attention_backward(grad, q, k, v, out, lse, backend="reference", **options)
        for plan in range(3):
            with samebits.force_plan(plan):
                for backend in ("cuda", "triton"):
                    found, found_lse = samebits.attention(q, k, v, backend=backend, **options)
                    results = samebits.attention_backward(grad, q, k, v, out, lse, backend=backend, **options)
                    assert same(found, out)
                    assert same(found_lse, lse)
                    assert all(map(same, results, gradients))


@pytest.mark.gpu
@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.bfloat16, 128), (torch.bfloat16, 64), (torch.float16, 128)])
def test_both_kernels_have_the_same_bits(contract: str, causal: bool, dtype: torch.dtype, head_dim: int) -> None:
    """Every plan of the CUDA kernel, at sizes around its tiles and blocks: the choice between kernels touches no bit."""
    sizes = (1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 256, 385, 1000)
    shapes = [(s, s, 4, 4, 1) for s in sizes] + [(s, 1, 2, 1, 2) for s in (1, 130)] + [(1, s, 2, 1, 2) for s in sizes]
    shapes += [(100, 1000, 6, 2, 2), (1000, 100, 6, 2, 2), (300, 4000, 8, 1, 1), (2050, 2050, 3, 3, 3)]
    shapes += [(s, 700, 14, 2, 2) for s in (1, 9, 10)] + [(1, 700, 64, 1, 1)]  # seven heads, and all rows of a tile
    for queries, keys, heads, kv_heads, batch in shapes:
        q, k, v = inputs(queries, keys, heads, kv_heads, head_dim, batch, dtype, seed=queries, device="cuda")
        options = {"causal": causal, "contract": contract}
        grad = torch.randn_like(q)
        expected = samebits.attention(q, k, v, backend="triton", **options)
        gradients = samebits.attention_backward(grad, q, k, v, *expected, backend="triton", **options)
        for plan in range(3):
            with samebits.force_plan(plan):
                found = samebits.attention(q, k, v, backend="cuda", **options)
                results = samebits.attention_backward(grad, q, k, v, *expected, backend="cuda", **options)
            assert all(map(same, found, expected)), (queries, keys, heads, kv_heads, batch, plan)
            assert all(map(same, results, gradients)), (queries, keys, heads, kv_heads, batch, plan)


@pytest.mark.gpu
@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("causal", [False, True])
def test_other_documents_are_never_read(contract: str, causal: bool) -> None:
    """H6: infinities and NaN in the neighbours: a document keeps the bits that it has alone."""
    bounds_q, bounds_k = (0, 100, 100, 330, 400), (0, 70, 80, 410, 700)
    q, k, v = inputs(400, 700, 4, 2, 128, device="cuda")
    grad = torch.randn_like(q)
    cu, cu_k = (torch.tensor(bounds, device="cuda") for bounds in (bounds_q, bounds_k))
    packing = {"cu_seqlens": cu, "cu_seqlens_k": cu_k}
    for i, (own_q, own_k) in enumerate(zip(pairwise(bounds_q), pairwise(bounds_k), strict=True)):
        places = (own_q, own_q, own_k, own_k)
        tensors = [torch.full_like(t, fill) for t, fill in zip((grad, q, k, v), WILD, strict=True)]
        for tensor, own, at in zip(tensors, (grad, q, k, v), places, strict=True):
            tensor[:, slice(*at)] = own[:, slice(*at)]
        own_grad, *own = [t[:, slice(*at)] for t, at in zip((grad, q, k, v), places, strict=True)]
        for backend, plan in (("cuda", 0), ("cuda", 1), ("cuda", 2), ("triton", 0), ("triton", 1)):
            options = {"causal": causal, "contract": contract, "backend": backend}
            with samebits.force_plan(plan):
                out, lse = samebits.attention(*tensors[1:], **packing, **options)
                gradients = samebits.attention_backward(*tensors, out, lse, **packing, **options)
            options["backend"] = "triton"
            alone, alone_lse = samebits.attention(*own, **options)
            results = samebits.attention_backward(own_grad, *own, alone, alone_lse, **options)
            assert same(out[:, slice(*own_q)], alone), (i, backend, plan)
            assert same(lse[:, :, slice(*own_q)], alone_lse), (i, backend, plan)
            for ours, theirs, at in zip(gradients, results, (own_q, own_k, own_k), strict=True):
                assert same(ours[:, slice(*at)], theirs), (i, backend, plan)


WILD = (math.nan, math.nan, math.inf, -math.inf)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_many_documents_find_their_tiles(causal: bool) -> None:
    """More than a warp compares at once, and than it compares in two rounds; each kernel searches in its own way."""
    for count in (33, 1100):
        lengths = torch.randint(0, 12, (count,), generator=torch.Generator().manual_seed(count))
        lengths[count // 2] = 300
        cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        q, k, v = inputs(int(cu[-1]), int(cu[-1]), 4, 2, 64, device="cuda")
        packing = {"cu_seqlens": cu.to("cuda"), "causal": causal}
        expected = samebits.attention(q, k, v, backend="triton", **packing)
        gradients = samebits.attention_backward(q, q, k, v, *expected, backend="triton", **packing)
        for plan in range(2):
            with samebits.force_plan(plan):
                assert all(map(same, samebits.attention(q, k, v, backend="cuda", **packing), expected))
                found = samebits.attention_backward(q, q, k, v, *expected, backend="cuda", **packing)
            assert all(map(same, found, gradients))
        for document in (0, 1, count // 2, count - 1):
            at = slice(int(cu[document]), int(cu[document + 1]))
            if at.stop > at.start:
                alone = samebits.attention(q[:, at], k[:, at], v[:, at], causal=causal, backend="triton")
                assert same(expected[0][:, at], alone[0]), document


@pytest.mark.gpu
def test_the_cuda_kernel_reads_strided_tensors_in_place() -> None:
    q, k, v = inputs(200, 200, 2, 2, 128, 2, device="cuda")
    out, lse = samebits.attention(q, k, v, backend="cuda")
    for tensors in (
        torch.cat([q, k, v], 2).split(2, 2),
        [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)],
    ):
        found, found_lse = samebits.attention(*tensors, backend="cuda")
        assert same(found, out)
        assert same(found_lse, lse)


@pytest.mark.gpu
@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_bits_of_the_library(contract: str, causal: bool, head_dim: int, dtype: torch.dtype) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}[contract]
    for length, kv_heads in ((16, 56), (128, 56), (264, 56), (264, 8), (925, 56), (925, 8), (3160, 56)):
        # With few heads FlashAttention-2 splits the keys, and leaves the bits of its own one pass.
        q, k, v = inputs(length, length, 56, kv_heads, head_dim, dtype=dtype, device="cuda")
        with sdpa_kernel(backend):
            theirs = torch.nn.functional.scaled_dot_product_attention(
                *(t.transpose(1, 2) for t in (q, k, v)), is_causal=causal, enable_gqa=kv_heads != 56
            )
        ours, _ = samebits.attention(q, k, v, causal=causal, contract=contract)
        assert same(ours, theirs.transpose(1, 2)), (length, kv_heads)


def test_the_record_of_the_libraries_says_what_the_page_says() -> None:
    """Where ``cudnn`` and ``fa2`` were seen to have the bits of their libraries, and where those run other kernels."""
    record = json.loads((ROOT / "benchmarks" / "results" / "attention_libraries.json").read_text())
    seen = {(c["dtype"], c["D"], c["causal"], c["Hk"]) for c in record["cases"] if c["Sq"] == c["Sk"]}
    assert len(seen) == 16, "both dtypes, head dimensions, masks and numbers of key heads"
    for case in record["cases"]:
        assert (case["cudnn"] == 0) == (case["Sq"] > 1), case
        assert (case["fa2"] == 0) == (case["Sq"] > 8), case  # it splits the keys of few queries


@pytest.mark.gpu
def test_a_graph_replays_the_bits_without_a_wait() -> None:
    q, k, v = inputs(300, 300, device="cuda")
    cu = torch.tensor([0, 100, 300], device="cuda")
    expected = samebits.attention(q, k, v, causal=True, cu_seqlens=cu)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = samebits.attention(q, k, v, causal=True, cu_seqlens=cu)
    out.zero_()
    graph.replay()
    assert same(out, expected[0])
    assert same(lse, expected[1])
