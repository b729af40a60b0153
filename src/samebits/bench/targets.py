"""Speed targets as data, beside the operator in ``ops/<op>/targets.py``, and the judgement of a results file by them."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from samebits import catalogue, registry
from samebits.bench.case import Case, Direction, forms


@dataclass(frozen=True)
class Target:
    """One row of a speed table. Exactly one of ``at_least`` and ``at_most`` is given.

    ``metric``: ``copy_fraction``, ``us``, ``ratio`` (time of ``peer`` over ours) or ``extra_over_outputs`` (extra peak
    memory over the bytes of the outputs).
    """

    direction: Direction
    sizes: tuple[tuple[str, int], ...]
    rows: tuple[int, int | None]
    """First and last number of rows it covers; None: no end."""
    metric: str
    at_least: float | None = None
    at_most: float | None = None
    contracts: tuple[str, ...] = ()
    """None named: every contract."""
    backend: str = "cuda"
    peer: str = ""
    measure: tuple[int, ...] = ()
    """Rows that the quick sweep measures for it; by default the first."""

    @property
    def text(self) -> str:
        relation = f">= {self.at_least:g}" if self.at_least is not None else f"<= {self.at_most:g}"
        what = {
            "copy_fraction": f"{relation} of copy bandwidth",
            "us": f"{relation} us",
            "ratio": f"{relation} x {self.peer}",
            "extra_over_outputs": f"extra memory {relation} of the outputs",
        }[self.metric]
        return what

    def covers(self, row: dict[str, Any]) -> bool:
        first, last = self.rows
        count = row["shape"]["T"]
        return (
            row["direction"] == self.direction
            and row["backend"] == self.backend
            and (not self.contracts or row["contract"] in self.contracts)
            and all(row["shape"].get(axis) == size for axis, size in self.sizes)
            and first <= count
            and (last is None or count <= last)
        )

    def value(self, row: dict[str, Any]) -> float | None:
        """What was reached, or None where the row did not measure it."""
        if self.metric == "ratio":
            return row["peers"].get(self.peer, {}).get("ratio")
        if self.metric == "extra_over_outputs":
            return None if row.get("extra_bytes") is None else row["extra_bytes"] / row["output_bytes"]
        value: float | None = row.get(self.metric)
        return value

    def met(self, value: float) -> bool:
        return value >= self.at_least if self.at_least is not None else value <= (self.at_most or 0.0)


@dataclass(frozen=True)
class Verdict:
    """One target held against one row. ``floor_us`` is the least time: bytes over copy bandwidth, plus an empty kernel."""

    target: Target
    row: dict[str, Any]
    value: float | None
    met: bool | None
    """None: not measured in that row."""
    floor_us: float

    @property
    def over_floor(self) -> float:
        """Our time over the floor; 1 is the floor."""
        return float(self.row["us"]) / self.floor_us


def of(op: str) -> tuple[Target, ...]:
    """The targets of an operator, or of the boundary of a model."""
    for home in (catalogue.home(op), f"samebits.models.{op}"):
        if importlib.util.find_spec(home) and importlib.util.find_spec(f"{home}.targets"):
            declared: tuple[Target, ...] = importlib.import_module(f"{home}.targets").TARGETS
            return declared
    return ()


def judge(rows: Iterable[dict[str, Any]]) -> tuple[list[Verdict], list[str]]:
    """Every (target, row) pair that belongs together, and the targets no row speaks about, by text."""
    measured = [row for row in rows if "skipped" not in row]
    verdicts: list[Verdict] = []
    unheard: list[str] = []
    for op in sorted({row["op"] for row in measured}):
        for target in of(op):
            covered = [row for row in measured if row["op"] == op and target.covers(row)]
            if not covered:
                sizes = "".join(f", {axis}={size}" for axis, size in target.sizes)
                unheard.append(f"{op} {target.direction}, T from {target.rows[0]}{sizes}: {target.text}")
            for row in covered:
                value = target.value(row)
                verdicts.append(
                    Verdict(target, row, value, None if value is None else target.met(value), floor_us(row))
                )
    return verdicts, unheard


def floor_us(row: dict[str, Any]) -> float:
    return float(row["bytes"] / (row["copy_gbps"] * 1e3) + row["launch_floor_us"])


def quick_cases(op: str) -> tuple[Case, ...]:
    """The cases that the targets of an operator speak about, each once."""
    found: dict[Case, None] = {}
    for target in of(op):
        for rows in target.measure or (target.rows[0],):
            case = Case(op, target.direction, rows, target.sizes)
            found[case] = None
            if target.metric != "ratio" and op in registry.names():  # peers have no gradients in FP32 to compare with
                found |= dict.fromkeys(forms(registry.spec(op), case))
    order: dict[str, int] = {"fwd": 0, "bwd": 1, "fwd+bwd": 2}
    return tuple(sorted(found, key=lambda case: (order[case.direction], case.rows, case.grads)))
