"""Speed targets of ``swiglu`` on an H200: those of the sequence lengths at which MiniMax-H3 is replayed."""

from samebits.bench.targets import Target

_H3 = (("F", 14336),)

TARGETS = (
    Target("fwd", _H3, (3160, None), "copy_fraction", at_least=0.8, measure=(3160, 16384)),
    Target("bwd", _H3, (3160, None), "copy_fraction", at_least=0.8, measure=(3160, 16384)),
    Target("fwd+bwd", _H3, (264, 3159), "ratio", at_least=1.0, peer="diffusers eager", measure=(264,)),
    Target("fwd+bwd", _H3, (264, 3159), "ratio", at_least=1.0, peer="torch.compile", measure=(264,)),
)
