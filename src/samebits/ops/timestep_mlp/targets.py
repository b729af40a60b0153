"""Speed targets of ``timestep_mlp`` on an H200: no slower than cuBLAS for the one to four times of a packed sequence, and within
a small factor of it where rows are many."""

from samebits.bench.targets import Target

_H3 = (("K", 256), ("F", 5376), ("D", 2688))

TARGETS = (
    *(Target("fwd", _H3, (t, t), "ratio", at_least=1.0, peer="diffusers") for t in (1, 2, 3, 4)),
    Target("fwd", _H3, (1, 8), "us", at_most=35.0),
    Target("bwd", _H3, (1, 8), "us", at_most=75.0),
    Target("fwd", _H3, (1024, 4096), "ratio", at_least=0.4, peer="diffusers"),
    Target("bwd", _H3, (1024, 4096), "ratio", at_least=0.3, peer="diffusers"),
)
