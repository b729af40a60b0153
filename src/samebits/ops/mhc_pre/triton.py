"""``mhc_pre`` in Triton, ascending contracts, with the bits of ``reference.py``: the operators it is made of, one after the other.

Their Triton backends do everything that is long; what lies between them is written in PyTorch, one rounding per operation.
``hyper_head`` runs the same code with four outputs. It is a second, independent way to the bits, not a fast one: FP32 legs of
grad_residual go through memory, where the CUDA backend keeps them in registers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from samebits.dispatch import Call, Layout
from samebits.ops.fp32_gemm_rms import triton as fp32_gemm_rms
from samebits.ops.h_aggregate import triton as h_aggregate
from samebits.ops.hc_split_sinkhorn import triton as hc_split_sinkhorn
from samebits.ops.hyper_head import reference as head
from samebits.ops.mhc_post import triton as mhc_post
from samebits.ops.mhc_pre import reference
from samebits.runtime.triton_launch import Tile, build, kernel, launch, left_fold, load, product

if TYPE_CHECKING:
    from samebits.audit.build import Build

PARTS: dict[str, Any] = {
    "fp32_gemm_rms": fp32_gemm_rms,
    "h_aggregate": h_aggregate,
    "hc_split_sinkhorn": hc_split_sinkhorn,
    "mhc_post": mhc_post,
}

# --- device code ------------------------------------------------------------------------------------------------------


@kernel
def _token_sums(  # type: ignore[no-untyped-def]
    grad_logits,
    proj,
    r,
    start_gain,
    start_bias,
    grad_gain,
    grad_bias,
    proj_row: tl.int64,
    r_row: tl.int64,
    T: tl.int64,
    N: tl.int32,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One program: the chains of all outputs, one lane each, over ascending rows, ROWS at a time. None: not wanted."""
    n = tl.arange(0, WIDTH)
    gain = tl.zeros((WIDTH,), tl.float32)
    bias = tl.zeros((WIDTH,), tl.float32)
    if start_gain is not None:
        gain = gain + tl.load(start_gain + n, n < N, 0.0)
    if start_bias is not None:
        bias = bias + tl.load(start_bias + n, n < N, 0.0)
    for first in tl.range(0, T, ROWS, num_stages=1):
        row = first + tl.arange(0, ROWS)
        here = row < T
        upstream = load((grad_logits + row * N)[:, None], here[:, None], n[None, :], N, ALIGNED)
        if grad_gain is not None:
            mine = load((proj + row * proj_row)[:, None], here[:, None], n[None, :], N, ALIGNED)
            scale = tl.load(r + row * r_row, here, 0.0)
            gain = left_fold(gain, tl.trans(product(upstream, scale[:, None] * mine)), WIDTH, ROWS)
        if grad_bias is not None:
            bias = left_fold(bias, tl.trans(upstream), WIDTH, ROWS)
    if grad_gain is not None:
        tl.store(grad_gain + n, gain, n < N)
    if grad_bias is not None:
        tl.store(grad_bias + n, bias, n < N)


# --- host code --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What is asked of each part, by role, and how it will do it."""

    parts: tuple[tuple[str, Call, Any], ...]
    sums: Tile
    """Rows at a time by outputs of the chains over tokens."""

    def do(
        self, role: str, inputs: dict[str, Tensor], results: dict[str, Tensor], scalars: dict[str, float] | None = None
    ) -> None:
        call, plan = next((call, plan) for name, call, plan in self.parts if name == role)
        PARTS[call.op].run(call, plan, inputs, results, scalars or {})


def plans(call: Call) -> tuple[Plan, ...]:
    asked = list(_parts(call))
    options = [(role, part, PARTS[part.op].plans(part)) for role, part in asked]
    width = triton.next_power_of_2(call.size("N"))
    tiles = (Tile(32, width, 1), Tile(64, width, 2))

    def plan(i: int) -> Plan:
        return Plan(tuple((role, part, ways[i % len(ways)]) for role, part, ways in options), tiles[i % len(tiles)])

    return tuple(plan(i) for i in range(max(len(tiles), *(len(ways) for *_, ways in options))))


def run(
    call: Call, plan: Plan, inputs: dict[str, Tensor], results: dict[str, Tensor], scalars: dict[str, float]
) -> None:
    (_backward if call.backward else _forward)(call, plan, inputs, results, scalars)


def _flat(residual: Tensor) -> Tensor:
    """(T, 4, D) as (T, 4 D), dense in its last axis; with D = 1 a view may have the stride of the streams there."""
    flat = residual.flatten(1)
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def _forward(
    call: Call, plan: Plan, inputs: dict[str, Tensor], results: dict[str, Tensor], scalars: dict[str, float]
) -> None:
    residual = inputs["residual"]
    proj, r, logits = results["proj"], results["r"], results["logits"]
    found = {"proj": proj, "r": r, "q": results["q"]}
    plan.do("projection", {"x": _flat(residual), "weight": inputs["weight"]}, found, scalars)
    logits.copy_(reference.affine(proj, r, inputs["gain"], inputs["bias"]))
    if _is_head(call):
        results["pre"].copy_(head.gate(logits))
    else:
        plan.do("split", {"logits": logits}, {name: results[name] for name in ("pre", "post", "comb")})
    plan.do("collapse", {"pre": results["pre"], "residual": residual}, {"hidden": results["hidden"]})


def _backward(
    call: Call, plan: Plan, inputs: dict[str, Tensor], results: dict[str, Tensor], scalars: dict[str, float]
) -> None:
    residual, logits, proj, r = (inputs[name] for name in ("residual", "logits", "proj", "r"))
    grad_residual = results.get("grad_residual")

    def scratch(*shape: int) -> Tensor:
        return residual.new_empty(shape, dtype=torch.float32)

    found = {"grad_pre": scratch(call.rows, 4)}
    if grad_residual is not None:
        found["grad_residual"] = grad_residual if grad_residual.dtype == torch.float32 else scratch(*residual.shape)
    plan.do("collapse", {name: inputs[name] for name in ("grad_hidden", "pre", "residual")}, found)
    if _is_head(call):
        grad_logits = head.backward_logits(found["grad_pre"], logits)
    else:
        grad_logits = scratch(*logits.shape)
        upstream = {"grad_pre": found["grad_pre"], "grad_post": inputs["grad_post"], "grad_comb": inputs["grad_comb"]}
        plan.do("split", upstream | {"logits": logits}, {"grad_logits": grad_logits})

    if "grad_gain" in results or "grad_bias" in results:
        _sum_tokens(call, plan.sums, grad_logits, inputs, results)
    projected = {name: results[name] for name in ("grad_weight",) if name in results}
    if grad_residual is not None:
        projected["grad_x"] = scratch(call.rows, 4 * call.size("D"))
    if projected:
        grad_proj, grad_r, _ = reference.backward_controller(grad_logits, proj, r, inputs["gain"])
        given: dict[str, Tensor] = {n: inputs[n] for n in ("weight", "r", "q", "start_weight") if n in inputs}
        given |= {"grad_proj": grad_proj, "grad_r": grad_r, "x": _flat(residual)}
        plan.do("projection", given, projected, scalars)
    if grad_residual is not None:
        legs, leg = found["grad_residual"], projected["grad_x"].view_as(residual)
        legs += leg
        if "grad_streams" in inputs:
            comb = inputs["comb"]
            streams = {"grad_streams": inputs["grad_streams"], "comb": comb, "post": comb[:, 0]}  # post is not read
            plan.do("post", streams, {"grad_residual": leg})
            legs += leg
        if legs is not grad_residual:
            grad_residual.copy_(legs)


def _sum_tokens(
    call: Call, tile: Tile, grad_logits: Tensor, inputs: dict[str, Tensor], results: dict[str, Tensor]
) -> None:
    proj, r = inputs["proj"], inputs["r"]
    starts = (inputs.get("start_gain"), inputs.get("start_bias"))
    sums = (results.get("grad_gain"), results.get("grad_bias"))
    sizes = (proj.stride(0), r.stride(0), call.rows, call.size("N"))
    constexprs = _token_constexprs(call, tile)
    launch(_token_sums, (1,), grad_logits, proj, r, *starts, *sums, *sizes, num_warps=tile.num_warps, **constexprs)


def _token_constexprs(call: Call, tile: Tile) -> dict[str, int | bool]:
    aligned = call.size("N") % 8 == 0 and call.layout("proj").aligned
    return {"ROWS": tile.rows, "WIDTH": tile.width, "ALIGNED": aligned}


def _is_head(call: Call) -> bool:
    return call.size("N") == 4


# --- what is asked of the parts ---------------------------------------------------------------------------------------


def _parts(call: Call) -> Iterator[tuple[str, Call]]:
    """(role, call) of every part that this call needs."""
    width, outputs = call.size("D"), call.size("N")
    residual, x = call.layout("residual"), _flattened(call)
    split, streams = {"N": 24, "H": 4, "J": 4}, {"H": 4, "D": width}
    projection = {"N": outputs, "K": 4 * width}

    def part(op: str, sizes: dict[str, int], wanted: Iterable[str], **layouts: Layout) -> Call:
        return dataclasses.replace(
            call,
            op=op,
            contract=call.contract if op == "fp32_gemm_rms" else "ascending",
            sizes=tuple(sizes.items()),
            layouts=tuple(layouts.items()),
            wanted=tuple(wanted),
            grad_dtype="float32",
        )

    def given(*names: str) -> dict[str, Layout]:
        return {name: call.layout(name) for name in names if call.has(name)}

    four, logits, one = dense(4), dense(outputs), dense()
    if not call.backward:
        yield "projection", part("fp32_gemm_rms", projection, ("proj", "r", "q"), x=x, **given("weight"))
        if not _is_head(call):
            yield "split", part("hc_split_sinkhorn", split, ("pre", "post", "comb"), logits=logits)
        yield "collapse", part("h_aggregate", streams, ("hidden",), pre=four, residual=residual)
        return
    legs = ("grad_residual",) if "grad_residual" in call.wanted else ()
    collapse = given("grad_hidden", "pre", "residual")
    yield "collapse", part("h_aggregate", streams, ("grad_pre", *legs), **collapse)
    if not _is_head(call):
        upstream = given("grad_post", "grad_comb", "logits")
        yield "split", part("hc_split_sinkhorn", split, ("grad_logits",), grad_pre=four, **upstream)
    wanted = (*(("grad_x",) if legs else ()), *(("grad_weight",) if "grad_weight" in call.wanted else ()))
    if wanted:
        saved = given("weight", "r", "q", "start_weight")
        yield "projection", part("fp32_gemm_rms", projection, wanted, grad_proj=logits, grad_r=one, x=x, **saved)
    if legs and call.has("grad_streams"):
        comb = call.layout("comb")
        post = Layout(comb.dtype, (comb.strides[0], comb.strides[2]), comb.aligned)
        yield "post", part("mhc_post", streams | {"J": 4}, legs, **given("grad_streams", "comb"), post=post)


def dense(*sizes: int, dtype: str = "float32") -> Layout:
    """A contiguous tensor of ours: rows of ``sizes``."""
    strides, size = [1], 1
    for length in reversed(sizes):
        size *= length
        strides.insert(0, size)
    item = 4 if dtype == "float32" else 2
    return Layout(dtype, tuple(strides if sizes else (1,)), all(stride * item % 16 == 0 for stride in strides[:-1]))


def _flattened(call: Call) -> Layout:
    """The streams of a token one behind the other; a copy where they lie apart."""
    residual, width = call.layout("residual"), call.size("D")
    if residual.strides[1:] == (width, 1):
        return Layout("bfloat16", (residual.strides[0], 1), residual.aligned)
    return dense(4 * width, dtype="bfloat16")


# --- audit ------------------------------------------------------------------------------------------------------------


def builds() -> tuple[Build, ...]:
    """Its own kernel, and those of its parts."""
    return (*token_builds(24), *lent("fp32_gemm_rms", "h_aggregate", "hc_split_sinkhorn", "mhc_post"))


def token_builds(outputs: int) -> tuple[Build, ...]:
    from samebits.audit.build import Build

    width = triton.next_power_of_2(outputs)
    found: dict[Any, Build] = {}
    for tile in (Tile(32, width, 1), Tile(64, width, 2)):
        for aligned in (outputs % 8 == 0, False):
            for wanted, start in (
                (("gain", "bias"), "*fp32"),
                (("gain", "bias"), None),
                (("gain",), None),
                (("bias",), None),
            ):
                pointers: dict[str, str | None] = dict.fromkeys(("grad_logits", "proj", "r"), "*fp32")
                pointers |= dict.fromkeys(("start_gain", "start_bias"), start)
                pointers |= {f"grad_{name}": "*fp32" if name in wanted else None for name in ("gain", "bias")}
                constexprs = {"ROWS": tile.rows, "WIDTH": tile.width, "ALIGNED": aligned}
                made = build(_token_sums, pointers, tile.num_warps, **constexprs)
                found.setdefault(made, Build(made, ("ascending", "ascending-dsv4")))
    return tuple(found.values())


def lent(*parts: str) -> tuple[Build, ...]:
    """The kernels of these operators that an ascending contract can reach, under its names."""
    from samebits.audit.build import Build

    both = ("ascending", "ascending-dsv4")
    found = []
    for name in parts:
        for made in PARTS[name].builds():
            serves = [c for c in both if c in made.contracts] if name == "fp32_gemm_rms" else both
            if "ascending" in made.contracts or (name == "fp32_gemm_rms" and serves):
                found.append(Build(made.kernel, tuple(serves)))
    return tuple(found)
