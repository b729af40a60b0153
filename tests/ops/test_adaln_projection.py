"""``adaln_projection``: everything an operator must do, its orders, probes and plans."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import samebits
from samebits import adaln_projection, adaln_projection_backward, dispatch, registry
from samebits.dispatch import UnsupportedError
from samebits.exact import elementary, tensor_core
from samebits.exact.bits import bits
from samebits.exact.fma import fma
from samebits.ops.adaln_projection import cuda, golden, reference
from samebits.runtime import sweep
from samebits.runtime.device import H200
from samebits.verify import inputs
from samebits.verify.conformance import Conformance

CONTRACTS = ("kchain", "fma")
HALVES = (torch.bfloat16, torch.float16)
GPU = pytest.mark.gpu


class TestAdalnProjection(Conformance):
    op = "adaln_projection"
    width = 40
    held: ClassVar = {"N": 24}
    cpu_patterns: ClassVar = ("normal", "wide", "nan", "huge")
    batch_sizes: ClassVar = ((0, 1, 3, 4, 5, 8, 9, 33, 65, 133), (0, 1, 9))
    odd_widths: ClassVar = ((1, 17, 136, 264), (17, 72))
    wide_patterns: ClassVar = (("normal", "cancelling"), ("normal",))
    wide_widths: ClassVar = (520,)
    accuracy_widths: ClassVar = ((1, 17, 136, 1000), (1, 136))
    very_wide_widths: ClassVar = ((2688, 4097, 16384), (1025,))

    def _many_values(self, metafunc: pytest.Metafunc) -> Sequence[int]:
        return (131073,)


# --- tools ------------------------------------------------------------------------------------------------------------


def _drawn(rows: int, outputs: int, size: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "temb": 2 * normal(rows, size),
        "weight": (normal(outputs, size) * size**-0.5).to(dtype),
        "bias": (0.1 * normal(outputs)).to(dtype),
        "grad": normal(rows, outputs),
    }


def _same(left: Tensor | None, right: Tensor | None) -> bool:
    assert left is not None and right is not None
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(bits(left), bits(right))


def _table(given: dict[str, Tensor], contract: str | None = None, **options: Any) -> Tensor:
    return adaln_projection(given["temb"], given["weight"], given["bias"], contract=contract, **options)


def _gradients(given: dict[str, Tensor], **options: Any) -> tuple[Tensor | None, ...]:
    return adaln_projection_backward(given["grad"], given["temb"], given["weight"], **options)


# --- orders -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_kchain_is_one_chain_then_the_bias(dtype: torch.dtype) -> None:
    given = _drawn(3, 5, 40, dtype)
    act = (given["temb"] / (1 + torch.exp(-given["temb"]))).to(dtype)
    acc = torch.zeros(3, 5)
    for d in range(0, 40, 16):  # one step of the unit at a time; the last is half empty
        acc = tensor_core.chain(act[:, d : d + 16], given["weight"][:, d : d + 16], acc)
    assert _same(_table(given, "kchain"), (acc + given["bias"].float()).to(dtype))


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("size", [7, 300])
def test_fma_spelled_out(size: int, dtype: torch.dtype) -> None:
    given = _drawn(2, 3, size, dtype)
    act = (given["temb"] / (1 + torch.exp(-given["temb"]))).to(dtype).float()
    weight = given["weight"].float()
    table = _table(given, "fma")
    for t in range(2):
        for n in range(3):
            lanes = [torch.zeros(()) for _ in range(32)]
            for d in range(size):
                lane = d // 8 % 32
                lanes[lane] = fma(act[t, d], weight[n, d], lanes[lane])
            while len(lanes) > 1:
                half = len(lanes) // 2
                lanes = [lanes[u] + lanes[u + half] for u in range(half)]
            assert _same(table[t, n], (lanes[0] + given["bias"][n].float()).to(dtype))


def test_gradients_in_another_language() -> None:
    """Every sum again, one NumPy number at a time; the fused product by way of FP64, exact for these short significands."""
    given = _drawn(3, 1100, 2)
    given["grad"] = given["grad"].bfloat16().float()
    grad_temb, grad_weight, grad_bias = _gradients(given)
    act = reference.activation(given["temb"], torch.bfloat16).float().numpy()
    g, w, x = given["grad"].numpy(), given["weight"].float().numpy(), given["temb"].numpy()
    gate, zero, one = elementary.sigmoid(given["temb"]).numpy(), np.float32(0), np.float32(1)
    assert grad_temb is not None and grad_weight is not None and grad_bias is not None
    for t in range(3):
        for d in range(2):
            total = zero
            for first in range(0, 1100, 512):
                partial = zero
                for begin in range(first, min(first + 512, 1100), 64):
                    chain = zero
                    for n in range(begin, min(begin + 64, 1100)):
                        chain = np.float32(np.float64(g[t, n]) * np.float64(w[n, d]) + np.float64(chain))
                    partial = partial + chain
                total = total + partial
            s, value = gate[t, d], x[t, d]
            assert (total * s) * (one + value * (one - s)) == grad_temb[t, d].item()
    for n in (0, 511, 1099):
        assert (zero + g[0, n] + g[1, n]) + g[2, n] == grad_bias[n].item()
        for d in range(2):
            terms = [g[t, n] * act[t, d] for t in range(3)]
            assert (zero + terms[0] + terms[1]) + terms[2] == grad_weight[n, d].item()


def test_the_backward_is_the_same_under_both_contracts() -> None:
    given = _drawn(5, 70, 24)
    for one, other in zip(_gradients(given, contract="kchain"), _gradients(given, contract="fma"), strict=True):
        assert _same(one, other)


def test_shards_of_the_outputs_have_the_bits_of_the_whole() -> None:
    """Tensor-parallel ranks own multiples of 512 outputs: the table is theirs, and grad_temb folds their partials in order."""
    given = _drawn(2, 1024, 24)
    halves = [dict(given, **{k: given[k][part] for k in ("weight", "bias")}) for part in (slice(512), slice(512, None))]
    for contract in CONTRACTS:
        assert _same(_table(given, contract), torch.cat([_table(half, contract) for half in halves], -1))
    one, two = (
        reference.backward_activation(given["grad"][:, s], given["weight"][s]) for s in (slice(512), slice(512, None))
    )
    assert _same(one + two, reference.backward_activation(given["grad"], given["weight"]))


# --- probes -----------------------------------------------------------------------------------------------------------


def test_an_early_cast_of_the_embedding_is_refused_and_would_show() -> None:
    """H7: temb stays FP32 until after its SiLU."""
    given = _drawn(3, 36, 64)
    for contract in CONTRACTS:
        with pytest.raises(TypeError, match=r"temb has dtype torch\.bfloat16, expected torch\.float32"):
            adaln_projection(given["temb"].bfloat16(), given["weight"], given["bias"], contract=contract)
        early = _table(given | {"temb": given["temb"].bfloat16().float()}, contract)
        assert (early != _table(given, contract)).float().mean() > 0.2


@pytest.mark.parametrize("contract", CONTRACTS)
def test_every_output_is_that_of_its_own_row_of_the_weight(contract: str) -> None:
    """H4: channel o = modality * 6 H + chunk * H + h. Outputs that change places change places, and nothing else."""
    given = _drawn(3, 18 * 4, 40)
    table = _table(given, contract)
    order = torch.randperm(18 * 4, generator=torch.Generator().manual_seed(1))
    moved = given | {"weight": given["weight"][order], "bias": given["bias"][order]}
    assert _same(_table(moved, contract), table[:, order].contiguous())
    assert len({tuple(column.tolist()) for column in table.T}) > 18 * 4 - 3


def test_the_silu_that_is_rounded_is_the_fp32_one() -> None:
    """The golden and the contract agree on what is cast; an FP64 SiLU rounded to BF16 differs somewhere."""
    temb = inputs.row_tensor("adaln-test/temb", range(64), (4096,), torch.float32)
    ours = reference.activation(temb, torch.bfloat16)
    wide = temb.double()
    once = (wide * torch.special.expit(wide)).bfloat16()
    stored = golden._stored(temb, ours).bfloat16()
    assert (ours != stored).sum() <= (ours != once).sum()
    assert (ours != stored).float().mean() < 1e-4


# --- refusals and edges -----------------------------------------------------------------------------------------------


def test_what_is_refused() -> None:
    given = _drawn(3, 36, 16)
    temb, weight, bias = given["temb"], given["weight"], given["bias"]
    with pytest.raises(TypeError, match=r"bias has dtype torch\.float32, but weight has torch\.bfloat16"):
        adaln_projection(temb, weight, bias.float(), contract="fma")
    with pytest.raises(ValueError, match="weight: N = 0 is outside"):
        adaln_projection(temb, weight[:0], bias[:0])
    with pytest.raises(ValueError, match=r"temb: D = 0 is outside"):
        adaln_projection(temb[:, :0], weight[:, :0], bias)
    with pytest.raises(ValueError, match="bias has N = 35, but weight has N = 36"):
        adaln_projection(temb, weight, bias[:35])
    with pytest.raises(TypeError, match="under contract 'kchain'"):
        adaln_projection(temb, weight.float(), bias.float(), contract="kchain")
    with pytest.raises(TypeError, match=r"must be a torch\.Tensor"):
        adaln_projection(temb, None, bias)


def test_the_contract_follows_the_weight() -> None:
    for dtype, contract in ((torch.float32, "fma"), (torch.bfloat16, "kchain"), (torch.float16, "kchain")):
        given = _drawn(2, 36, 300, dtype)
        assert _same(_table(given), _table(given, contract))
        for one, other in zip(_gradients(given), _gradients(given, contract=contract), strict=True):
            assert _same(one, other)


@pytest.mark.parametrize("contract", CONTRACTS)
def test_zero_and_overflow(contract: str) -> None:
    """The table is never -0; what a tensor core overflows to is NaN, whichever infinity it would be."""
    temb, weight = torch.full((1, 16), 88.0), torch.full((2, 16), -0.0).bfloat16()
    bias = torch.full((2,), -0.0).bfloat16()
    assert not bits(adaln_projection(temb, weight, bias, contract=contract)).any()
    huge = adaln_projection(torch.full((1, 16), 3e38), torch.full((2, 16), 3e38).bfloat16(), bias, contract=contract)
    assert (huge.isnan() if contract == "kchain" else huge == float("inf")).all()


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_an_upstream_gradient_of_any_dtype_is_its_value(dtype: torch.dtype) -> None:
    given = _drawn(3, 36, 24)
    rounded = given["grad"].to(dtype)
    for one, other in zip(
        adaln_projection_backward(rounded, given["temb"], given["weight"]),
        adaln_projection_backward(rounded.float(), given["temb"], given["weight"]),
        strict=True,
    ):
        assert _same(one, other)


def test_gradients_of_the_table_are_as_good_as_fp32() -> None:
    given = _drawn(4, 600, 96)
    known = {"grad_table": given["grad"], "temb": given["temb"], "weight": given["weight"]}
    exact = golden.backward(known, {})
    for name, value in zip(("grad_temb", "grad_weight", "grad_bias"), _gradients(given), strict=True):
        assert value is not None
        error = (value.double() - exact[name]).abs().max() / exact[name].abs().max()
        assert error < 1e-6, (name, error)


# --- plans ------------------------------------------------------------------------------------------------------------


def test_other_tensor_cores_are_refused() -> None:
    for arch in (80, 89, 100):
        device = dataclasses.replace(H200, arch=arch)
        for call in sweep.calls(registry.spec("adaln_projection"), device, rows=(1,)):
            why = cuda.refuses(call)
            assert (why is not None) == (call.contract == "kchain")
            assert why is None or ("9.0" in why and str(arch / 10) in why and "'fma'" in why)
    for call in sweep.calls(registry.spec("adaln_projection"), H200, rows=(1,)):
        assert cuda.refuses(call) is None


@pytest.mark.parametrize("rows", [1, 4, 9, 65, 2048])
def test_launches_cover_everything(rows: int) -> None:
    # D6
    for call in sweep.calls(registry.spec("adaln_projection"), H200, rows=(rows,)):
        outputs, size = call.size("N"), call.size("D")
        for plan in cuda.plans(call):
            steps = {step.kernel.entry: (step, dict(step.kernel.defines)) for step in plan}
            assert call.backward or set(steps) == {"activation", f"table_{call.contract}"}
            if "activation" in steps:
                padded, pitch, _, wide = steps["activation"][0].arguments
                assert padded >= rows and pitch >= size and pitch % 8 == 0 and bool(wide) == call.backward
            if "table_kchain" in steps:
                step, macros = steps["table_kchain"]
                steps_of, outputs_of = 8 * macros["NT"], 16 * macros["MT"] * macros["WARPS"]
                assert padded % steps_of == 0 and pitch % 64 == 0 and step.block == 32 * macros["WARPS"]
                assert step.grid == -(-rows // steps_of) * -(-outputs // outputs_of)
                assert step.shared == macros["STAGES"] * 128 * (steps_of + outputs_of)
            if "table_fma" in steps:
                step, macros = steps["table_fma"]
                assert padded % macros["ROWS"] == 0
                assert isinstance(step.grid, int)
                assert 0 <= step.grid * 4 - -(-rows // macros["ROWS"]) * -(-outputs // 4) < 4
            for entry, tile in (("grad_weight_few", 32), ("grad_weight_many", 8)):
                if entry in steps:
                    step, _ = steps[entry]
                    assert entry.endswith("many") or (rows <= 4 and padded == 4)
                    columns = -(-size // (8 * step.block))
                    assert step.grid == columns * -(-outputs // tile) and step.block <= 384
            if "grad_act" in steps:
                step, macros = steps["grad_act"]
                slab = min(rows, cuda.SLAB)
                assert step.grid == -(-outputs // 512) * -(-size // 256) * -(-slab // macros["ROWS"])
                assert step.shared == 4 * macros["ROWS"] * (512 + 8 * 256)
                assert isinstance(steps["grad_temb"][0].grid, int) and steps["grad_temb"][0].grid * 128 >= slab * size


def test_only_what_is_wanted_is_launched() -> None:
    kernels = {
        "grad_temb": {"grad_act", "grad_temb"},
        "grad_weight": {"activation", "grad_weight_few"},
        "grad_bias": {"grad_bias"},
    }
    call = next(c for c in sweep.calls(registry.spec("adaln_projection"), H200, rows=(3,)) if c.backward)
    for wanted in (("grad_temb",), ("grad_weight",), ("grad_bias",), ("grad_weight", "grad_bias"), tuple(kernels)):
        plan = cuda.plans(dataclasses.replace(call, wanted=wanted))[0]
        assert {step.kernel.entry for step in plan} == set().union(*(kernels[name] for name in wanted))


# --- on a GPU ---------------------------------------------------------------------------------------------------------


def _on_gpu(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.cuda() for name, value in given.items()}


@GPU
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("outputs", [1, 18, 129, 600])
def test_every_plan_has_the_bits_of_the_reference(outputs: int, dtype: torch.dtype) -> None:
    for rows, size in ((1, 64), (4, 33), (5, 136), (70, 88)):
        given = _on_gpu(_drawn(rows, outputs, size, dtype))
        for contract in CONTRACTS:
            expected = _table(given, contract, backend="reference")
            grads = _gradients(given, contract=contract, backend="reference")
            for index in range(5):
                with dispatch.force_plan(index):
                    assert _same(expected, _table(given, contract, backend="cuda")), (rows, size, contract, index)
                    got = _gradients(given, contract=contract, backend="cuda")
                    assert all(map(_same, grads, got)), (rows, size, contract, index)


@GPU
@pytest.mark.parametrize("outputs", [96768, 10752])
def test_kchain_is_cublas(outputs: int) -> None:
    """On Hopper one bit class serves the library at these shapes, which is an observation of cuBLAS and no promise of ours."""
    generator = torch.Generator("cuda").manual_seed(0)
    weight = torch.randn(outputs, 2688, generator=generator, device="cuda").mul_(2688**-0.5).bfloat16()
    bias = torch.randn(outputs, generator=generator, device="cuda").bfloat16()
    temb = torch.randn(64, 2688, generator=generator, device="cuda") * 2
    differing = {}
    for rows in (1, 2, 3, 4, 16, 64):
        table = adaln_projection(temb[:rows], weight, bias, contract="kchain", backend="cuda")
        theirs = F.linear(F.silu(temb[:rows]).bfloat16(), weight, bias)
        differing[rows] = int((bits(table) != bits(theirs)).sum())
    assert not any(differing.values()), differing


@GPU
def test_a_misaligned_weight_is_read_in_place() -> None:
    given = _on_gpu(_drawn(3, 40, 64))
    wide = torch.zeros(40, 100, dtype=torch.bfloat16, device="cuda")
    for offset in (1, 8):
        view = wide[:, offset : offset + 64]
        view.copy_(given["weight"])
        for contract in CONTRACTS:
            assert (
                samebits.explain("adaln_projection", given["temb"], view, given["bias"], contract=contract).copies == ()
            )
            assert _same(_table(given, contract), _table(given | {"weight": view}, contract))


@GPU
def test_other_architectures_have_the_fma_contract() -> None:
    given = _on_gpu(_drawn(3, 40, 64))
    if torch.cuda.get_device_capability() == (9, 0):
        assert (
            samebits.explain("adaln_projection", *(given[n] for n in ("temb", "weight", "bias"))).choice.backend
            == "cuda"
        )
    else:
        with pytest.raises(UnsupportedError, match="have not been shown to share"):
            _table(given, "kchain", backend="cuda")
    assert _table(given, "fma", backend="cuda").shape == (3, 40)
