"""Speed targets of ``timestep_sinusoid`` on an H200: an empty kernel (2.8 us) and one trip to memory."""

from samebits.bench.targets import Target

_F = (("F", 128),)

TARGETS = (
    Target("fwd", _F, (1, 8), "us", at_most=4.5),
    Target("fwd", _F, (1, 8), "ratio", at_least=1.0, peer="diffusers"),
    Target("bwd", _F, (1, 8), "us", at_most=6.0),
)
