"""What the plans of FP32 products must cover: a block for each row, column and chunk."""

from __future__ import annotations

from collections.abc import Mapping

from samebits.ops.timestep_mlp.products import Plan
from samebits.runtime.launch import Launch


def covered(plan: Plan, rows: int, products: Mapping[str, tuple[int, int]], shared_bytes: int) -> set[str]:
    """The kernels of a plan, each found to cover its product. ``products``: outputs, and terms or inner size, by name."""
    for name, step in plan.steps:
        folds = f"{name} fold" in plan
        out, inner = products[name.removesuffix(" fold")]
        assert _covers(step, rows, out, inner, folds), (rows, out, inner, str(plan))
        assert step.shared <= shared_bytes
        if step.kernel.entry.endswith("_tile"):
            assert inner % 4 == 0 and (out % 4 == 0 or step.kernel.entry == "lane_tile"), "16 bytes at a time"
    return {step.kernel.entry for step in plan}


def _covers(step: Launch, rows: int, out: int, inner: int, folds: bool) -> bool:
    choice, told = dict(step.kernel.defines), step.arguments
    tall, wide = step.grid if isinstance(step.grid, tuple) else (step.grid, 1)
    warps = step.block // 32
    match step.kernel.entry:
        case "linear":
            (over,) = told
            return tall * over * choice["ROWS"] >= rows and wide * (warps // over) * choice["COLS"] >= out
        case "linear_tile":  # a block goes on to other rows
            return tall >= 1 and wide * 32 >= out and 8 * choice["PAIRS"] >= inner
        case "lane_tile":
            groups = choice["GROUPS"]
            return (
                tall // groups * 4 * choice["R"] >= rows
                and tall % groups == 0
                and wide * 8 * choice["C"] >= out
                and warps == 32 // groups
                and folds
            )
        case "fold_lanes":
            return tall * 128 >= rows * out
        case "across":
            chunks, over = told
            tiles = tall // (chunks if choice["SPLIT"] else 1)
            return (
                tiles * over * choice["ROWS"] >= rows
                and wide * (8 // over) * 128 >= out
                and chunks * 64 >= inner
                and folds == bool(choice["SPLIT"])
            )
        case "across_tile":
            tiles = tall // (-(-inner // 64) if choice["SPLIT"] else 1)
            return (
                tiles * 4 * choice["R"] * 4 // choice["ALONG"] >= rows
                and wide * 8 * choice["C"] * choice["ALONG"] >= out
                and folds == bool(choice["SPLIT"])
            )
        case "chunk_tile":
            return tall * 4 * choice["R"] >= rows and wide * 8 * choice["C"] >= out and warps == 8
        case "fold_chunks":
            return tall * 256 >= rows * out
        case "weight_tile":
            far = 16 * choice["LONG"]
            over_n, over_k = (far, 32) if choice["TALL"] else (32, far)
            return tall * over_n >= out and (wide * over_k >= inner or not choice["WEIGHT"])
        case "weight_gradient":
            (column_blocks,) = told
            return tall // column_blocks * 64 >= out and (column_blocks * 128 >= inner or not choice["WEIGHT"])
    raise AssertionError(f"unknown kernel {step.kernel.entry}")
