"""Speed targets of ``linear`` on an H200, BF16: the four projections of a MiniMax-H3 block, beside cuBLAS by its own choice."""

from samebits.bench.targets import Target

SHAPES = {"qkv": (21504, 5376), "o": (5376, 7168), "gate_up": (28672, 5376), "down": (5376, 14336)}
"""(N, K) of ``weight``."""

TARGETS = tuple(
    Target("fwd", (("N", n), ("K", k)), rows, "ratio", at_least=least, peer="F.linear", measure=measured)
    for n, k in SHAPES.values()
    for rows, least, measured in (((1, 64), 0.90, (16,)), ((264, None), 0.95, (264, 3160)))
)
