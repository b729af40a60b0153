"""A whole model with our operators and without: what must hold of it, and how far the two are apart."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from samebits.exact.compare import same_bits
from samebits.models.minimax_h3 import patching
from samebits.models.minimax_h3.check import Check, judged
from samebits.models.minimax_h3.subject import Subject

LIMIT = 0.03
"""Largest distance of the patched model from the class, over its largest output: a few BF16 roundings of every block."""


@dataclass(frozen=True)
class ModelComparison:
    release: str
    sites: int
    operators: tuple[str, ...]
    distance: float
    """Of the outputs from those of the unpatched model, over its largest."""
    equal: int
    elements: int
    """How many elements of the outputs have the unpatched model's bits, of how many."""
    peer_varying: int
    """Elements of the unpatched model that have other bits in a batch of two than alone."""
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"passed": self.passed}


def compare_model(given: Subject, backend: str | None = None) -> ModelComparison:
    """Run the model as it is, patched and unpatched again. ``given`` has a batch of at least two sequences."""
    theirs = given()
    peer_varying = sum(_varying(given, theirs, item) for item in _items(given))
    patching.patch(given.model, backend=backend)
    try:
        ours, again = given(), given()
        report = patching.patched(given.model)
        alone = [(f"sequence {item}", _varying(given, ours, item) == 0) for item in _items(given)]
    finally:
        patching.unpatch(given.model)
    restored = given()
    size = max(float(value.abs().max()) for value in theirs)
    distance = max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)) / size
    return ModelComparison(
        release=report.release,
        sites=len(report.sites),
        operators=tuple(sorted({site.operator for site in report.sites})),
        distance=distance,
        equal=sum(int((a == b).sum()) for a, b in zip(ours, theirs, strict=True)),
        elements=sum(value.numel() for value in theirs),
        peer_varying=peer_varying,
        checks=(
            judged("every call site runs our operator", [(site.name, site.hits == 2) for site in report.sites]),
            judged("patched, a second run has the same bits", [("outputs", _same(ours, again))]),
            judged("patched, a sequence has the same bits alone and in a batch", alone),
            judged(f"patched, outputs are within {LIMIT:g} of the class's largest", [("outputs", distance <= LIMIT)]),
            judged("unpatched again, the model has its own bits", [("outputs", _same(restored, theirs))]),
        ),
    )


def _items(given: Subject) -> range:
    return range(given.inputs["hidden_states"].shape[0])


def _varying(given: Subject, batch: tuple[Tensor, ...], item: int) -> int:
    """Elements of one sequence that have other bits alone than in the batch."""
    made = given(**given.alone(item))
    return sum(int((one != value[item : item + 1]).sum()) for one, value in zip(made, batch, strict=True))


def _same(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    return all(same_bits(a, b) for a, b in zip(one, other, strict=True))
