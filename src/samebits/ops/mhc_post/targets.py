"""Speed targets of ``mhc_post`` on an H200. An empty kernel takes about 2.8 us there."""

from samebits.bench.targets import Target

_FLASH, _PRO = (("D", 4096),), (("D", 7168),)

TARGETS = (
    Target("fwd", _FLASH, (8192, None), "copy_fraction", at_least=0.95, measure=(8192, 65536)),
    Target("fwd", _PRO, (8192, None), "copy_fraction", at_least=0.95),
    Target("fwd", _FLASH, (1, 1), "us", at_most=4.9),
    Target("fwd", _FLASH, (128, 128), "us", at_most=7.5),
    Target("bwd", _FLASH, (8192, None), "copy_fraction", at_least=0.75, measure=(8192, 65536)),
    Target("bwd", _PRO, (8192, None), "copy_fraction", at_least=0.75),
)
