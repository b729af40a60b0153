"""The contract of ``fp32_linear``. Source: the FP32 projections of MiniMax-H3 (diffusers 0.42.1); orders by samebits."""

from samebits.contract import ON_H200, BackendSpec, Contract, OpSpec, Pass, Reduction, Result, TensorArg
from samebits.ops.timestep_mlp.spec import CHUNKS, LANES, ROWS_ADD, ROWS_FMA

_FP32 = ("float32",)
_X = TensorArg("x", ("K",), _FP32, doc="features of a row")
_WEIGHT = TensorArg("weight", ("N", "K"), _FP32, rows=False, sample="small")

SPEC = OpSpec(
    name="fp32_linear",
    summary="x @ weight^T + bias in FP32, with no reduced precision anywhere.",
    forward=Pass(
        inputs=(_X, _WEIGHT, TensorArg("bias", ("N",), _FP32, rows=False)),
        results=(Result("y", ("N",), "float32", doc="projected rows"),),
    ),
    backward=Pass(
        inputs=(TensorArg("grad_y", ("N",), _FP32, doc="upstream gradient of y"), _X, _WEIGHT),
        results=(
            Result("grad_x", ("K",), "float32", doc="gradient of x"),
            Result("grad_weight", ("N", "K"), "float32", rows=False, doc="gradient of weight"),
            Result("grad_bias", ("N",), "float32", rows=False, doc="gradient of bias"),
        ),
    ),
    size_limits=(("N", 1, 2**16), ("K", 1, 2**16)),
    tuned=(("N", (5376, 96)), ("K", (96, 5376))),
    contracts=(
        Contract(
            name="lanes32",
            summary="FP32 throughout; sums by 32 lanes and a halving tree",
            exactness="portable",
            reductions=(
                Reduction("y", "K", LANES),
                Reduction("grad_x", "N", CHUNKS),
                Reduction("grad_weight", "T", ROWS_FMA),
                Reduction("grad_bias", "T", ROWS_ADD),
            ),
            rounding=("everything is FP32; a caller who wants a narrower y rounds it once",),
            fma="explicit",
            source="samebits",
            proofs=ON_H200,
            chain_rows=0,
        ),
    ),
    backends=(BackendSpec("cuda", min_arch=80), BackendSpec("reference")),
    edges=(
        "T = 0 gives no rows and gradients of zero",
        "any widths: those that are no multiple of 4 are read element by element",
        "BF16 or FP16 anywhere is a TypeError: the model keeps these layers in FP32",
        "NaN and infinity stay in their row, and reach the gradients of weight and bias",
    ),
)
