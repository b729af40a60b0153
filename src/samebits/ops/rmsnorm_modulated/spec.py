"""The contract of ``rmsnorm_modulated``. Source: norm1, norm2 and norm_out of MiniMax-H3 with their AdaLN modulation."""

from samebits.contract import ON_H200, BackendSpec, Contract, OpSpec, Pass, Reduction, Result, TensorArg
from samebits.ops.rmsnorm.spec import DTYPES, EPS, GRAD_X, NORM_EDGES, RSQRT, RSTD, TILES

BY_TABLE_ROW = (
    f"positions of a table row ascending, in tiles of 256; {TILES}; the tiles of the row left-folded ascending from +0"
)
SEGMENT_INPUTS = (
    TensorArg(
        "order", (), ("int64",), optional=True, derived=True, doc="positions by table row, ascending within a row"
    ),
    TensorArg(
        "bounds",
        ("R", "P"),
        ("int64",),
        rows=False,
        optional=True,
        derived=True,
        doc="for each table row its first place in order and its first tile of 256",
    ),
)
"""What ``samebits.segments`` holds beside the index; absent: computed at each call."""
TABLE_EDGES = (
    "an index outside the table is an IndexError, or a device-side assertion where no host may wait for its value",
    "order or bounds that are not those of the index are refused in the same way, before anything is read by them",
    "table rows without positions get a gradient of +0",
)

SPEC = OpSpec(
    name="rmsnorm_modulated",
    summary="RMSNorm, scaled and shifted by the table row of each position: rd(rd(n * rd(1 + scale)) + shift).",
    forward=Pass(
        inputs=(
            TensorArg("x", ("H",), DTYPES, doc="rows to normalise"),
            TensorArg("weight", ("H",), DTYPES, rows=False, like="x", sample="weight", doc="gain of the norm"),
            TensorArg("shift", ("R", "H"), DTYPES, rows=False, like="x", doc="table of shifts"),
            TensorArg("scale", ("R", "H"), DTYPES, rows=False, like="x", doc="table of scales"),
            TensorArg("index", (), ("int64",), below="R", doc="table row of each position"),
            *SEGMENT_INPUTS,
        ),
        results=(
            Result("y", ("H",), "x", doc="normalised and modulated rows"),
            Result("rstd", (), "float32", hidden=True, doc="rsqrt(mean(x^2) + eps)"),
        ),
    ),
    backward=Pass(
        inputs=(
            TensorArg("grad_y", ("H",), DTYPES, doc="upstream gradient of y"),
            TensorArg("x", ("H",), DTYPES, like="grad_y"),
            TensorArg("weight", ("H",), DTYPES, rows=False, like="grad_y", sample="weight"),
            TensorArg("scale", ("R", "H"), DTYPES, rows=False, like="grad_y"),
            TensorArg("index", (), ("int64",), below="R"),
            *SEGMENT_INPUTS,
            TensorArg("rstd", (), ("float32",), doc="as the forward pass returned it; never recomputed"),
        ),
        results=(
            Result("grad_x", ("H",), "grad", doc="gradient of x"),
            Result("grad_weight", ("H",), "grad", rows=False, doc="gradient of weight"),
            Result("grad_shift", ("R", "H"), "float32", rows=False, doc="gradient of the table of shifts"),
            Result("grad_scale", ("R", "H"), "float32", rows=False, doc="gradient of the table of scales"),
        ),
    ),
    scalars=(EPS,),
    fixed_sizes=(("P", 2),),
    size_limits=(("H", 1, 2**24), ("R", 1, 2**24)),
    tuned=(("H", (5376,)), ("R", (9,))),
    contracts=(
        Contract(
            name="torch",
            summary="statistics in the order of torch's vectorised CUDA RMSNorm, modulation rounded step by step",
            exactness="device",
            reductions=(
                RSTD,
                GRAD_X,
                Reduction("grad_shift", "T", BY_TABLE_ROW),
                Reduction("grad_scale", "T", BY_TABLE_ROW),
                Reduction(
                    "grad_weight",
                    "T",
                    f"the same tiles, those of all table rows: {TILES}; the tiles left-folded ascending from +0, by table row "
                    "and within it: depends on the index",
                ),
            ),
            rounding=(
                "n = rd(weight * (rstd * x)): to the dtype of x",
                "1 + scale: to the dtype of x",
                "n * rd(1 + scale): to the dtype of x",
                "y: the sum with shift, to the dtype of x",
                "grad_x: FP32, or one rounding to the dtype of x where grad_dtype asks for it; grad_y * rd(1 + scale) stays FP32",
                "grad_weight: FP32 sums, one rounding at the end where grad_dtype asks for it",
                "grad_shift, grad_scale: FP32; autograd rounds them once to the dtype of the tables",
            ),
            fma="explicit",
            approximate=RSQRT,
            source="torch.nn.functional.rms_norm and diffusers' MiniMaxH3TransformerBlock on CUDA; the backward is ours",
            proofs=ON_H200,
            chain_rows=0,
        ),
    ),
    backends=(BackendSpec("cuda", min_arch=80), BackendSpec("reference")),
    edges=("T = 0 gives empty rows and zeros for the gradients of what rows share", *NORM_EDGES, *TABLE_EDGES),
)
