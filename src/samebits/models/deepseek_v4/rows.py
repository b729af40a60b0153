"""Does a row get the same bits in any batch? Asked of both models at every site, given the site's inputs.

Rows are run alone, and in halves of the batch. Our operators answer for it; what the class does is shown beside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from samebits.models.deepseek_v4.sites import Options, Site, Tensors
from samebits.models.difference import rows_differing

GIVEN = {
    "connection": "its streams",
    "norm": "its input",
    "mix": "its streams, weights and sublayer output",
    "head": "its streams",
}


@dataclass(frozen=True)
class RowCheck:
    """How many rows change their bits with the batch they are in."""

    module: str
    boundary: str
    """Of the module: ``post``, ``comb``, ``collapsed`` or ``output``."""
    name: str
    """Of the boundary in a record."""
    patched: bool
    given: str
    """What the row was given: the same bits in each batch."""
    rows: int
    varying: int

    @property
    def must_hold(self) -> bool:
        """Our operators answer for it: given the same bits, a row may not vary."""
        return self.patched


def check_rows(site: Site, rows: Tensors, options: Options, limit: int) -> list[RowCheck]:
    """``rows`` are the site's inputs; at most ``limit`` spread rows are run alone, and both halves of the batch."""
    count = rows[0].shape[0]
    chosen = torch.linspace(0, count - 1, min(limit, count)).long().unique().tolist()
    parts = [[row] for row in chosen]
    if count > 1:
        parts += [list(range(count // 2)), list(range(count // 2, count))]
    found = []
    with torch.no_grad():
        for patched in (True, False):
            run = (lambda given: site.ours(given, options)) if patched else site.theirs
            for name, varying in zip(site.outputs, _varying(run, rows, parts), strict=True):
                checked = sorted({row for part in parts for row in part})
                found.append(_check(site, name, patched, len(checked), int(varying.sum())))
    return found


def _varying(run: Callable[[Tensors], Tensors], rows: Tensors, parts: Sequence[list[int]]) -> list[Tensor]:
    """For each output, which rows of the whole batch have other bits in some part."""
    whole = run(rows)
    varying = [torch.zeros(rows[0].shape[0], dtype=torch.bool) for _ in whole]
    for part in parts:
        outputs = run(tuple(tensor[part[0] : part[-1] + 1] for tensor in rows))
        for flags, batch, alone in zip(varying, whole, outputs, strict=True):
            flags[part] |= rows_differing(batch[part[0] : part[-1] + 1], alone).cpu()
    return varying


def _check(site: Site, boundary: str, patched: bool, rows: int, varying: int) -> RowCheck:
    part = boundary.removeprefix(f"{site.name}.") if boundary.startswith(f"{site.name}.") else "output"
    return RowCheck(site.name, part, boundary, patched, GIVEN[site.kind], rows, varying)
