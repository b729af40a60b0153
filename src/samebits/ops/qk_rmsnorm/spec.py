"""The contract of ``qk_rmsnorm``. Source: norm_q and norm_k of MiniMax-H3's attention, ``torch.nn.RMSNorm`` over each head."""

from samebits.contract import ON_H200, BackendSpec, Contract, OpSpec, Pass, Reduction, Result, TensorArg
from samebits.ops.rmsnorm.spec import DTYPES, EPS, GRAD_X, NORM_EDGES, RSQRT, RSTD, TILES
from samebits.ops.rope_3axis.spec import HEAD_LIMITS


def over_columns(reduction: Reduction) -> Reduction:
    """A sum of ``rmsnorm`` over the columns of a row, as one over the channels of a head."""
    return Reduction(reduction.result, "D", reduction.order.replace("divided by H", "divided by D"))


NORM_REDUCTIONS = (
    over_columns(RSTD),
    over_columns(GRAD_X),
    Reduction(
        "grad_weight",
        "T",
        "rows of heads as they stand, the heads of a position ascending, then those of the next, in tiles of 256; "
        f"{TILES}; the tiles left-folded ascending from +0",
    ),
)
NORM_ROUNDING = (
    "grad_x: FP32, or one rounding to the dtype of x where grad_dtype asks for it",
    "grad_weight: FP32 sums, one rounding at the end where grad_dtype asks for it",
)
HEAD_EDGES = ("T = 0 gives empty rows and grad_weight = 0", *(edge.replace(" H ", " D ") for edge in NORM_EDGES))
X = TensorArg("x", ("N", "D"), DTYPES, doc="N heads of D channels at each position")
WEIGHT = TensorArg("weight", ("D",), DTYPES, rows=False, like="x", sample="weight", doc="gain, shared by the heads")
RSTD_RESULT = Result("rstd", ("N",), "float32", hidden=True, doc="rsqrt(mean(x^2) + eps) of each head")
SAVED = (
    TensorArg("grad_y", ("N", "D"), DTYPES, doc="upstream gradient of y"),
    TensorArg("x", ("N", "D"), DTYPES, like="grad_y"),
    TensorArg("weight", ("D",), DTYPES, rows=False, like="grad_y", sample="weight"),
)
SAVED_RSTD = TensorArg("rstd", ("N",), ("float32",), doc="as the forward pass returned it; never recomputed")
GRADIENTS = (
    Result("grad_x", ("N", "D"), "grad", doc="gradient of x"),
    Result("grad_weight", ("D",), "grad", rows=False, doc="gradient of weight"),
)

SPEC = OpSpec(
    name="qk_rmsnorm",
    summary="RMSNorm of every head of q or k, read in place from a fused projection: rd(weight * (rstd * x)).",
    forward=Pass(inputs=(X, WEIGHT), results=(Result("y", ("N", "D"), "x", doc="normalised heads"), RSTD_RESULT)),
    backward=Pass(inputs=(*SAVED, SAVED_RSTD), results=GRADIENTS),
    scalars=(EPS,),
    size_limits=HEAD_LIMITS,
    tuned=(("N", (56,)), ("D", (128,))),
    contracts=(
        Contract(
            name="torch",
            summary="the bits of rmsnorm on the rows (position, head)",
            exactness="device",
            reductions=NORM_REDUCTIONS,
            rounding=("y: FP32 to the dtype of x, once, after the product with weight", *NORM_ROUNDING),
            fma="explicit",
            approximate=RSQRT,
            source="torch.nn.functional.rms_norm on CUDA; the backward is ours",
            proofs=ON_H200,
            chain_rows=0,
        ),
    ),
    backends=(BackendSpec("cuda", min_arch=80), BackendSpec("reference")),
    edges=HEAD_EDGES,
)
