"""Cases of ``adaln_gate_residual`` whose digests are committed, and what follows from its index."""

from dataclasses import replace

from samebits.ops.rmsnorm_modulated.cases import derive as derive
from samebits.verify.goldens import Case, standard_cases

CASES = (
    *(replace(case, sizes=(*case.sizes, ("R", 5))) for case in standard_cases("H")),
    Case("t700_40", 700, (("H", 40), ("R", 2))),  # more than one tile for a row of the table
    Case("t3_40_rows_unused", 3, (("H", 40), ("R", 9))),
)

TINY = {"residual": (-124,), "y": (0, -124), "grad_out": (-124, 0)}
"""Columns in turn: products of y and its gradient that are subnormal, and subnormal results of the forward."""
