"""The contract of ``mhc_post``. Source: DeepSeek-V4 mHC layer (profile ``oracle-fp32-mhc-v1``), post mix."""

from samebits.contract import ON_H200, BackendSpec, Contract, OpSpec, Pass, Reduction, Result, TensorArg

_ROUNDING = (
    "streams: FP32 to BF16, round to nearest even, once, after the sublayer's part is added",
    "grad_residual, grad_sublayer: FP32, or one rounding to BF16 where grad_dtype asks for it",
)
_TREE4 = "4-tree: (p0 + p1) + (p2 + p3), each product rounded first"
_MIXES = (
    Reduction("streams", "H", _TREE4 + "; over the first index of comb; then post[j]*sublayer is added"),
    Reduction("grad_residual", "J", _TREE4),
    Reduction("grad_sublayer", "J", _TREE4),
)
_ASCENDING = "left fold from +0 over ascending d, each product rounded first"
_TREE128 = (
    "128 partials; columns in vectors of 4, vector v belongs to partial v mod 128; a partial left-folds its columns from "
    "+0 over ascending d, each product rounded first; halving tree (16, 8, 4, 2, 1) inside each group of 32 partials, "
    "then (2, 1) over the 4 groups"
)

SPEC = OpSpec(
    name="mhc_post",
    summary="Post mix of a hyper-connection: new streams j = sum_i comb[i, j] * residual[i] + post[j] * sublayer.",
    forward=Pass(
        inputs=(
            TensorArg("residual", ("H", "D"), ("bfloat16",), doc="the streams that entered the block"),
            TensorArg("sublayer", ("D",), ("bfloat16",), doc="output of the sublayer"),
            TensorArg("comb", ("H", "J"), ("float32",), sample="positive", doc="weight of stream i in new stream j"),
            TensorArg("post", ("J",), ("float32",), sample="positive", doc="weight of the sublayer in new stream j"),
        ),
        results=(Result("streams", ("J", "D"), "bfloat16", doc="the streams that leave the block"),),
    ),
    backward=Pass(
        inputs=(
            TensorArg("grad_streams", ("J", "D"), ("bfloat16", "float32"), doc="upstream gradient"),
            TensorArg("residual", ("H", "D"), ("bfloat16",)),
            TensorArg("sublayer", ("D",), ("bfloat16",)),
            TensorArg("comb", ("H", "J"), ("float32",)),
            TensorArg("post", ("J",), ("float32",)),
        ),
        results=(
            Result("grad_residual", ("H", "D"), "grad", doc="sum_j comb[i, j] * grad_streams[j, d]"),
            Result("grad_sublayer", ("D",), "grad", doc="sum_j post[j] * grad_streams[j, d]"),
            Result("grad_comb", ("H", "J"), "float32", doc="sum_d residual[i, d] * grad_streams[j, d]"),
            Result("grad_post", ("J",), "float32", doc="sum_d sublayer[d] * grad_streams[j, d]"),
        ),
    ),
    fixed_sizes=(("H", 4), ("J", 4)),
    size_limits=(("D", 1, 2**24),),
    tuned=(("D", (4096, 7168)),),
    contracts=(
        Contract(
            name="ascending",
            summary="grad_comb and grad_post fold ascending over D (the published manifest)",
            exactness="portable",
            reductions=(*_MIXES, Reduction("grad_comb", "D", _ASCENDING), Reduction("grad_post", "D", _ASCENDING)),
            rounding=_ROUNDING,
            source="DeepSeek-V4 P1-3, golden manifest",
            proofs=ON_H200,
        ),
        Contract(
            name="fast",
            summary="grad_comb and grad_post by 128 partials of 4-wide vectors and a two-level tree; same forward",
            exactness="portable",
            reductions=(*_MIXES, Reduction("grad_comb", "D", _TREE128), Reduction("grad_post", "D", _TREE128)),
            rounding=_ROUNDING,
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
        "T = 0 gives empty results",
        "NaN and infinity stay in their token and column, and in the sums of their token",
        "subnormals are live in both directions",
        "a mix of four -0 is -0 (the 4-tree has no +0 start); -0 + -0 from the sublayer stays -0; a fold of -0 gives +0",
    ),
)
