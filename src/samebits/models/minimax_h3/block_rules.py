"""What must hold of a replay of the block; everything else in it is a measurement.

A node that the eager provider stands in for is not judged. Nor is the peer, except that its parts must be what it is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from samebits.models.minimax_h3.block import ERROR_FACTOR, ERROR_SLACK
from samebits.models.minimax_h3.block_backward import BlockGradients, BlockLeaf, NodeGradient, ulp
from samebits.models.minimax_h3.check import Check, judged, of_stages

if TYPE_CHECKING:
    from samebits.models.minimax_h3.record import CaseResult

LEAF_FACTOR, LEAF_SLACK, LEAF_ULPS = 1.5, 5e-3, 6
"""A gradient's relative error may be this many times the peer's, plus this; or, in BF16, so many ulps more than the peer's."""


def check_block(cases: Sequence[CaseResult]) -> tuple[Check, ...]:
    """All checks; those of gradients only where gradients were run."""
    made = [
        of_stages(cases, "every node repeats bit for bit", lambda node: node.repeat),
        of_stages(
            cases,
            "a row has the same bits alone, in half of the rows, and beside another sequence",
            lambda node: not node.rows.varying,
        ),
        of_stages(
            cases,
            "fed by the peer, every node that promises it has the peer's bits",
            lambda node: node.isolated.same,
            lambda node: node.promised,
        ),
        of_stages(
            cases,
            f"no node is further from the golden than {ERROR_FACTOR:g} times the peer, plus {ERROR_SLACK:g}",
            lambda node: node.within_tolerance,
        ),
        judged(
            "the peer's block, run whole, has the bits of its parts",
            [(f"{c.title}: {s.name}", s.whole) for c in cases for s in c.stages if s.whole is not None],
        ),
    ]
    if any(case.gradients for case in cases):
        made += [
            judged("every gradient repeats bit for bit", _repeats(cases)),
            judged(
                "the gradient that reaches a node has the same bits beside another sequence",
                _of_nodes(cases, lambda node: bool(node.beside), lambda node: node.beside is not None),
            ),
            judged(
                f"no gradient is further from the golden than {LEAF_FACTOR:g} times the peer's, plus {LEAF_SLACK:g}, or than "
                f"the peer's and {LEAF_ULPS} ulps",
                ((place, leaf_close(leaf)) for place, leaf in _leaves(cases)),
            ),
        ]
    patched = [(case.title, case.patched.same) for case in cases if case.patched is not None]
    patched += [(f"{t}, gradients", found.patched.same) for t, found in _gradients(cases) if found.patched is not None]
    planted = [(f"{c.title}, {p.node}: {p.fault}", p.found) for c in cases for p in c.controls if p.found is not None]
    made.append(judged("the block with our operators patched in has the bits of the nodes", patched))
    return (*made, judged("every planted fault is noticed", planted))


def leaf_close(leaf: BlockLeaf) -> bool:
    ours, theirs = leaf.error, leaf.peer_error
    if ours.relative is None or ours.max_abs is None:
        return False
    if theirs.relative is None or theirs.max_abs is None:
        return True
    if ours.relative <= LEAF_FACTOR * theirs.relative + LEAF_SLACK:
        return True
    return leaf.dtype == "bfloat16" and ours.max_abs <= theirs.max_abs + LEAF_ULPS * ulp(leaf.golden_absmax)


def _gradients(cases: Sequence[CaseResult]) -> Iterator[tuple[str, BlockGradients]]:
    for case in cases:
        if isinstance(case.gradients, BlockGradients):
            yield case.title, case.gradients


def _leaves(cases: Sequence[CaseResult]) -> Iterator[tuple[str, BlockLeaf]]:
    """None where a stand-in has part in them: every leaf's gradient passes through many nodes."""
    for title, gradients in _gradients(cases):
        if not any(node.stand_in for node in gradients.nodes):
            for leaf in gradients.leaves:
                yield f"{title}: {leaf.name}", leaf


def _of_nodes(
    cases: Sequence[CaseResult],
    holds: Callable[[NodeGradient], bool],
    asked: Callable[[NodeGradient], bool] = lambda node: True,
) -> Iterator[tuple[str, bool]]:
    for title, gradients in _gradients(cases):
        if not any(node.stand_in for node in gradients.nodes):
            for node in gradients.nodes:
                if asked(node):
                    yield f"{title}, at {node.name}", holds(node)


def _repeats(cases: Sequence[CaseResult]) -> Iterator[tuple[str, bool]]:
    yield from ((place, leaf.repeat) for place, leaf in _leaves(cases))
    yield from _of_nodes(cases, lambda node: node.repeat)
