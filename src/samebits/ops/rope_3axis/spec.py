"""The contract of ``rope_3axis``. Source: the rotary embedding of MiniMax-H3, partial and of three axes."""

from samebits.contract import ON_H200, BackendSpec, Contract, OpSpec, Pass, Result, TensorArg
from samebits.ops.rmsnorm.spec import DTYPES

MOST_HEADS, MOST_COLUMNS = 2**16, 256
ANGLE_INPUTS = (
    TensorArg("cos", ("R",), ("float32",), doc="cosines of the angles of each position, for both halves"),
    TensorArg("sin", ("R",), ("float32",), doc="their sines"),
)
HEAD_LIMITS = (("N", 1, MOST_HEADS), ("D", 1, MOST_COLUMNS))
ROTATED_LIMIT = ("R", 2, MOST_COLUMNS)
PAIRED = (("R", "D"),)
ANGLES = "cos, sin: to the dtype of x, at each use"
ROTATION = (
    ANGLES,
    "both products of a rotated column: to the dtype of x",
    "y: their sum, to the dtype of x; columns from R on are copied, bits and all",
)
ROTATION_BACK = (
    "both products of a rotated column of the gradient, and their sum: to the dtype of x; adding the zeros of autograd's "
    "slices turns -0 into +0 in every column"
)
ROTATION_EDGES = (
    "R is even and at most D; an odd number or more is a ValueError",
    "cos and sin are constants: no gradient reaches them",
)

SPEC = OpSpec(
    name="rope_3axis",
    summary="Rotate the first R channels of every head by the angles of its position, and pass the others.",
    forward=Pass(
        inputs=(TensorArg("x", ("N", "D"), DTYPES, doc="N heads of D channels at each position"), *ANGLE_INPUTS),
        results=(Result("y", ("N", "D"), "x", tolerance="elementwise", doc="rotated heads"),),
    ),
    backward=Pass(
        inputs=(TensorArg("grad_y", ("N", "D"), DTYPES, doc="upstream gradient of y"), *ANGLE_INPUTS),
        results=(Result("grad_x", ("N", "D"), "grad_y", tolerance="elementwise", doc="gradient of x"),),
    ),
    size_limits=(*HEAD_LIMITS, ROTATED_LIMIT),
    paired=PAIRED,
    tuned=(("N", (56,)), ("D", (128,)), ("R", (96,))),
    contracts=(
        Contract(
            name="torch",
            summary="the element-wise operations of the model and of autograd, each rounded",
            exactness="portable",
            reductions=(),
            rounding=(*ROTATION, f"grad_x: {ROTATION_BACK}"),
            fma="explicit",  # with an addend of zero or a factor of one: products and sums of pairs of 16-bit numbers
            source="diffusers' transformer_minimax_h3, forward and its derivative by torch's autograd",
            proofs=ON_H200,
        ),
    ),
    backends=(BackendSpec("cuda", min_arch=80), BackendSpec("reference")),
    edges=("T = 0 gives empty rows", "NaN and infinity stay in their pair of columns", *ROTATION_EDGES),
)
