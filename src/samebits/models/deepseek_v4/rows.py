"""Does a row get the same bits alone as in the batch? Asked of both models, per boundary, with the cause beside it.

Run from the streams, a row passes the controller first, whose library matmul may take another order for one row than
for many. So each operator is also judged on rows that reach it with the same bits, which is what it answers for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

import samebits
from samebits.models.deepseek_v4.replace import SITES, replaced
from samebits.models.difference import rows_differing

FROM_STREAMS = "its streams"
SAME_INPUT = "the bits it has in the batch"


@dataclass(frozen=True)
class RowCheck:
    """How many rows change their bits when they run alone."""

    module: str
    boundary: str
    patched: bool
    given: str
    """What the row was given: its streams, so that it passed everything before, or the same bits as in the batch."""
    rows: int
    varying: int

    @property
    def must_hold(self) -> bool:
        """Our operators answer for this one: given the same bits, a row may not vary."""
        return self.patched and self.given != FROM_STREAMS


@dataclass(frozen=True)
class _Settings:
    contracts: dict[str, str]
    backend: str | None
    chosen: list[int]


def check_rows(
    module: nn.Module, streams: Tensor, contracts: dict[str, str], backend: str | None = None, limit: int = 32
) -> tuple[RowCheck, ...]:
    """Both sites on ``streams`` (B, S, 4, D), in the batch and one row at a time, for at most ``limit`` spread rows."""
    count = streams.shape[0] * streams.shape[1]
    chosen = torch.linspace(0, count - 1, min(limit, count)).long().unique().tolist()
    settings = _Settings(contracts, backend, chosen)
    with torch.no_grad():
        return tuple(check for site in SITES for check in _check_site(module, site, streams, settings))


def _check_site(module: nn.Module, site: tuple[str, str], streams: Tensor, settings: _Settings) -> list[RowCheck]:
    collapse, norm = site
    pre: list[Tensor] = []
    observed = replaced(
        module, settings.contracts, backend=settings.backend, on_collapse=lambda _, weights: pre.append(weights)
    )
    with observed:
        ours = _Runs(module, site, streams, settings.chosen)
    theirs = _Runs(module, site, streams, settings.chosen)
    single = streams.reshape(-1, 1, 1, *streams.shape[2:])
    # pre shows only in the patched run; the class computes it with the same code from calls of the same shapes
    pre_varying = _varying(pre[0], pre[1:], settings.chosen)
    weights = pre[0].reshape(-1, 1, 1, pre[0].shape[-1])
    direct = partial(samebits.h_aggregate, contract=settings.contracts["h_aggregate"], backend=settings.backend)
    collapsed_directly = [direct(weights[row], single[row]) for row in settings.chosen]

    checks = [_row_check(collapse, "pre", True, FROM_STREAMS, pre_varying)]
    for patched, runs in ((True, ours), (False, theirs)):
        for part in ("post", "comb", "collapsed"):
            checks.append(_row_check(collapse, part, patched, FROM_STREAMS, runs.varying[part]))
        if patched:
            varying = _varying(runs.collapsed, collapsed_directly, settings.chosen)
            checks.append(_row_check(collapse, "collapsed", patched, SAME_INPUT, varying))
        checks.append(_row_check(norm, "output", patched, FROM_STREAMS, runs.varying["norm"]))
        checks.append(_row_check(norm, "output", patched, SAME_INPUT, runs.varying["norm given input"]))
    return checks


class _Runs:
    """One site in the batch and row by row; which of the chosen rows vary, per boundary."""

    def __init__(self, module: nn.Module, site: tuple[str, str], streams: Tensor, chosen: list[int]) -> None:
        hyper_connection, norm = (module.get_submodule(name) for name in site)
        batch = hyper_connection(streams)
        single = streams.reshape(-1, 1, 1, *streams.shape[2:])
        alone = [hyper_connection(single[row]) for row in chosen]
        self.collapsed: Tensor = batch[2]
        self.varying = {
            part: _varying(batch[index], [parts[index] for parts in alone], chosen)
            for index, part in enumerate(("post", "comb", "collapsed"))
        }
        normalised = norm(self.collapsed)
        rows = self.collapsed.reshape(-1, 1, 1, self.collapsed.shape[-1])
        self.varying["norm"] = _varying(normalised, [norm(parts[2]) for parts in alone], chosen)
        self.varying["norm given input"] = _varying(normalised, [norm(rows[row]) for row in chosen], chosen)


def _varying(batch: Tensor, alone: list[Tensor], chosen: list[int]) -> Tensor:
    picked = batch.reshape(-1, *batch.shape[2:])[chosen]
    return rows_differing(picked, torch.cat(alone).reshape(picked.shape))


def _row_check(module: str, boundary: str, patched: bool, given: str, varying: Tensor) -> RowCheck:
    return RowCheck(module, boundary, patched, given, len(varying), int(varying.sum()))
