"""The tables that a replay of a block has beside those of every replay: gradients by leaf and by node, planted faults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from samebits.report.parts import Cell, Table, good


def gradient_tables(case: dict[str, Any]) -> list[Table]:
    return [_leaves(case), _nodes(case)]


def control_table(case: dict[str, Any]) -> Table:
    rows = []
    for control in case["controls"]:
        found = control["found"]
        verdict = Cell("not a fault", "none") if found is None else Cell("noticed" if found else "missed", good(found))
        rows.append(
            (Cell(control["fault"]), Cell(control["node"]), Cell(control["notices"]), verdict, Cell(control["detail"]))
        )
    columns = ("planted", "in node", "what must notice it", "verdict", "what was seen")
    return Table(f"Planted faults, {case['title']}", columns, tuple(rows), prose=frozenset({0, 4}))


def closer(leaf: dict[str, Any]) -> bool:
    """Whether a leaf's gradient is not further from the golden than the peer's."""
    ours, theirs = leaf["error"]["relative"], leaf["peer_error"]["relative"]
    return ours is not None and (theirs is None or ours <= theirs)


def _leaves(case: dict[str, Any]) -> Table:
    rows = []
    for leaf in case["gradients"]["leaves"]:
        ours, theirs = leaf["error"], leaf["peer_error"]
        rows.append(
            (
                Cell(leaf["name"]),
                Cell(leaf["dtype"]),
                Cell("yes" if leaf["repeat"] else "no", good(leaf["repeat"])),
                _says(leaf["peer_repeat"]),
                bits(leaf["chained"]),
                Cell("yes" if closer(leaf) else "no", "good" if closer(leaf) else "open"),
                Cell(number(ours["relative"])),
                Cell(number(theirs["relative"])),
                Cell(f"{ours['correctly_rounded']:.2%}"),
                Cell(f"{theirs['correctly_rounded']:.2%}"),
            )
        )
    columns = (
        "leaf", "dtype", "repeats", "peer repeats", "beside the eager VJP", "closer to the golden", "error / max", "peer's",
        "correctly rounded", "peer's",
    )  # fmt: skip
    note = "our whole forward and backward beside the peer's own autograd, and both beside the FP64 golden"
    title = f"Gradients of inputs and parameters, {case['title']}"
    return Table(title, columns, tuple(rows), numeric=frozenset({4, 6, 7, 8, 9}), caption=note)


def _nodes(case: dict[str, Any]) -> Table:
    rows = []
    for node in case["gradients"]["nodes"]:
        same = [name for name, found in node["isolated"].items() if found["same"]]
        others = [f"{name}: {differing(found)}" for name, found in node["isolated"].items() if not found["same"]]
        rows.append(
            (
                Cell(node["name"]),
                Cell("yes" if node["repeat"] else "no", good(node["repeat"])),
                _says(node["peer_repeat"]),
                Cell("-") if node["beside"] is None else Cell("yes" if node["beside"] else "no", good(node["beside"])),
                Cell("-") if node["peer_beside"] is None else _says(node["peer_beside"]),
                bits(node["chained"]),
                Cell(", ".join(same) or "-", "open" if others else "good"),
                Cell("; ".join(others) or "-"),
            )
        )
    columns = (
        "node", "repeats", "peer repeats", "same beside another sequence", "peer's", "what reaches it, differing",
        "isolated, the peer's bits", "isolated, differing",
    )  # fmt: skip
    note = (
        "the gradient that reaches each node's output; isolated: the node's own backward, by ours and by the peer, on the "
        "peer's values and the gradient that reached it there"
    )
    return Table(f"Gradients by node, {case['title']}", columns, tuple(rows), prose=frozenset({7}), caption=note)


def peer_variations(case: dict[str, Any]) -> Sequence[str]:
    """What of the peer's own gradients does not repeat."""
    gradients = case["gradients"]
    found = [f"gradient of {leaf['name']}" for leaf in gradients["leaves"] if not leaf["peer_repeat"]]
    return found + [f"gradient at {node['name']}" for node in gradients["nodes"] if not node["peer_repeat"]]


def bits(agreement: dict[str, Any]) -> Cell:
    return Cell(differing(agreement), "good" if agreement["same"] else "open", agreement["first"])


def differing(agreement: dict[str, Any]) -> str:
    return "same bits" if agreement["same"] else f"{agreement['differing']:,} of {agreement['elements']:,}"


def number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.2g}"


def _says(condition: bool) -> Cell:
    """Of the peer, which is not judged."""
    return Cell("yes" if condition else "no", "open" if condition else "none")
