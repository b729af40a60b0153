"""Speed targets of ``rmsnorm_residual`` on an H200. An empty kernel takes about 2.8 us there."""

from samebits.bench.targets import Target

_D = (("D", 4096),)
_ASCENDING = ("ascending",)
_TREE = ("tree512",)

TARGETS = (
    Target("fwd", _D, (131072, None), "copy_fraction", at_least=0.80, contracts=_ASCENDING),
    Target(
        "fwd",
        _D,
        (32768, None),
        "ratio",
        at_least=1.0,
        contracts=_ASCENDING,
        peer="rms_norm + clone",
        measure=(32768, 131072),
    ),
    Target("fwd+bwd", _D, (131072, 131072), "ratio", at_least=6.0, contracts=_ASCENDING, peer="pytorch eager"),
    Target("fwd+bwd", _D, (131072, 131072), "extra_over_outputs", at_most=1.0, contracts=_ASCENDING),
    Target("fwd", _D, (1, 1), "us", at_most=6.0, contracts=_TREE),
    Target("fwd", _D, (128, 128), "us", at_most=9.0, contracts=_TREE),
)
