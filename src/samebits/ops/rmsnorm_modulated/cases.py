"""Cases of ``rmsnorm_modulated`` whose digests are committed, and what follows from its index."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from samebits.contract import OpSpec
from samebits.segmentation import sorted_positions
from samebits.verify.goldens import Case, standard_cases

CASES = (
    *(replace(case, sizes=(*case.sizes, ("R", 5))) for case in standard_cases("H")),
    Case("t700_40", 700, (("H", 40), ("R", 2))),  # more than one tile for a row of the table
    Case("t3_40_rows_unused", 3, (("H", 40), ("R", 9))),
)

TINY = {"x": (0, -124), "grad_y": (-124,)}
"""As for ``rmsnorm``."""

PORTABLE = ("grad_x", "grad_weight", "grad_shift", "grad_scale")
"""``rsqrt`` is the device's own, so y and rstd are not; given rstd, the backward uses only IEEE operations."""

FLUSHING_SHOWS = ("grad_x", "grad_weight", "grad_shift", "grad_scale")
"""Where a machine that flushes subnormals gives other digests, in some case."""


def derive(spec: OpSpec, known: Mapping[str, Tensor | None], sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """order and bounds of the index."""
    index = known["index"]
    assert index is not None
    order, bounds = sorted_positions(index.reshape(-1), sizes["R"])
    return {"order": order.view(index.shape), "bounds": bounds}
