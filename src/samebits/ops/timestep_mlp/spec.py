"""The contract of ``timestep_mlp``. Source: MiniMax-H3 (diffusers 0.42.1), ``time_embedder``; orders by samebits."""

from samebits.contract import ON_H200, BackendSpec, Contract, OpSpec, Pass, Reduction, Result, TensorArg

_FP32 = ("float32",)
_X = TensorArg("x", ("K",), _FP32, doc="features of a row")
_W1 = TensorArg("w1", ("F", "K"), _FP32, rows=False, sample="small", doc="weight of the first layer")
_W2 = TensorArg("w2", ("D", "F"), _FP32, rows=False, sample="small", doc="weight of the second layer")

LANES = (
    "elements in vectors of 4; lane l of 32 takes the vectors l, l + 32, ... in one chain of fused multiply-adds from +0, ends "
    "with + (+0); then p[u] = p[u] + p[u + half] over the lanes, half = 16, 8, 4, 2, 1; then + bias"
)
CHUNKS = (
    "chunks of 64 consecutive terms; a chunk is one ascending chain of fused multiply-adds from +0; the chunks are left-folded "
    "ascending from +0"
)
ROWS_FMA = "one chain of fused multiply-adds from +0 over ascending rows: depends on the order of the rows"
ROWS_ADD = "left fold from +0 over ascending rows: depends on the order of the rows"

SPEC = OpSpec(
    name="timestep_mlp",
    summary="The FP32 time embedder: two linear layers with a SiLU between them.",
    forward=Pass(
        inputs=(
            _X,
            _W1,
            TensorArg("b1", ("F",), _FP32, rows=False, doc="bias of the first layer"),
            _W2,
            TensorArg("b2", ("D",), _FP32, rows=False, doc="bias of the second layer"),
        ),
        results=(
            Result("y", ("D",), "float32", doc="embedding"),
            Result("pre", ("F",), "float32", hidden=True, doc="first layer before its SiLU"),
            Result("act", ("F",), "float32", hidden=True, doc="first layer behind its SiLU"),
        ),
    ),
    backward=Pass(
        inputs=(
            TensorArg("grad_y", ("D",), _FP32, doc="upstream gradient of y"),
            _X,
            _W1,
            _W2,
            TensorArg("pre", ("F",), _FP32, doc="as the forward returned it; never recomputed"),
            TensorArg("act", ("F",), _FP32, doc="as the forward returned it; never recomputed"),
        ),
        results=(
            Result("grad_x", ("K",), "float32", doc="gradient of x"),
            Result("grad_w1", ("F", "K"), "float32", rows=False, doc="gradient of w1"),
            Result("grad_b1", ("F",), "float32", rows=False, doc="gradient of b1"),
            Result("grad_w2", ("D", "F"), "float32", rows=False, doc="gradient of w2"),
            Result("grad_b2", ("D",), "float32", rows=False, doc="gradient of b2"),
        ),
    ),
    size_limits=(("K", 1, 2**16), ("F", 1, 2**16), ("D", 1, 2**16)),
    tuned=(("K", (256,)), ("F", (5376,)), ("D", (2688,))),
    contracts=(
        Contract(
            name="lanes32",
            summary="FP32 throughout; sums by 32 lanes and a halving tree",
            exactness="device",
            reductions=(
                Reduction("pre", "K", LANES),
                Reduction("y", "F", LANES),
                Reduction("grad_x", "D", CHUNKS),
                Reduction("grad_x", "F", CHUNKS),
                Reduction("grad_w1", "D", CHUNKS),
                Reduction("grad_b1", "D", CHUNKS),
                Reduction("grad_w1", "T", ROWS_FMA),
                Reduction("grad_b1", "T", ROWS_ADD),
                Reduction("grad_w2", "T", ROWS_FMA),
                Reduction("grad_b2", "T", ROWS_ADD),
            ),
            rounding=(
                "SiLU: z / (1 + exp(-z)), an IEEE division",
                "its gradient: g * (s * (1 + z * (1 - s))) with s = 1 / (1 + exp(-z)), one rounding per operation",
                "everything is FP32; there is no narrower form",
            ),
            fma="explicit",
            approximate=("ex2.approx.ftz.f32", "rcp.approx.ftz.f32"),  # inside exp and the IEEE division, nowhere else
            source="samebits",
            proofs=ON_H200,
            chain_rows=0,
        ),
    ),
    backends=(BackendSpec("cuda", min_arch=80), BackendSpec("reference")),
    edges=(
        "T = 0 gives no rows and gradients of zero",
        "any widths: those that are no multiple of 4 are read element by element",
        "BF16 or FP16 anywhere is a TypeError: the model keeps this module in FP32",
        "NaN and infinity stay in their row, and reach the gradients of the weights",
    ),
)
