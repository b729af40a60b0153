"""Speed targets of the fused AdaLN nodes on an H200, judged on the lines of ``nodes_bench``: never slower than diffusers."""

from samebits.bench.targets import Target

_H = (("H", 5376),)
_EAGER = "diffusers eager"

TARGETS = tuple(
    Target(direction, _H, (1, None), "ratio", at_least=1.0, contracts=(node,), peer=_EAGER)
    for node in ("adaln_modulation", "final_adaln_out")
    for direction in ("fwd", "bwd", "fwd+bwd")
)
