"""The contract of ``mhc_pre``. Source: DeepSeek-V4 mHC layer (profile ``oracle-fp32-mhc-v1``), pre-mix of a sublayer."""

from samebits.contract import ON_H200, BackendSpec, Contract, OpSpec, Pass, Reduction, Result, Scalar, TensorArg

_TOKENS = "left fold over ascending rows from +0 (+ start_{0})"
_TREE4 = "4-tree: (p0 + p1) + (p2 + p3), each product rounded first"
_LEAVES = ("residual", "weight", "gain", "bias")
_ROUNDING = (
    "hidden: FP32 to BF16, round to nearest even, once",
    "grad_residual: all legs in FP32, then FP32, or one rounding to BF16 where grad_dtype asks for it",
    "everything else: FP32",
)


def _contract(name: str, summary: str, source: str) -> Contract:
    fast, dsv4 = name.startswith("fast"), name.endswith("-dsv4")
    over_d = "tree256, as in h_aggregate" if fast else "left fold from +0 over ascending d, each product rounded first"
    return Contract(
        name=name,
        summary=summary,
        exactness="kchain" if fast else "device",
        reductions=(
            Reduction("hidden", "H", _TREE4),
            Reduction("proj", "K", f"as proj of fp32_gemm_rms, contract {name}"),
            Reduction("r", "K", f"as r of fp32_gemm_rms, contract {name}"),
            Reduction("comb", "H", "as in hc_split_sinkhorn: 4-trees over i and over j in turn"),
            Reduction("grad_residual", "N", f"as grad_x of fp32_gemm_rms, contract {name}"),
            *(Reduction(f"grad_{leaf}", "D", f"grad_pre, on which it depends: {over_d}") for leaf in _LEAVES),
            *(
                Reduction(f"grad_{leaf}", "K", "proj and r, on which it depends: as the forward gave them")
                for leaf in _LEAVES
            ),
            Reduction("grad_weight", "T", f"as grad_weight of fp32_gemm_rms, contract {name}"),
            Reduction("grad_gain", "T", _TOKENS.format("gain") + ", each product rounded first"),
            Reduction("grad_bias", "T", _TOKENS.format("bias")),
        ),
        rounding=_ROUNDING,
        # fma, ex2 and rcp: inside exp and IEEE divisions, as hc_split_sinkhorn says; under fast* also the chains over n.
        fma="explicit",
        approximate=("ex2.approx.ftz.f32", "rcp.approx.ftz.f32", *(("rsqrt.approx.f32",) if dsv4 else ())),
        source=source,
        proofs=ON_H200,
        chain_rows=256 if fast else 1,
    )


SPEC = OpSpec(
    name="mhc_pre",
    summary="Everything in front of a sublayer: controller projection, Sinkhorn split, collapse of the residual streams.",
    forward=Pass(
        inputs=(
            TensorArg("residual", ("H", "D"), ("bfloat16",), doc="the residual streams"),
            TensorArg("weight", ("N", "K"), ("float32",), rows=False, sample="small", doc="controller weight"),
            TensorArg("gain", ("N",), ("float32",), rows=False, doc="gain of each controller output"),
            TensorArg("bias", ("N",), ("float32",), rows=False, doc="bias of each controller output"),
        ),
        results=(
            Result("hidden", ("D",), "bfloat16", doc="input of the sublayer (or of its norm)"),
            Result("post", ("J",), "float32", doc="weight of the sublayer's output in each stream"),
            Result("comb", ("H", "J"), "float32", doc="mixing matrix of the streams, summed over its first index"),
            Result("pre", ("H",), "float32", hidden=True, doc="collapse weight of each stream"),
            Result("logits", ("N",), "float32", hidden=True, doc="(r * proj) * gain + bias"),
            Result("proj", ("N",), "float32", hidden=True, doc="controller projection"),
            Result("r", (), "float32", hidden=True, doc="reciprocal RMS of the streams"),
            Result("q", (), "float32", hidden=True, doc="as in fp32_gemm_rms"),
        ),
    ),
    backward=Pass(
        inputs=(
            TensorArg("grad_hidden", ("D",), ("bfloat16", "float32"), doc="upstream gradient of hidden"),
            TensorArg("grad_post", ("J",), ("float32",), doc="upstream gradient of post"),
            TensorArg("grad_comb", ("H", "J"), ("float32",), doc="upstream gradient of comb"),
            TensorArg(
                "grad_streams",
                ("J", "D"),
                ("bfloat16",),
                optional=True,
                doc="upstream gradient of mhc_post's result: its leg of grad_residual is computed and merged here",
            ),
            TensorArg("residual", ("H", "D"), ("bfloat16",)),
            TensorArg("weight", ("N", "K"), ("float32",), rows=False, sample="small"),
            TensorArg("gain", ("N",), ("float32",), rows=False),
            TensorArg("comb", ("H", "J"), ("float32",), doc="of the forward"),
            TensorArg("pre", ("H",), ("float32",), doc="of the forward"),
            TensorArg("logits", ("N",), ("float32",), doc="of the forward"),
            TensorArg("proj", ("N",), ("float32",), doc="of the forward"),
            TensorArg("r", (), ("float32",), doc="of the forward"),
            TensorArg("q", (), ("float32",), doc="of the forward"),
            TensorArg("start_weight", ("N", "K"), ("float32",), rows=False, optional=True),
            TensorArg("start_gain", ("N",), ("float32",), rows=False, optional=True),
            TensorArg("start_bias", ("N",), ("float32",), rows=False, optional=True),
        ),
        results=(
            Result("grad_residual", ("H", "D"), "grad", doc="((collapse leg + controller leg) + mhc_post leg)"),
            Result("grad_weight", ("N", "K"), "float32", rows=False),
            Result("grad_gain", ("N",), "float32", rows=False),
            Result("grad_bias", ("N",), "float32", rows=False),
        ),
    ),
    scalars=(
        Scalar(
            "eps",
            default=1e-6,
            minimum=2.0**-126,
            why="so that no reciprocal meets zero or a subnormal",
            doc="of the controller's RMS; the eps of the split is 1e-6 and part of the contract",
        ),
    ),
    fixed_sizes=(("H", 4), ("J", 4), ("N", 24)),
    size_limits=(("D", 1, 2**22),),
    products=(("K", ("H", "D")),),
    tuned=(("D", (4096, 7168)),),
    contracts=(
        _contract(
            "ascending",
            "every long sum a left fold; RMS form of the published manifest",
            "DeepSeek-V4 P1-4, golden manifest",
        ),
        _contract(
            "ascending-dsv4", "every long sum a left fold; RMS form of the checkpoint", "DeepSeek-V4 inference code"
        ),
        _contract("fast", "tensor-core projection and tree sums over D; RMS form of the manifest", "samebits"),
        _contract("fast-dsv4", "tensor-core projection and tree sums over D; RMS form of the checkpoint", "samebits"),
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
        "T = 0 gives empty rows, and parameter gradients equal to their starts or 0",
        "without grad_streams its leg is not added at all",
        "a zero row has no RMS gradient (see fp32_gemm_rms): with zero upstream gradients it adds nothing to any gradient",
        "NaN and infinity stay in their row, and reach the parameter gradients",
    ),
)
