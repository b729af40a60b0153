"""Speed targets of ``mhc_pre`` on an H200: what DeepSeek's TileKernels need for the same work at D = 4096."""

from samebits.bench.targets import Target

_D = (("D", 4096),)
_FAST = ("fast", "fast-dsv4")

TARGETS = (
    Target(
        "fwd", _D, (1, None), "ratio", at_least=1.0, contracts=_FAST, peer="TileKernels", measure=(1, 128, 4096, 32768)
    ),
    Target("fwd", _D, (1, 1), "us", at_most=70.8, contracts=_FAST),
    Target("fwd", _D, (128, 128), "us", at_most=72.4, contracts=_FAST),
    Target("fwd", _D, (4096, 4096), "us", at_most=113.0, contracts=_FAST),
    Target("fwd", _D, (32768, 32768), "us", at_most=825.0, contracts=_FAST),
)
