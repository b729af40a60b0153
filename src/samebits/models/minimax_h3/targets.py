"""Speed targets on an H200, judged on the lines of ``nodes_bench`` and ``block_bench``, beside diffusers in the same run."""

from samebits.bench.targets import Target

_H = (("H", 5376),)
_EAGER = "diffusers eager"
_NODES = tuple(
    Target(direction, _H, (1, None), "ratio", at_least=1.0, contracts=(node,), peer=_EAGER)
    for node in ("adaln_modulation", "final_adaln_out")
    for direction in ("fwd", "bwd", "fwd+bwd")
)
"""The fused AdaLN nodes are never slower."""
_BLOCK = (
    Target("fwd", _H, (3160, None), "ratio", at_least=1 / 0.92, contracts=("block",), peer=_EAGER),
    Target("fwd+bwd", _H, (3160, None), "ratio", at_least=1 / 0.9, contracts=("block",), peer=_EAGER),
    Target("fwd", _H, (1, 925), "ratio", at_least=2.0, contracts=("block",), peer="diffusers without a graph"),
    Target(
        "fwd", _H, (1, 925), "ratio", at_least=1 / 0.9, contracts=("block",), peer="diffusers, both without a graph"
    ),
)
TARGETS = (*_NODES, *_BLOCK)
