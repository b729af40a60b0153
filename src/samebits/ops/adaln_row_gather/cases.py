"""Cases of ``adaln_row_gather`` whose digests are committed, and what follows from its index."""

from samebits.ops.rmsnorm_modulated.cases import derive as derive
from samebits.verify.goldens import Case
from samebits.verify.inputs import PATTERNS


def _sizes(r: int, h: int) -> tuple[tuple[str, int], ...]:
    return (("R", r), ("H", h))


CASES = (
    Case("t16_r9_128", 16, _sizes(9, 128)),
    Case("t7_r1_17", 7, _sizes(1, 17)),
    Case("t2_r3_1", 2, _sizes(3, 1)),
    Case("t3_r12_1344", 3, _sizes(12, 1344)),
    Case("t33_r5_136_other_seed", 33, _sizes(5, 136), seed=1),
    Case("t16_r9_128_second_dtypes", 16, _sizes(9, 128), second_dtypes=True),
    Case("t700_r2_40", 700, _sizes(2, 40)),  # more than one tile for a row of the table
    *(Case(f"t6_r5_200_{p}", 6, _sizes(5, 200), pattern=p) for p in PATTERNS if p != "normal"),
)

TINY = {f"grad_{name}_{half}": (-124,) for name in ("shift", "scale", "gate") for half in ("msa", "mlp")}
"""Gradients are only added: they must be subnormal themselves to tell what is flushed."""

FLUSHING_SHOWS = ("grad_table",)
"""The results of the forward are copies: nothing is computed that could be flushed."""
