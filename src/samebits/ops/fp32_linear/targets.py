"""Speed targets of ``fp32_linear`` on an H200: the input and the output projection of MiniMax-H3's video rows, beside cuBLAS."""

from samebits.bench.targets import Target

_IN, _OUT = (("N", 5376), ("K", 96)), (("N", 96), ("K", 5376))

TARGETS = tuple(
    target
    for sizes in (_IN, _OUT)
    for target in (
        Target("fwd", sizes, (264, None), "ratio", at_least=0.5, peer="F.linear", measure=(264, 3160)),
        Target("bwd", sizes, (264, None), "ratio", at_least=0.5, peer="F.linear", measure=(264, 3160)),
    )
)
