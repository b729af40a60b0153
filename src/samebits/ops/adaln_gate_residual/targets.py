"""Speed targets of ``adaln_gate_residual`` on an H200. An empty kernel takes about 2.8 us there."""

from samebits.bench.targets import Target

_H3 = (("H", 5376), ("R", 9))

TARGETS = (
    Target("fwd", _H3, (131072, 131072), "us", at_most=1150.0),
    Target("bwd", _H3, (131072, 131072), "us", at_most=1600.0),
    Target("fwd+bwd", _H3, (264, 4097), "ratio", at_least=1.0, peer="diffusers eager", measure=(264, 4097)),
)
