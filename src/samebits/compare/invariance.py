"""Does a row keep its bits whatever else is in the batch? Do the gradients of parameters repeat?

Three checks of batch invariance, each of results and row gradients, all bitwise: every row alone against full batches; a large
batch against sub-batches that cover it; probe rows in front, middle and back of batches of every size, and a batch reversed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samebits.compare.bitwise import Tally
from samebits.compare.contestant import Contestant, Found, Problem
from samebits.compare.scale import PROBES, Scale, pieces, placements, sweep_sizes


@dataclass(frozen=True)
class Verdict:
    all_rows: Tally
    full_vs_sub_batches: Tally
    batch_size_sweep: Tally
    rows_repeat: Tally
    parameters_repeat: Tally

    @property
    def checks(self) -> dict[str, Tally]:
        return {name: getattr(self, name) for name in ("all_rows", "full_vs_sub_batches", "batch_size_sweep")}

    @property
    def batch_invariant(self) -> bool:
        """Every one of the three checks compared something and found no difference."""
        return all(tally.passed is True for tally in self.checks.values())

    @property
    def repeatable(self) -> bool:
        return self.rows_repeat.passed is True and self.parameters_repeat.passed is not False

    @property
    def first_failure(self) -> str | None:
        named = self.checks | {"repeat": self.rows_repeat, "parameter repeat": self.parameters_repeat}
        return next((f"{name}: {t.first_failures[0]}" for name, t in named.items() if t.first_failures), None)

    def to_json(self) -> dict[str, Any]:
        return {
            "batch_invariant": self.batch_invariant,
            "repeatable": self.repeatable,
            "params_repeatable": self.parameters_repeat.passed,
            "first_failure": self.first_failure,
            **{name: tally.to_json() for name, tally in self.checks.items()},
            "rows_repeat": self.rows_repeat.to_json(),
            "parameters_repeat": self.parameters_repeat.to_json(),
        }


def examine(contestant: Contestant, problems: Sequence[Problem], scale: Scale) -> Verdict:
    """``problems`` are the same operator with inputs of other seeds; the sweep and the repeats take the first."""
    verdict = Verdict(Tally(), Tally(), Tally(), Tally(), Tally())
    probes: dict[str, Tensor] = {}
    for number, problem in enumerate(problems):
        seed = f", seed {scale.seeds[number]}" if number else ""
        alone = _rows_alone(contestant, problem, max(*scale.alone, PROBES))
        for size in scale.alone:
            found = _rows(contestant.run(problem.drawn(range(size))), problem)
            expected = {name: value[:size] for name, value in alone.items()}
            _compare(verdict.all_rows, f"alone against in a batch of {size}{seed}", expected, found)
        _sub_batches(verdict.full_vs_sub_batches, contestant, problem, scale.full, seed)
        probes = probes or {name: rows[:PROBES] for name, rows in alone.items()}
    _sweep(verdict.batch_size_sweep, contestant, problems[0], scale, probes)
    _repeat(verdict, contestant, problems[0], scale)
    return verdict


def _rows(found: Found, problem: Problem) -> dict[str, Tensor]:
    return {name: value for name, value in found.values.items() if problem.per_row(name)}


def _rows_alone(contestant: Contestant, problem: Problem, count: int) -> dict[str, Tensor]:
    single = [_rows(contestant.run(problem.drawn(range(row, row + 1))), problem) for row in range(count)]
    return {name: torch.cat([found[name] for found in single]) for name in single[0]}


def _compare(tally: Tally, label: str, expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        if name in found:
            tally.compare(label, name, value, found[name])
        else:
            tally.fail(f"{name}, {label}: only one of the two has it")


def _sub_batches(tally: Tally, contestant: Contestant, problem: Problem, full: int, seed: str) -> None:
    whole = _rows(contestant.run(problem.drawn(range(full))), problem)
    for piece in pieces(full):
        part = _rows(contestant.run(problem.drawn(piece)), problem)
        label = f"rows {piece.start} to {piece.stop - 1} of a batch of {full} against a batch of their own{seed}"
        expected = {name: value[piece.start : piece.stop] for name, value in whole.items()}
        _compare(tally, label, expected, part)


def _sweep(tally: Tally, contestant: Contestant, problem: Problem, scale: Scale, probes: dict[str, Tensor]) -> None:
    for size in sweep_sizes(scale.sweep):
        for placement in placements(size, problem.rows):
            found = _rows(contestant.run(problem.batch(placement.ids)), problem)
            at = [position for position, _ in placement.probes]
            ids = [row for _, row in placement.probes]
            expected = {name: value[ids] for name, value in probes.items()}
            taken = {name: value[at] if len(value) == size else value for name, value in found.items()}
            _compare(tally, f"alone against {placement.label}", expected, taken)


def _repeat(verdict: Verdict, contestant: Contestant, problem: Problem, scale: Scale) -> None:
    rows = max(scale.alone)
    first = contestant.run(problem.drawn(range(rows)))
    for count in range(2, scale.repeats + 1):
        again = contestant.run(problem.drawn(range(rows)))
        for name, value in first.values.items():
            tally = verdict.rows_repeat if problem.per_row(name) else verdict.parameters_repeat
            _compare(tally, f"run 1 against run {count} of a batch of {rows}", {name: value}, again.values)
