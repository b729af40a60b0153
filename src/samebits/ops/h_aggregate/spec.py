"""The contract of ``h_aggregate``. Source: DeepSeek-V4 mHC layer (profile ``oracle-fp32-mhc-v1``), pre-mix collapse."""

from samebits.contract import ON_H200, BackendSpec, Contract, OpSpec, Pass, Reduction, Result, TensorArg

_ROUNDING = (
    "hidden: FP32 to BF16, round to nearest even, once",
    "grad_residual: FP32, or one rounding to BF16 where grad_dtype asks for it",
)
_TREE4 = "4-tree: (p0 + p1) + (p2 + p3), each product rounded first"


SPEC = OpSpec(
    name="h_aggregate",
    summary="Collapse the four residual streams of a hyper-connection into the sublayer input: sum_i pre[i] * residual[i].",
    forward=Pass(
        inputs=(
            TensorArg("pre", ("H",), ("float32",), sample="positive", doc="collapse weight of each stream"),
            TensorArg("residual", ("H", "D"), ("bfloat16",), doc="the residual streams"),
        ),
        results=(Result("hidden", ("D",), "bfloat16", doc="input of the sublayer"),),
    ),
    backward=Pass(
        inputs=(
            TensorArg("grad_hidden", ("D",), ("float32", "bfloat16"), doc="upstream gradient"),
            TensorArg("pre", ("H",), ("float32",)),
            TensorArg("residual", ("H", "D"), ("bfloat16",)),
        ),
        results=(
            Result("grad_pre", ("H",), "float32", doc="sum_d grad_hidden[d] * residual[i, d]"),
            Result("grad_residual", ("H", "D"), "grad", tolerance="elementwise", doc="pre[i] * grad_hidden[d]"),
        ),
    ),
    fixed_sizes=(("H", 4),),
    size_limits=(("D", 1, 2**24),),
    tuned=(("D", (4096, 7168)),),
    contracts=(
        Contract(
            name="ascending",
            summary="grad_pre folds ascending over D (the published manifest)",
            exactness="portable",
            reductions=(
                Reduction("hidden", "H", _TREE4),
                Reduction("grad_pre", "D", "left fold from +0 over ascending d, each product rounded first"),
            ),
            rounding=_ROUNDING,
            source="DeepSeek-V4 P1-4, golden manifest",
            proofs=ON_H200,
        ),
        Contract(
            name="tree256",
            summary="grad_pre by 256 strided partials and a two-level tree; same forward",
            exactness="portable",
            reductions=(
                Reduction("hidden", "H", _TREE4),
                Reduction(
                    "grad_pre",
                    "D",
                    "256 partials, partial u left-folds d = u, u+256, ... from +0; halving tree (16, 8, 4, 2, 1) inside "
                    "each group of 32 partials, then (4, 2, 1) over the 8 groups",
                ),
            ),
            rounding=_ROUNDING,
            source="published CUDA kernel of the mHC collapse (profile mhc-tree256), extended to any D",
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
        "NaN and infinity stay in their row and column",
        "subnormals are live in both directions",
        "a stream sum of four -0 stays -0 (the 4-tree has no +0 start); a fold of -0 gives +0",
    ),
)
