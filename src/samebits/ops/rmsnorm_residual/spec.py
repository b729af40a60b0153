"""The contract of ``rmsnorm_residual``. Source: DeepSeek-V4 mHC layer (profile ``oracle-fp32-mhc-v1``), norm with residual fork."""

from samebits.contract import ON_H200, BackendSpec, Contract, OpSpec, Pass, Reduction, Result, Scalar, TensorArg

_ROUNDING = (
    "y: FP32 to BF16, round to nearest even, once, after the product with gamma",
    "residual: a byte copy of x, never an alias",
    "grad_x: FP32, or one rounding to BF16 where grad_dtype asks for it",
    "grad_gamma: FP32",
)
_ASCENDING = "left fold from +0 over ascending d, each product rounded first"
_TREE512 = (
    "elements in vectors of 8; vector v belongs to partial v mod 512; a partial left-folds its elements from +0 over "
    "ascending d; then the halving tree 256, 128, 64, 32, 16, 8, 4, 2, 1 over the partials (p[u] + p[u + half])"
)
_OVER_ROWS = Reduction(
    "grad_gamma",
    "T",
    "left fold from +0 (+ start_gamma) over ascending rows of fl(fl(grad_y * x) * rstd): depends on the order of the rows",
)
_RSQRT = ("rsqrt.approx.f32",)


SPEC = OpSpec(
    name="rmsnorm_residual",
    summary="RMSNorm of a residual stream together with a copy of its input: (x * rstd * gamma, x).",
    forward=Pass(
        inputs=(
            TensorArg("x", ("D",), ("bfloat16",), doc="rows to normalise"),
            TensorArg("gamma", ("D",), ("float32",), rows=False, sample="weight", doc="gain; FP32 and never rounded"),
        ),
        results=(
            Result("y", ("D",), "bfloat16", doc="normalised rows"),
            Result("residual", ("D",), "bfloat16", tolerance="elementwise", doc="byte copy of x"),
            Result("rstd", (), "float32", hidden=True, doc="rsqrt(mean(x^2) + eps)"),
        ),
    ),
    backward=Pass(
        inputs=(
            TensorArg("grad_y", ("D",), ("bfloat16",), doc="upstream gradient of y"),
            TensorArg(
                "grad_residual",
                ("D",),
                ("bfloat16",),
                optional=True,
                doc="upstream gradient of the copy; absent: zeros",
            ),
            TensorArg("x", ("D",), ("bfloat16",)),
            TensorArg("gamma", ("D",), ("float32",), rows=False, sample="weight"),
            TensorArg("rstd", (), ("float32",), doc="as the forward pass returned it; never recomputed"),
            TensorArg(
                "start_gamma",
                ("D",),
                ("float32",),
                rows=False,
                optional=True,
                doc="where the fold of grad_gamma starts, so that batches continue one chain; absent: +0",
            ),
        ),
        results=(
            Result("grad_x", ("D",), "grad", doc="gradient of x, both legs"),
            Result("grad_gamma", ("D",), "float32", rows=False, doc="gradient of gamma"),
        ),
    ),
    scalars=(
        Scalar(
            "eps",
            default=1e-6,
            minimum=2.0**-126,
            why="so that rsqrt never sees zero or a subnormal, where devices and backends disagree",
            doc="added to the mean square before rsqrt",
        ),
    ),
    size_limits=(("D", 1, 2**24),),
    tuned=(("D", (128, 4096, 7168)),),
    contracts=(
        Contract(
            name="ascending",
            summary="sums over D fold in ascending order (the published manifest)",
            exactness="device",
            reductions=(
                Reduction("rstd", "D", _ASCENDING + "; divided by D with a true IEEE division"),
                Reduction("grad_x", "D", _ASCENDING + "; divided by D with a true IEEE division"),
                _OVER_ROWS,
            ),
            rounding=_ROUNDING,
            approximate=_RSQRT,
            source="DeepSeek-V4 P1-5, golden manifest",
            proofs=ON_H200,
        ),
        Contract(
            name="tree512",
            summary="sums over D by 512 partials and a halving tree: fast for a single row",
            exactness="device",
            reductions=(
                Reduction("rstd", "D", _TREE512 + "; divided by D with a true IEEE division"),
                Reduction("grad_x", "D", _TREE512 + "; divided by D with a true IEEE division"),
                _OVER_ROWS,
            ),
            rounding=_ROUNDING,
            approximate=_RSQRT,
            source="samebits",
            proofs=ON_H200,
        ),
    ),
    backends=(
        BackendSpec("cuda", min_arch=80),
        BackendSpec("triton", min_arch=80),
        BackendSpec("reference"),
    ),
    edges=(
        "T = 0 gives empty rows and grad_gamma = 0",
        "a zero row gives rstd = rsqrt(eps), y = 0 with the sign of x * gamma, finite gradients",
        "a row whose sum of squares overflows FP32 gives rstd = 0 and y = 0, as torch does",
        "NaN and infinity stay in their row, and reach grad_gamma in their column order",
        "7168 is not a power of two: the division by D is a true division on every backend, not a product with 1/D",
    ),
)
