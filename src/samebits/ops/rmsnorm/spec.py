"""The contract of ``rmsnorm``. Source: ``torch.nn.RMSNorm`` as MiniMax-H3 uses it (norm1, norm2, final_norm, norm_q, norm_k)."""

from samebits.contract import ON_H200, BackendSpec, Contract, OpSpec, Pass, Reduction, Result, Scalar, TensorArg

DTYPES = ("bfloat16", "float16", "float32")
RSTD = Reduction(
    "rstd",
    "H",
    "torch's order: columns in vectors of 4; vector v belongs to chain v mod 128; a chain adds its squares by fused "
    "multiply-add from +0 over ascending columns; four groups of 32 chains, each by the halving tree 16, 8, 4, 2, 1; then "
    "(g0 + g2) + (g1 + g3); divided by H with a true IEEE division",
)
GRAD_X = Reduction(
    "grad_x",
    "H",
    "vectors of 8 consecutive columns are left folds from +0, each product rounded first; 32 consecutive vectors by the "
    "halving tree 16, 8, 4, 2, 1; groups of 256 columns left-folded ascending from +0; divided by H with a true IEEE division",
)
TILES = "inside a tile one left fold from +0 per column, each product rounded first"
RSQRT = ("rsqrt.approx.f32",)
EPS = Scalar(
    "eps",
    default=1e-5,
    minimum=2.0**-126,
    why="so that rsqrt never sees zero or a subnormal, where devices and backends disagree",
    doc="added to the mean square before rsqrt",
)
NORM_EDGES = (
    "a zero row gives rstd = rsqrt(eps) and finite gradients",
    "a row whose sum of squares overflows FP32 gives rstd = 0, as torch does",
    "NaN and infinity stay in their row, and reach the gradients of what rows share in their columns",
    "where H is no multiple of 4, or a base address is not aligned to 4 elements, the order stays this one, with a ragged last "
    "vector; torch takes another path there, with other bits",
)

SPEC = OpSpec(
    name="rmsnorm",
    summary="RMSNorm with the bits of torch's fused CUDA kernel: rd(weight * (rstd * x)).",
    forward=Pass(
        inputs=(
            TensorArg("x", ("H",), DTYPES, doc="rows to normalise"),
            TensorArg("weight", ("H",), DTYPES, rows=False, like="x", sample="weight", doc="gain, in the dtype of x"),
        ),
        results=(
            Result("y", ("H",), "x", doc="normalised rows"),
            Result("rstd", (), "float32", hidden=True, doc="rsqrt(mean(x^2) + eps)"),
        ),
    ),
    backward=Pass(
        inputs=(
            TensorArg("grad_y", ("H",), DTYPES, doc="upstream gradient of y"),
            TensorArg("x", ("H",), DTYPES, like="grad_y"),
            TensorArg("weight", ("H",), DTYPES, rows=False, like="grad_y", sample="weight"),
            TensorArg("rstd", (), ("float32",), doc="as the forward pass returned it; never recomputed"),
        ),
        results=(
            Result("grad_x", ("H",), "grad", doc="gradient of x"),
            Result("grad_weight", ("H",), "grad", rows=False, doc="gradient of weight"),
        ),
    ),
    scalars=(EPS,),
    size_limits=(("H", 1, 2**24),),
    tuned=(("H", (128, 5376)),),
    contracts=(
        Contract(
            name="torch",
            summary="sum of squares in the order of torch's vectorised CUDA RMSNorm",
            exactness="device",
            reductions=(
                RSTD,
                GRAD_X,
                Reduction(
                    "grad_weight",
                    "T",
                    f"rows in tiles of 256, as they stand; {TILES}; the tiles left-folded ascending from +0",
                ),
            ),
            rounding=(
                "y: FP32 to the dtype of x, once, after the product with weight",
                "grad_x: FP32, or one rounding to the dtype of x where grad_dtype asks for it",
                "grad_weight: FP32 sums, one rounding at the end where grad_dtype asks for it",
            ),
            fma="explicit",
            approximate=RSQRT,
            source="torch.nn.functional.rms_norm on CUDA; the backward is ours",
            proofs=ON_H200,
            chain_rows=0,
        ),
    ),
    backends=(BackendSpec("cuda", min_arch=80), BackendSpec("reference")),
    edges=("T = 0 gives empty rows and grad_weight = 0", *NORM_EDGES),
)
