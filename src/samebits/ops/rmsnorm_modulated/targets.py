"""Speed targets of ``rmsnorm_modulated`` on an H200. An empty kernel takes about 2.8 us there."""

from samebits.bench.targets import Target

_H3 = (("H", 5376), ("R", 9))
_EAGER = "diffusers eager"

TARGETS = (
    Target("fwd", _H3, (32768, None), "copy_fraction", at_least=0.85),
    Target("fwd", _H3, (32768, None), "ratio", at_least=5.0, peer=_EAGER, measure=(32768, 131072)),
    Target("bwd", _H3, (131072, 131072), "us", at_most=2000.0),
    Target("fwd+bwd", _H3, (264, 4097), "ratio", at_least=1.0, peer=_EAGER, measure=(264, 4097)),
)
