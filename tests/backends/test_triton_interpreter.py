"""The Triton kernels under Triton's interpreter: tiles, masks, strides and summation orders, against the references.

The interpreter truncates where a GPU rounds to BF16, so FP32 results are compared bit for bit and BF16 results against
the truncated FP32 formula. It cannot run inline PTX: the product becomes a plain one (which is never
contracted here), and rsqrt the identity on both sides.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")


def test_every_plan_gives_the_bits_of_the_reference() -> None:
    done = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("compared\n")


# --- below: what the subprocess runs ----------------------------------------------------------------------------------


def same_bits(found: Tensor, expected: Tensor) -> bool:
    integer = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[found.dtype]
    return found.dtype == expected.dtype and torch.equal(found.view(integer), expected.view(integer))


def truncated(wide: Tensor) -> Tensor:
    """FP32 to BF16 as the interpreter does it."""
    return (wide.contiguous().view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)


def views(shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[Tensor]:
    """The same kind of tensor dense, with gaps between the rows at an odd offset, and with all rows in one place."""
    yield torch.randn(shape).to(dtype)
    wide = torch.full((*shape[:-1], shape[-1] + 3), float("nan"), dtype=dtype)
    wide[..., 1 : 1 + shape[-1]] = torch.randn(shape).to(dtype)
    yield wide[..., 1 : 1 + shape[-1]]
    yield torch.randn(shape[1:]).to(dtype).expand(shape)


def run_all(name: str, backward: bool, tensors: list[Tensor | None], **options: Any) -> Iterator[dict[str, Tensor]]:
    """The results of every plan, with whatever the kernels leave unwritten showing as NaN."""
    from samebits.dispatch import Call
    from samebits.operator import explain

    ready = explain(name, *tensors, backward=backward, backend="reference", **options)
    module = __import__(f"samebits.ops.{name}.triton", fromlist=["run"])
    call: Call = ready.call
    from samebits import registry

    spec = registry.operator(name).spec
    for plan in module.plans(call):
        results = {}
        for result in spec.direction(backward).results:
            if result.name in call.wanted:
                shape = ((call.rows,) if result.rows else ()) + tuple(ready.shapes.sizes[axis] for axis in result.axes)
                dtype = torch.bfloat16 if result.dtype == "bfloat16" else torch.float32
                results[result.name] = torch.full(shape, float("nan"), dtype=dtype)
        module.run(call, plan, ready.inputs, results, {"eps": options.get("eps", 1e-6)})
        yield results


def compare_h_aggregate() -> int:
    from samebits.exact import fold
    from samebits.ops.h_aggregate import reference
    from samebits.ops.h_aggregate import triton as backend

    backend.product = lambda a, b: a * b
    compared = 0
    for rows, width in ((1, 1), (9, 5), (1, 300)):
        for pre, residual, upstream in zip(
            views((rows, 4), torch.float32),
            views((rows, 4, width), torch.bfloat16),
            views((rows, width), torch.float32),
            strict=True,
        ):
            expected = truncated(fold.tree4(pre[..., None] * residual.float(), -2))
            for results in run_all("h_aggregate", False, [pre, residual]):
                assert same_bits(results["hidden"], expected), (rows, width)
                compared += 1
            for contract in ("ascending", "tree256"):
                for wanted in ((True, True), (True, False), (False, True)) if width == 5 else ((True, True),):
                    options = {"contract": contract, "wanted": wanted}
                    for results in run_all("h_aggregate", True, [upstream, pre, residual], **options):
                        if wanted[0]:
                            grad_pre = reference.backward_pre(upstream, residual, contract)
                            assert same_bits(results["grad_pre"], grad_pre), (rows, width, contract)
                        if wanted[1]:
                            grad_residual = reference.backward_residual(upstream, pre)
                            assert same_bits(results["grad_residual"], grad_residual), (rows, width)
                        compared += 1
    return compared


def compare_rmsnorm_residual() -> int:
    from samebits.ops.rmsnorm_residual import reference
    from samebits.ops.rmsnorm_residual import triton as backend

    torch.rsqrt = lambda x: x  # type: ignore[assignment]
    backend._approximate_rsqrt = lambda x: x
    backend.product = lambda a, b: a * b
    compared = 0
    for rows, width in ((1, 1), (5, 7), (2, 136), (1, 4100)):
        gamma = torch.randn(width)
        # The second round of the 512 lanes starts at 4096. The interpreter is too slow to fold so wide a row in order.
        contracts = ("ascending", "tree512") if width < 4096 else ("tree512",)
        gradients = (True, width < 4096)
        layouts = zip(*(views((rows, width), torch.bfloat16) for _ in range(3)), strict=True)
        for x, upstream, leg in layouts if width < 100 else [next(layouts)]:
            rstd = torch.rand(rows)
            for contract in contracts:
                _, expected_rstd = reference.forward(x, gamma, 0.25, contract)
                expected_y = truncated((x.float() * expected_rstd[:, None]) * gamma)
                for results in run_all("rmsnorm_residual", False, [x, gamma], contract=contract, eps=0.25):
                    assert same_bits(results["rstd"], expected_rstd), (rows, width, contract)
                    assert same_bits(results["y"], expected_y), (rows, width, contract)
                    assert same_bits(results["residual"], x.contiguous())
                    compared += 1
                for grad_residual in (None, leg):
                    start = None if grad_residual is None else torch.randn(width)
                    tensors = [upstream, grad_residual, x, gamma, rstd, start]
                    grad_x = reference.backward_x(upstream, grad_residual, x, gamma, rstd, contract)
                    grad_gamma = reference.backward_gamma(upstream, x, rstd, start)
                    options = {"contract": contract, "wanted": gradients}
                    for results in run_all("rmsnorm_residual", True, tensors, **options):
                        assert same_bits(results["grad_x"], grad_x), (rows, width, contract)
                        if "grad_gamma" in results:
                            assert same_bits(results["grad_gamma"], grad_gamma), (rows, width)
                        compared += 1
    tall = torch.randn(150, 3).bfloat16(), torch.randn(150, 3).bfloat16(), torch.rand(150)
    tensors = [tall[0], None, tall[1], torch.ones(3), tall[2], None]
    for results in run_all("rmsnorm_residual", True, tensors, wanted=(False, True)):
        assert same_bits(results["grad_gamma"], reference.backward_gamma(*tall))
        compared += 1
    return compared


def compare_mhc_post() -> int:
    from samebits.exact import fold
    from samebits.ops.mhc_post import reference
    from samebits.ops.mhc_post import triton as backend

    backend.product = lambda a, b: a * b
    compared = 0
    for rows, width in ((1, 1), (5, 5), (1, 300), (1, 520)):  # the second round of the 128 lanes starts at 512
        for residual, sublayer, comb, post, upstream in zip(
            views((rows, 4, width), torch.bfloat16),
            views((rows, width), torch.bfloat16),
            views((rows, 4, 4), torch.float32),
            views((rows, 4), torch.float32),
            views((rows, 4, width), torch.float32),
            strict=True,
        ):
            mixed = fold.tree4(comb[..., None] * residual.float()[:, :, None, :], 1)
            expected = truncated(mixed + post[..., None] * sublayer.float()[:, None, :])
            for results in run_all("mhc_post", False, [residual, sublayer, comb, post]):
                assert same_bits(results["streams"], expected), (rows, width)
                compared += 1
            for contract in ("ascending", "fast") if width < 512 else ("fast",):
                gradients = {
                    "grad_residual": reference.backward_residual(upstream, comb),
                    "grad_sublayer": reference.backward_sublayer(upstream, post),
                    "grad_comb": reference.backward_comb(upstream, residual, contract),
                    "grad_post": reference.backward_post(upstream, sublayer, contract),
                }
                for wanted in ((True,) * 4, (False, True, True, False), (True, False, False, True)):
                    tensors = [upstream, residual, sublayer, comb, post]
                    for results in run_all("mhc_post", True, tensors, contract=contract, wanted=wanted):
                        for name, value in results.items():
                            assert same_bits(value, gradients[name]), (rows, width, contract, name)
                        compared += 1
    return compared


def compare_hc_split_sinkhorn() -> int:
    """The exponential is inline PTX: a rational function stands for it on both sides."""
    import triton.language as tl

    from samebits.ops.hc_split_sinkhorn import reference
    from samebits.ops.hc_split_sinkhorn import triton as backend

    def falling(x: Tensor) -> Tensor:
        return torch.ones_like(x) / (torch.ones_like(x) + x * x)

    usual = torch.exp, torch.sigmoid
    torch.exp, torch.sigmoid = falling, lambda x: torch.ones_like(x) / (torch.ones_like(x) + falling(-x))
    backend._exp = lambda x: tl.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + x * x)
    backend.product = lambda a, b: a * b
    backend.PROGRAMS = 1  # so that a program of the backward takes several tiles
    compared = 0
    shapes = ((9, 4), (9, 4), (9, 4, 4), (9, 24))
    for tensors in itertools.islice(zip(*(views(shape, torch.float32) for shape in shapes), strict=True), 2):
        expected = dict(zip(("pre", "post", "comb"), reference.forward(tensors[-1]), strict=True))
        for results in run_all("hc_split_sinkhorn", False, [tensors[-1]]):
            assert all(same_bits(results[name], expected[name]) for name in expected)
            compared += 1
        grad_logits = reference.backward(*tensors)
        for results in run_all("hc_split_sinkhorn", True, list(tensors)):
            assert same_bits(results["grad_logits"], grad_logits)
            compared += 1
    torch.exp, torch.sigmoid = usual
    return compared


def compare_fp32_gemm_rms() -> int:
    """The square root is inline PTX too; the interpreter has an IEEE one of its own."""
    import triton.language as tl

    from samebits.ops.fp32_gemm_rms import reference
    from samebits.ops.fp32_gemm_rms import triton as backend

    usual, torch.rsqrt = torch.rsqrt, lambda x: x  # type: ignore[assignment]
    backend._approximate_rsqrt = lambda x: x
    backend._sqrt = lambda x: tl.sqrt_rn(x)
    backend.product = lambda a, b: a * b
    compared = 0
    for rows, outputs, width in ((1, 1, 1), (2, 24, 20), (9, 4, 17), (2, 31, 3)):
        weight, start = torch.randn(outputs, width), torch.randn(outputs, width)
        layouts = zip(
            views((rows, width), torch.bfloat16 if outputs != 4 else torch.float32),
            views((rows, outputs), torch.float32),
            views((rows, 1), torch.float32),
            strict=True,
        )
        for x, grad_proj, column in itertools.islice(layouts, 2):
            grad_r = column[:, 0]
            for contract in ("ascending", "ascending-dsv4"):
                options = {"contract": contract, "eps": 0.25}
                expected = dict(zip(("proj", "r", "q"), reference.forward(x, weight, 0.25, contract), strict=True))
                for results in run_all("fp32_gemm_rms", False, [x, weight], **options):
                    assert all(same_bits(results[n], expected[n]) for n in expected), (rows, outputs, width, contract)
                    compared += 1
                r, q = expected["r"], expected["q"]
                q[0] = 0.0  # no RMS leg
                grad_x = reference.backward_x(grad_proj, grad_r, x, weight, r, q, contract)
                for begin in (None, start):
                    grad_weight = reference.backward_weight(grad_proj, x, begin, contract)
                    tensors = [grad_proj, grad_r, x, weight, r, q, begin]
                    for results in run_all("fp32_gemm_rms", True, tensors, **options):
                        assert same_bits(results["grad_x"], grad_x), (rows, outputs, width, contract)
                        assert same_bits(results["grad_weight"], grad_weight), (rows, outputs, width, contract)
                        compared += 1
    torch.rsqrt = usual
    return compared


def compare_token_sums(outputs: int) -> int:
    """The one kernel of the controller composites. Their other kernels are those of their parts."""
    from samebits.exact import fold
    from samebits.ops.mhc_pre import triton as backend
    from samebits.runtime.triton_launch import Tile

    backend.product = lambda a, b: a * b
    compared = 0
    for rows, tile in itertools.product((1, 37, 70), (Tile(32, 32, 1), Tile(64, outputs if outputs == 4 else 32, 2))):
        for grad, proj, r in zip(
            (torch.randn(rows, outputs) for _ in range(3)),
            views((rows, outputs), torch.float32),
            views((rows,), torch.float32),
            strict=False,
        ):
            terms = (grad * (r[:, None] * proj), grad)
            for start, wanted in itertools.product((None, torch.randn(outputs)), ((1, 1), (1, 0), (0, 1))):
                sums = [torch.full((outputs,), float("nan")) if want else None for want in wanted]
                options = {"num_warps": 1, "ROWS": tile.rows, "WIDTH": tile.width, "ALIGNED": False}
                sizes = (proj.stride(0), r.stride(0), rows, outputs)
                backend.launch(backend._token_sums, (1,), grad, proj, r, start, start, *sums, *sizes, **options)
                for found, added in zip(sums, terms, strict=True):
                    if found is not None:
                        assert same_bits(found, fold.left_fold(added, 0, start)), (rows, outputs, tile)
                        compared += 1
    return compared


def compare_mhc_pre() -> int:
    return compare_token_sums(24)


def compare_hyper_head() -> int:
    return compare_token_sums(4)


def compare_mhc_pre_norm() -> int:
    """It has no kernel of its own, and so nothing that it could launch itself."""
    from samebits.ops.mhc_pre_norm import triton as backend

    assert not hasattr(backend, "launch") and not hasattr(backend, "kernel")
    return 0


def orders_differ_on_this_data() -> None:
    """A comparison that could not fail proves nothing: here the contracts disagree with each other."""
    from samebits.exact import fold

    terms = torch.randn(4, 300)
    assert not torch.equal(fold.left_fold(terms, -1), fold.tree256(terms))
    assert not torch.equal(fold.left_fold(terms, -1), fold.tree512(terms))
    assert not torch.equal(fold.left_fold(terms, -1), fold.left_fold(terms.flip(-1), -1))


def let_scalars_be_loop_bounds() -> None:
    """Triton 3.6 takes int() of a one-element array, which numpy 2.4 refuses."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patched


def patch_the_language_once() -> None:
    """Triton patches its whole language anew in every call of a device function, which takes longer than the function.

    What it puts there depends only on whether a function sees ``tl``, ``tl.core`` or both, and nothing else runs in this
    process, so one patch for each of these stays.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set()

    def patch_new(function: Any) -> Any:
        seen = tuple(any(value is module for value in function.__globals__.values()) for module in (tl, tl.core))
        if seen not in patched:
            patched.add(seen)
            patch(function)
        return interpreter._LangPatchScope()  # with nothing in it to restore

    interpreter._patch_lang = patch_new


def main() -> None:
    let_scalars_be_loop_bounds()
    patch_the_language_once()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    orders_differ_on_this_data()
    from samebits import registry

    # one function per operator, found by its name, so that a new operator cannot be forgotten
    print(sum(globals()[f"compare_{name}"]() for name in registry.names() if _in_triton(name)), "results compared")


def _in_triton(name: str) -> bool:
    from samebits import registry

    return any(backend.name == "triton" for backend in registry.spec(name).backends)


if __name__ == "__main__":
    main()
