"""The contract of ``swiglu``. Source: the activation of MiniMax-H3's feed-forward layers (diffusers' ``SwiGLU``)."""

from samebits.contract import ON_H200, BackendSpec, Contract, OpSpec, Pass, Result, TensorArg
from samebits.ops.rmsnorm.spec import DTYPES

SPEC = OpSpec(
    name="swiglu",
    summary="Multiply the first half of every row by the SiLU of the second: rd(value * rd(silu(gate))).",
    forward=Pass(
        inputs=(TensorArg("x", ("P", "F"), DTYPES, doc="value, then gate"),),
        results=(Result("y", ("F",), "x", tolerance="elementwise", doc="gated values"),),
    ),
    backward=Pass(
        inputs=(
            TensorArg("grad_y", ("F",), DTYPES, doc="upstream gradient of y"),
            TensorArg("x", ("P", "F"), DTYPES, like="grad_y", doc="value, then gate"),
        ),
        results=(
            Result("grad_x", ("P", "F"), "grad_y", tolerance="elementwise", doc="gradients of value, then of gate"),
        ),
    ),
    fixed_sizes=(("P", 2),),
    size_limits=(("F", 1, 2**24),),
    tuned=(("F", (14336,)),),
    contracts=(
        Contract(
            name="torch",
            summary="the element-wise operations of the model and of torch's autograd, each rounded",
            exactness="device",
            reductions=(),
            rounding=(
                "silu(gate) = gate / (1 + exp(-gate)), an IEEE division in FP32: to the dtype of x",
                "y: its product with value, to the dtype of x",
                "gradient of value: grad_y * rd(silu(gate)), to the dtype of x",
                "grad_y * value: to the dtype of x; then gradient of gate: (that * s) * fma(gate, 1 - s, 1) in FP32 with "
                "s = 1 / (1 + exp(-gate)), to the dtype of x",
            ),
            fma="explicit",  # the one that torch's own kernel has
            approximate=("ex2.approx.ftz.f32", "rcp.approx.ftz.f32"),  # inside exp and the IEEE division, nowhere else
            source="diffusers' SwiGLU, forward and its derivative by torch's autograd on a GPU",
            proofs=ON_H200,
        ),
    ),
    backends=(BackendSpec("cuda", min_arch=80), BackendSpec("reference")),
    edges=(
        "T = 0 gives empty rows",
        "a gate of -infinity gives NaN, as -infinity / infinity does; NaN and infinity stay in their columns",
    ),
)
