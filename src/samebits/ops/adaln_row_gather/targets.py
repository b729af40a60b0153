"""Speed targets of ``adaln_row_gather`` on an H200."""

from samebits.bench.targets import Target

_H3 = (("R", 9), ("H", 5376))

TARGETS = (
    Target("fwd", _H3, (131072, 131072), "copy_fraction", at_least=0.8),
    Target("bwd", _H3, (131072, 131072), "copy_fraction", at_least=0.6),
    *(
        Target(direction, _H3, (264, 4097), "ratio", at_least=1.0, peer="diffusers eager", measure=(264, 4097))
        for direction in ("fwd", "bwd")
    ),
)
