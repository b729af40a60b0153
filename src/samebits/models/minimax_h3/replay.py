"""Replay of the conditioning chain: candidate, peer and golden stage by stage, forward and backward, and what must hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from samebits.models.minimax_h3 import backward, golden
from samebits.models.minimax_h3.candidate import Candidate
from samebits.models.minimax_h3.forward import stages
from samebits.models.minimax_h3.latency import Clock
from samebits.models.minimax_h3.record import CaseResult, Replay, exact_matmul, recorded, the_peer
from samebits.models.minimax_h3.rules import check
from samebits.models.minimax_h3.stages import CONDITIONING, make_case
from samebits.models.minimax_h3.weights import Weights

KIND = "minimax_h3_conditioning_replay"


def replay(
    weights: Weights,
    *,
    timesteps: Sequence[int],
    seq_lens: Sequence[int],
    candidate: Candidate | None = None,
    against: str | None = None,
    layout: str = "interleaved",
    seed: int = 0,
    with_backward: bool = False,
    clock: Clock | None = None,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> Replay:
    """Every case of T x S on the device of ``weights``.

    Args:
        candidate: what is replayed; our operators by default.
        against: ``"diffusers"`` or ``"provider"``; None takes diffusers where it is installed.
        layout: ``"interleaved"`` or ``"block"``.
        with_backward: the gradients of the timestep embedder and the projection too.
        clock: what times each stage; None: nothing is timed.
        progress: told (cases done, cases, the case that begins).

    Raises:
        ValueError: an unknown peer or layout, or a layout that cannot have T timesteps in S rows.
        ImportError: diffusers was asked for and is not installed.
    """
    chosen = candidate or Candidate()
    name, home = the_peer(against)
    theirs = CONDITIONING.by(home)
    todo = [(t, s) for s in seq_lens for t in timesteps]
    results = []
    with exact_matmul():
        for done, (t, s) in enumerate(todo):
            title = f"T = {t}, S = {s}"
            progress(done, len(todo), title)
            case = make_case(weights, t, s, seed, layout)
            gradients = backward.gradients(case, chosen, theirs, seed) if with_backward else None
            judge = CONDITIONING.by(golden.Golden(case.dtype))
            found, _, _ = stages(CONDITIONING, case, chosen, theirs, judge, clock=clock)
            results.append(CaseResult(title, t, s, layout, seed, found, gradients))
    return recorded(KIND, weights, chosen, name, results, check(results))
