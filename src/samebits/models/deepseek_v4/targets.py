"""Speed targets of a whole boundary (pre mix, norm, post mix) on an H200, judged on the lines of ``boundary_bench``."""

from samebits.bench.targets import Target

_D = (("D", 4096),)
_FAST = ("fast-dsv4",)
_EAGER, _COMPILED, _RIVAL = "transformers eager", "transformers compiled", "TileKernels"

TARGETS = (
    Target("fwd", _D, (4096, None), "ratio", at_least=8.0, contracts=_FAST, peer=_EAGER),
    Target("fwd", _D, (4096, None), "ratio", at_least=2.0, contracts=_FAST, peer=_COMPILED),
    Target("fwd+bwd", _D, (4096, None), "ratio", at_least=6.0, contracts=_FAST, peer=_EAGER),
    Target("bwd", _D, (4096, None), "ratio", at_least=1.0, contracts=_FAST, peer=_RIVAL),
)
