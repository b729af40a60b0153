"""The contract of ``fp32_gemm_rms``. Source: DeepSeek-V4 mHC layer (profile ``oracle-fp32-mhc-v1``), controller projection."""

from samebits.contract import ON_H200, BackendSpec, Contract, OpSpec, Pass, Reduction, Result, Scalar, TensorArg

_ASCENDING_K = "left fold from +0 over ascending k, each product rounded first"
_FAST_K = (
    "K in chunks of 256, the chunks in 16 contiguous segments of ceil(chunks / 16); a chunk is three zero-start "
    "tensor-core chains over ascending K, one for each BF16 piece of the weight (truncated high, middle and low 8 bits), "
    "added as high + (middle + low); a segment left-folds its chunks from +0; the segments are added as a binary tree of "
    "neighbours ((s0 + s1) + (s2 + s3)) + ..."
)
_FAST_SQUARES = (
    "chunks, segments and tree as in proj; a chunk has four partials: q is a chain of fused multiply-adds x * x from +0 over "
    "ascending k of the elements 16 i + {2 q, 2 q + 1, 2 q + 8, 2 q + 9}; then (p0 + p1) + (p2 + p3)"
)
_P1 = ("r = 1 / (q + eps) with q = sqrt(s) / sqrt(K), all IEEE; r and q FP32",)
_DSV4 = ("r = rsqrt(q + eps) with q = s / K, a true division; r and q FP32",)
_GRADS = (
    "proj: FP32",
    "grad_x: (projection leg + RMS leg) in FP32, or one more rounding to BF16 where grad_dtype asks for it",
    "grad_weight: FP32",
)
_RSQRT = ("rsqrt.approx.f32",)


def _ascending() -> tuple[Reduction, ...]:
    return (
        Reduction("proj", "K", _ASCENDING_K),
        Reduction("r", "K", _ASCENDING_K),
        Reduction("grad_x", "N", "left fold from +0 over ascending n, each product rounded first"),
        Reduction(
            "grad_weight", "T", "left fold over ascending rows from start_weight or +0, each product rounded first"
        ),
    )


def _fast() -> tuple[Reduction, ...]:
    return (
        Reduction("proj", "K", _FAST_K),
        Reduction("r", "K", _FAST_SQUARES),
        Reduction("grad_x", "N", "chain of fused multiply-adds from +0 over ascending n"),
        Reduction(
            "grad_weight",
            "T",
            "rows in chunks of 256; a chunk is three zero-start tensor-core chains over ascending rows, one for each BF16 "
            "piece of grad_proj, added as high + (middle + low); the chunks left-fold from start_weight or +0",
        ),
    )


_FAST_INPUT = (("x", ("bfloat16",)),)

SPEC = OpSpec(
    name="fp32_gemm_rms",
    summary="Controller projection of a hyper-connection with the RMS of its input: (x @ weight^T, 1 / rms(x)).",
    forward=Pass(
        inputs=(
            TensorArg(
                "x", ("K",), ("bfloat16", "float32"), doc="the residual streams of a token, flattened stream-major"
            ),
            TensorArg("weight", ("N", "K"), ("float32",), rows=False, doc="controller weight"),
        ),
        results=(
            Result("proj", ("N",), "float32", doc="x @ weight^T, not normalised"),
            Result("r", (), "float32", doc="reciprocal RMS of x"),
            Result("q", (), "float32", hidden=True, doc="p1: the RMS of x; dsv4: its square"),
        ),
    ),
    backward=Pass(
        inputs=(
            TensorArg("grad_proj", ("N",), ("float32",), doc="upstream gradient of proj"),
            TensorArg("grad_r", (), ("float32",), doc="upstream gradient of r"),
            TensorArg("x", ("K",), ("bfloat16", "float32")),
            TensorArg("weight", ("N", "K"), ("float32",), rows=False),
            TensorArg("r", (), ("float32",), doc="as the forward pass returned it; never recomputed"),
            TensorArg("q", (), ("float32",), doc="as the forward pass returned it; never recomputed"),
            TensorArg(
                "start_weight",
                ("N", "K"),
                ("float32",),
                rows=False,
                optional=True,
                doc="where the fold of grad_weight starts",
            ),
        ),
        results=(
            Result("grad_x", ("K",), "grad", doc="gradient of x, both legs"),
            Result("grad_weight", ("N", "K"), "float32", rows=False, doc="gradient of weight"),
        ),
    ),
    scalars=(
        Scalar(
            "eps",
            default=1e-6,
            minimum=2.0**-126,
            why="so that no reciprocal meets zero or a subnormal",
            doc="p1: added to the RMS; dsv4: added to the mean square",
        ),
    ),
    size_limits=(("N", 1, 31), ("K", 1, 2**24)),
    tuned=(("N", (24, 4)), ("K", (16384, 28672))),
    contracts=(
        Contract(
            name="ascending",
            summary="every sum a left fold; RMS form of the published manifest",
            exactness="portable",
            reductions=_ascending(),
            rounding=(*_P1, *_GRADS),
            source="DeepSeek-V4 P1-2, golden manifest",
            proofs=ON_H200,
        ),
        Contract(
            name="ascending-dsv4",
            summary="every sum a left fold; RMS form that the DeepSeek-V4 checkpoint was trained with",
            exactness="device",
            reductions=_ascending(),
            rounding=(*_DSV4, *_GRADS),
            approximate=_RSQRT,
            source="DeepSeek-V4 inference code; transformers DeepseekV4HyperConnection",
            proofs=ON_H200,
        ),
        Contract(
            name="fast",
            summary="exact products on the tensor cores, short chains, a fixed tree; RMS form of the manifest",
            exactness="kchain",
            reductions=_fast(),
            rounding=(*_P1, *_GRADS),
            fma="explicit",
            source="samebits",
            proofs=ON_H200,
            dtypes=_FAST_INPUT,
            chain_rows=256,
        ),
        Contract(
            name="fast-dsv4",
            summary="exact products on the tensor cores, short chains, a fixed tree; RMS form of the checkpoint",
            exactness="kchain",
            reductions=_fast(),
            rounding=(*_DSV4, *_GRADS),
            fma="explicit",
            approximate=_RSQRT,
            source="samebits",
            proofs=ON_H200,
            dtypes=_FAST_INPUT,
            chain_rows=256,
        ),
    ),
    backends=(
        BackendSpec("cuda", min_arch=80),
        BackendSpec(
            "triton",
            min_arch=80,
            contracts=("ascending", "ascending-dsv4"),
            why="which instructions a Triton dot becomes, and how it cuts K, is the compiler's business",
        ),
        BackendSpec("reference"),
    ),
    edges=(
        "T = 0 gives empty rows and grad_weight = start_weight or 0",
        "a row with q = 0 (all zeros, or squares that underflow) has no RMS gradient: that leg of grad_x is +0, so a padding "
        "row with zero upstream gradients adds nothing to any gradient. The published formula gives NaN there",
        "NaN and infinity stay in their row, and reach grad_weight",
        "fast: what is not finite, or a sum that overflows, gives the canonical NaN in proj and grad_weight, never infinity",
        "fast: grad_weight continues from start_weight with the bits of one fold only after a multiple of 256 rows",
        "fast: bits of a weight below 2^-133 are lost; its products are exact otherwise",
        "sqrt(K) is the FP32 number nearest to it, and the division by it is a true one on every device",
    ),
)
