"""Speed targets of ``linear`` on an H200, BF16: the four projections of a MiniMax-H3 block, beside cuBLAS by its own choice."""

from samebits.bench.targets import Target

SHAPES = {"qkv": (21504, 5376), "o": (5376, 7168), "gate_up": (28672, 5376), "down": (5376, 14336)}
"""(N, K) of ``weight``."""

_FORWARD = ((1, 64), 0.90, (16,)), ((264, None), 0.95, (264, 3160))
"""Rows, least part of the library's speed, and the rows that the quick sweep takes."""

TARGETS = (
    *(
        Target("fwd", (("N", n), ("K", k)), rows, "ratio", at_least=least, peer="F.linear", measure=measured)
        for n, k in SHAPES.values()
        for rows, least, measured in _FORWARD
    ),
    *(
        Target("bwd", (("N", n), ("K", k)), (264, None), "ratio", at_least=0.95, peer="F.linear", measure=(264, 3160))
        for n, k in SHAPES.values()
    ),
)
"""The backward computes both gradients; the library's has 16-bit results, ours also FP32 ones."""
