"""The contract of ``hc_split_sinkhorn``. Source: DeepSeek-V4 mHC layer (profile ``oracle-fp32-mhc-v1``), the mixing weights."""

from samebits.contract import ON_H200, BackendSpec, Contract, OpSpec, Pass, Reduction, Result, TensorArg

_TREE = "(t0 + t1) + (t2 + t3)"
_LOGITS = TensorArg(
    "logits", ("N",), ("float32",), doc="controller outputs: 4 for pre, 4 for post, 16 for comb by rows"
)

SPEC = OpSpec(
    name="hc_split_sinkhorn",
    summary="Mixing weights of a hyper-connection: sigmoid gates and a 4x4 matrix balanced by 20 Sinkhorn rounds.",
    forward=Pass(
        inputs=(_LOGITS,),
        results=(
            Result("pre", ("H",), "float32", tolerance="elementwise", doc="sigmoid(logits[0:4]) + eps"),
            Result("post", ("H",), "float32", tolerance="elementwise", doc="2 sigmoid(logits[4:8])"),
            Result("comb", ("H", "J"), "float32", doc="from source stream i to destination stream j; columns sum to 1"),
        ),
    ),
    backward=Pass(
        inputs=(
            TensorArg("grad_pre", ("H",), ("float32",), doc="upstream gradient of pre"),
            TensorArg("grad_post", ("H",), ("float32",), doc="upstream gradient of post"),
            TensorArg("grad_comb", ("H", "J"), ("float32",), doc="upstream gradient of comb"),
            _LOGITS,
        ),
        results=(Result("grad_logits", ("N",), "float32", doc="gradient of logits; all steps are recomputed"),),
    ),
    fixed_sizes=(("N", 24), ("H", 4), ("J", 4)),
    contracts=(
        Contract(
            name="ascending",
            summary="the published schedule: softmax + eps, then 20 column and 19 row steps, columns first and last",
            exactness="device",
            reductions=(
                Reduction("comb", "J", f"softmax and row steps: {_TREE} over j"),
                Reduction("comb", "H", f"column steps: {_TREE} over i"),
                Reduction("grad_logits", "J", f"softmax and row steps: {_TREE} over j, each product rounded first"),
                Reduction("grad_logits", "H", f"column steps: {_TREE} over i, each product rounded first"),
            ),
            rounding=(
                "pre: FP32; eps = 1e-6 is added to the sigmoid",
                "post: FP32; no eps",
                "comb: FP32; a step adds eps to each sum and divides by it: IEEE divisions, no products with reciprocals",
                "grad_logits: FP32; the gradient of a step is g / c - dot(g, m) / (c * c), one rounding per operation",
            ),
            fma="explicit",  # inside exp, as the CUDA library writes it, and inside an IEEE division; nowhere else
            approximate=("ex2.approx.ftz.f32", "rcp.approx.ftz.f32"),  # in the same two places
            source="DeepSeek-V4 P1-1, golden manifest",
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
        "all-zero logits give comb = 0.24999976, not 0.25: eps stands in every denominator",
        "a logit of comb that is -inf gives a finite matrix; +inf, NaN or a row of -inf make comb NaN for that token only",
        "logits of +-100 saturate: pre = 1.00000095 or 1e-6, post = 2 or 0",
        "row sums of comb are not 1 (0.95 to 1.05 for logits of standard deviation 3): the last step is a column step",
        "the gradient of a token is NaN where its comb is NaN, also for an upstream gradient of zeros",
    ),
)
