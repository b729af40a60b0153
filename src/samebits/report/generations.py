"""A generation gate as tables: whether every run has the same bits, and how far it is from the class step by step."""

from __future__ import annotations

from typing import Any

from samebits.report.block_replays import bits, number
from samebits.report.parts import Cell, Table


def case_tables(case: dict[str, Any]) -> list[Table]:
    return [_runs(case), _steps(case), _first_step(case), _sealed(case)]


def caption(case: dict[str, Any]) -> str:
    psnr = "the same bits" if case["psnr"] is None else f"{case['psnr']:.1f} dB"
    return (
        f"seed {case['request']['seed']}; first difference from the class: {case['first_drift'] or 'none'}; final video "
        f"latents beside the class's: {psnr}; seal {case['record']['sha256'][:16]}"
    )


def _runs(case: dict[str, Any]) -> Table:
    rows = []
    for name, where in case["runs"].items():
        peers = case["peer_runs"].get(name, "not run")
        rows.append(
            (
                Cell(name),
                Cell(where or "same bits", "bad" if where else "good"),
                Cell(peers or "same bits", "none" if peers else "open"),
            )
        )
    note = "the sealed record of every other run beside that of the first: the first entry that differs"
    return Table(f"Runs, {case['title']}", ("run", "ours", "the class's"), tuple(rows), caption=note)


def _steps(case: dict[str, Any]) -> Table:
    rows = tuple(
        (
            Cell(str(step["step"])),
            Cell(", ".join(f"{value:.3f}" for value in step["timesteps"])),
            Cell(number(step["rows_apart"])),
            Cell(number(step["velocity_apart"])),
            bits(step["forced"]),
            Cell(number(step["forced_apart"])),
            Cell(number(step["rms"])),
            Cell(number(step["peer_rms"])),
        )
        for step in case["steps"]
    )
    columns = (
        "step", "timesteps", "latents from the class", "velocity", "given the class's latents, differing", "velocity",
        "from FP64, rms", "class's",
    )  # fmt: skip
    note = "largest distance over the largest magnitude, of video or audio; given the class's latents: what one step alone adds"
    numeric = frozenset({0, 2, 3, 4, 5, 6, 7})
    return Table(f"Steps, {case['title']}", columns, rows, numeric=numeric, caption=note)


def _first_step(case: dict[str, Any]) -> Table:
    rows = tuple(
        (Cell(place["name"]), bits(place["chained"]), Cell(number(place["apart"]))) for place in case["first_step"]
    )
    columns = ("boundary", "differing", "from the class / max")
    note = "the first call of the transformer, for the same noise"
    return Table(f"First step, {case['title']}", columns, rows, numeric=frozenset({1, 2}), caption=note)


def _sealed(case: dict[str, Any]) -> Table:
    rows = tuple(
        (Cell(f"{at}: {name}"), Cell(value, detail=value))
        for at, step in enumerate(case["record"]["steps"])
        for name, value in step.items()
        if isinstance(value, str)
    )
    return Table(f"Sealed digests, {case['title']}", ("step", "SHA-256"), rows, folded=True)
