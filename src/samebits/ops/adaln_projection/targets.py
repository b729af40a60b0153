"""Speed targets of ``adaln_projection`` on an H200, BF16: three timesteps of a MiniMax-H3 block.

The weight of a block is 520 MB: 124 us to read once at the 4.2 TB/s of a copy. A backward writes its gradient once and
reads it once more for grad_temb, so the floor of all three gradients is twice that.
"""

from samebits.bench.targets import Target

_BLOCK = (("N", 96768), ("D", 2688))
_KCHAIN = ("kchain",)

TARGETS = (
    *(
        Target("fwd", _BLOCK, (rows, rows), "ratio", at_least=0.95, contracts=_KCHAIN, peer="diffusers eager")
        for rows in (1, 3, 4)
    ),
    Target("fwd", _BLOCK, (3, 3), "us", at_most=137.0, contracts=_KCHAIN),
    Target("bwd", _BLOCK, (3, 3), "copy_fraction", at_least=0.66, contracts=_KCHAIN),
)
