"""Replay of block 0: the seventeen nodes by ours, by the real block of diffusers and in FP64, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from samebits.models.minimax_h3 import block_peer, golden, peer
from samebits.models.minimax_h3.block import BLOCK, OUTPUT, BlockCase, make_block_case
from samebits.models.minimax_h3.block_backward import Runner, block_gradients
from samebits.models.minimax_h3.block_patched import patched_runner
from samebits.models.minimax_h3.block_rules import check_block
from samebits.models.minimax_h3.candidate import Candidate
from samebits.models.minimax_h3.chain import History
from samebits.models.minimax_h3.controls import controls
from samebits.models.minimax_h3.forward import stages
from samebits.models.minimax_h3.latency import Clock
from samebits.models.minimax_h3.measure import Agreement, agreement
from samebits.models.minimax_h3.record import CaseResult, Replay, exact_matmul, recorded, the_peer
from samebits.models.minimax_h3.weights import Weights

KIND = "minimax_h3_block_replay"
OURS = partial(Candidate, chain=BLOCK)
"""A candidate for the nodes of the block."""


def replay_block(
    weights: Weights,
    *,
    layouts: Sequence[str],
    candidate: Candidate | None = None,
    against: str | None = None,
    seed: int = 0,
    with_backward: bool = False,
    clock: Clock | None = None,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> Replay:
    """Every layout on the device of ``weights``, planted faults in the first.

    Args:
        weights: with the rest of block 0 (``block=True``).
        layouts: of ``layouts.NAMED``.
        candidate: what is replayed, a :class:`Candidate` of ``BLOCK``; our operators by default.
        against: ``"diffusers"`` or ``"provider"``; None takes diffusers where it is installed.
        with_backward: the gradients of every input, parameter and node too.
        clock: what times each node; None: nothing is timed.
        progress: told (layouts done, layouts, the layout that begins).

    Raises:
        ValueError: an unknown peer or layout.
        ImportError: diffusers was asked for and is not installed.
    """
    chosen = candidate or OURS()
    name, home = the_peer(against)
    theirs = BLOCK.by(home)
    results = []
    with exact_matmul():
        for done, layout in enumerate(layouts):
            progress(done, len(layouts), layout)
            case = make_block_case(weights, layout, seed)
            judge = BLOCK.by(golden.Golden(case.dtype))
            whole = block_peer.whole if home is peer else None
            with torch.no_grad():
                caught = None if whole is None else whole(case)
            found, own, history = stages(BLOCK, case, chosen, theirs, judge, caught, clock)
            patched = patched_runner(case, chosen)
            beside = None if patched is None else _patched(case, patched, own)
            planted = () if done else controls(case, history, theirs, judge)
            del caught, own, history
            gradients = block_gradients(case, chosen, theirs, judge, whole, patched, seed) if with_backward else None
            counts = len(case.timestep), len(case.index)
            title = f"{layout}, S = {counts[1]}"
            results.append(CaseResult(title, *counts, layout, seed, found, gradients, planted, beside))
    return recorded(KIND, weights, chosen, name, results, check_block(results))


@torch.no_grad()
def _patched(case: BlockCase, runner: Runner, own: History) -> Agreement:
    return agreement(runner(case)[OUTPUT], own[OUTPUT])
