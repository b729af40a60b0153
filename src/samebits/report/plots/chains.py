"""Plots of a replay that runs a chain of nodes: the conditioning chain, and a block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from samebits.report.plots import dots
from samebits.report.plots.parts import (
    OURS,
    Context,
    Plot,
    Values,
    agreement,
    both,
    context,
    finite,
    measured,
    share,
    table,
    varying,
)
from samebits.report.plots.style import COLUMN, TEXT, Panel, Series

ERROR = "max error / max |FP64|"


class Part(NamedTuple):
    """A panel, the name of its file and what it shows in words."""

    name: str
    panel: Panel
    said: str


def conditioning(replay: dict[str, Any]) -> Iterable[Plot]:
    about, cases = context(replay), replay["cases"]
    yield from _nodes(cases, about)
    if all(case["gradients"] for case in cases):
        leaves = [case["gradients"]["leaves"] for case in cases]
        yield from _plots("gradients", _names(leaves[0]), cases, _modes(leaves, about), about)


def block(replay: dict[str, Any]) -> Iterable[Plot]:
    about, cases = context(replay), replay["cases"]
    yield from _nodes(cases, about)
    if all(case["gradients"] for case in cases):
        leaves = [case["gradients"]["leaves"] for case in cases]
        yield from _plots("gradients", _names(leaves[0]), cases, _leaves(leaves, about), about)
        nodes = [case["gradients"]["nodes"] for case in cases]
        names = [f"{node['name']}: {name}" for node in nodes[0] for name in node["isolated"]]
        yield from _plots("backward", names, cases, (_isolated(nodes, about),), about)


def _plots(
    name: str, rows: Sequence[str], cases: Sequence[dict[str, Any]], parts: Sequence[Part], about: Context
) -> Iterable[Plot]:
    """One figure for a page from all panels, and one for a column from each."""
    draw = partial(dots.draw, rows, [case["title"] for case in cases])
    if len(parts) == 1:
        yield Plot(name, f"{parts[0].said}. {about.where}", partial(draw, (parts[0].panel,), COLUMN))
        return
    said = "; ".join(f"({letter}) {part.said}" for letter, part in zip("abc", parts, strict=False))
    yield Plot(name, f"{said}. {about.where}", partial(draw, [part.panel for part in parts], TEXT))
    for part in parts:
        yield Plot(f"{name}-{part.name}", f"{part.said}. {about.where}", partial(draw, (part.panel,), COLUMN))


def _nodes(cases: Sequence[dict[str, Any]], about: Context) -> Iterable[Plot]:
    stages = [case["stages"] for case in cases]
    names = [f"{entry['name']} (stand-in)" if entry["stand_in"] else entry["name"] for entry in stages[0]]
    rows = both(stages, about, lambda entry, who: varying(entry[f"{who}rows"]))
    parts = (
        Part(
            "agreement",
            Panel("share", f"elements that differ from {about.peer}", agreement(stages)),
            f"share of elements whose bits are not {about.whose}; chained: every implementation goes on with its own results, "
            f"isolated: ours is given {about.whose}",
        ),
        Part(
            "rows",
            Panel("share", "rows that depend on the batch", rows),
            "share of the rows whose bits change in half of the rows or beside a second sequence, or of up to 8 that ran alone "
            "(in newer records), whichever is larger",
        ),
        Part(
            "error",
            Panel("error", ERROR, _errors(stages, about)),
            "largest distance from FP64 over its largest magnitude; FP64 rounds only where the model stores a value",
        ),
    )
    yield from _plots("nodes", names, cases, parts, about)
    if all(entry.get("latency_us") for case in stages for entry in case):
        yield from _plots("latency", names, cases, (_latency(stages, about),), about)


def _latency(stages: Sequence[Sequence[Any]], about: Context) -> Part:
    times = (
        Series("peer", about.peer, table(stages, lambda entry: entry["latency_us"]["peer"])),
        Series("ours", OURS, table(stages, lambda entry: entry["latency_us"]["ours"])),
    )
    ways = "; ".join(dict.fromkeys(entry["latency_us"]["how"] for case in stages for entry in case))
    return Part(
        "latency",
        Panel("error", "us of one forward call", times),
        f"microseconds of one forward call, median of {ways}; {about.peer} by its own operations one by one; "
        "for orientation, not a benchmark",
    )


def _errors(entries: Sequence[Sequence[Any]], about: Context) -> list[Series]:
    def theirs(repeats: bool) -> Values:
        return table(entries, lambda e: finite(e["peer_error"]["relative"]) if e["peer_repeat"] is repeats else None)

    ours = table(entries, lambda entry: finite(entry["error"]["relative"]))
    return [*_peers(theirs, about), Series("ours", OURS, ours)]


def _peers(theirs: Callable[[bool], Values], about: Context) -> list[Series]:
    """The peer's values, with another mark where a second run has other bits."""
    steady, unsteady = theirs(True), theirs(False)
    made = [Series("peer", about.peer, steady)] if measured(steady) else []
    return [*made, Series("unsteady", f"{about.peer}, varies by run", unsteady)] if measured(unsteady) else made


def _leaves(leaves: Sequence[Sequence[Any]], about: Context) -> tuple[Part, ...]:
    beside = Series("chained", "chained", table(leaves, lambda leaf: share(leaf["chained"])))
    return (
        Part(
            "agreement",
            Panel("share", f"elements that differ from {about.peer}", (beside,)),
            f"share of elements of a gradient whose bits are not those of {about.whose} own backward",
        ),
        Part(
            "error",
            Panel("error", ERROR, _errors(leaves, about)),
            "largest distance of a gradient from FP64's over its largest magnitude",
        ),
    )


def _isolated(nodes: Sequence[Sequence[Any]], about: Context) -> Part:
    inputs = [[found for node in case for found in node["isolated"].values()] for case in nodes]
    return Part(
        "agreement",
        Panel(
            "share", f"elements that differ from {about.peer}", (Series("isolated", "isolated", table(inputs, share)),)
        ),
        f"share of elements of each input's gradient whose bits are not {about.whose}; both were given {about.whose} values "
        "and gradient",
    )


def _modes(leaves: Sequence[Sequence[Any]], about: Context) -> tuple[Part, ...]:
    def of(mode: str, key: str) -> Values:
        return table(leaves, lambda leaf: finite(leaf["modes"][mode][key]))

    def all_modes(key: str) -> list[Series]:
        def theirs(repeats: bool) -> Values:
            return table(
                [[leaf["modes"]["peer"] for leaf in case] for case in leaves],
                lambda found: finite(found[key]) if found["repeat"] is repeats else None,
            )

        separate = Series("third", f"{OURS}, separate", of("separate", key))
        return [*_peers(theirs, about), separate, Series("ours", f"{OURS}, fused", of("fused", key))]

    return (
        Part(
            "error",
            Panel("error", ERROR, all_modes("relative")),
            "largest distance of a gradient from FP64's over its largest magnitude; fused: the gradient of the table is never "
            "rounded; varies by run: a second run has other bits",
        ),
        Part(
            "rounding",
            Panel("part", "elements correctly rounded", all_modes("correctly_rounded")),
            "share of elements that are FP64's, rounded once",
        ),
    )


def _names(leaves: Sequence[Any]) -> list[str]:
    return [leaf["name"].removeprefix("transformer_blocks.0.") for leaf in leaves]
