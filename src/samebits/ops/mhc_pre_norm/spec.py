"""The contract of ``mhc_pre_norm``. Source: DeepSeek-V4 mHC layer (profile ``oracle-fp32-mhc-v1``), pre-mix and norm."""

from samebits.contract import ON_H200, BackendSpec, Contract, OpSpec, Pass, Reduction, Result, Scalar, TensorArg

_TOKENS = "left fold over ascending rows from +0 (+ start_{0})"
_LEAVES = ("residual", "weight", "gain", "bias")
_ROUNDING = (
    "hidden: FP32 to BF16, round to nearest even, once; the norm reads the rounded value",
    "normalized: FP32 to BF16, once, after the product with gamma",
    "the gradient of hidden between norm and collapse: FP32, never rounded",
    "grad_residual: all legs in FP32, then FP32, or one rounding to BF16 where grad_dtype asks for it",
    "everything else: FP32",
)


def _contract(name: str, summary: str, source: str) -> Contract:
    fast = name.startswith("fast")
    norm = "tree512" if fast else "ascending"
    return Contract(
        name=name,
        summary=summary,
        exactness="kchain" if fast else "device",
        reductions=(
            Reduction("hidden", "H", f"as in mhc_pre, contract {name}"),
            Reduction("proj", "K", f"as in mhc_pre, contract {name}"),
            Reduction("r", "K", f"as in mhc_pre, contract {name}"),
            Reduction("comb", "H", f"as in mhc_pre, contract {name}"),
            Reduction("rstd", "D", f"as in rmsnorm_residual, contract {norm}"),
            Reduction("grad_residual", "N", f"as in mhc_pre, contract {name}"),
            *(
                Reduction(
                    f"grad_{leaf}", "D", f"as in rmsnorm_residual, contract {norm}, then as in mhc_pre, contract {name}"
                )
                for leaf in _LEAVES
            ),
            *(
                Reduction(f"grad_{leaf}", "K", "proj and r, on which it depends: as the forward gave them")
                for leaf in _LEAVES
            ),
            Reduction("grad_weight", "T", f"as in mhc_pre, contract {name}"),
            Reduction("grad_gain", "T", _TOKENS.format("gain") + ", each product rounded first"),
            Reduction("grad_bias", "T", _TOKENS.format("bias")),
            Reduction("grad_gamma", "T", _TOKENS.format("gamma") + " of fl(fl(grad_normalized * hidden) * rstd)"),
        ),
        rounding=_ROUNDING,
        fma="explicit",  # where mhc_pre has it
        approximate=("ex2.approx.ftz.f32", "rcp.approx.ftz.f32", "rsqrt.approx.f32"),
        source=source,
        proofs=ON_H200,
        chain_rows=256 if fast else 1,
    )


SPEC = OpSpec(
    name="mhc_pre_norm",
    summary="Pre-mix of a hyper-connection and the RMSNorm behind it in one call: mhc_pre, then rmsnorm_residual.",
    forward=Pass(
        inputs=(
            TensorArg("residual", ("H", "D"), ("bfloat16",), doc="the residual streams"),
            TensorArg("weight", ("N", "K"), ("float32",), rows=False, sample="small", doc="controller weight"),
            TensorArg("gain", ("N",), ("float32",), rows=False, doc="gain of each controller output"),
            TensorArg("bias", ("N",), ("float32",), rows=False, doc="bias of each controller output"),
            TensorArg(
                "gamma", ("D",), ("float32",), rows=False, sample="weight", doc="gain of the norm, never rounded"
            ),
        ),
        results=(
            Result("hidden", ("D",), "bfloat16", doc="the collapsed streams; also what the norm's fork would copy"),
            Result("normalized", ("D",), "bfloat16", doc="input of the sublayer"),
            Result("post", ("J",), "float32", doc="weight of the sublayer's output in each stream"),
            Result("comb", ("H", "J"), "float32", doc="mixing matrix of the streams, summed over its first index"),
            Result("pre", ("H",), "float32", hidden=True, doc="collapse weight of each stream"),
            Result("logits", ("N",), "float32", hidden=True, doc="(r * proj) * gain + bias"),
            Result("proj", ("N",), "float32", hidden=True, doc="controller projection"),
            Result("r", (), "float32", hidden=True, doc="reciprocal RMS of the streams"),
            Result("q", (), "float32", hidden=True, doc="as in fp32_gemm_rms"),
            Result("rstd", (), "float32", hidden=True, doc="rsqrt(mean(hidden^2) + norm_eps)"),
        ),
    ),
    backward=Pass(
        inputs=(
            TensorArg(
                "grad_hidden",
                ("D",),
                ("bfloat16",),
                optional=True,
                doc="upstream gradient of hidden itself, added behind the norm; absent: zeros",
            ),
            TensorArg("grad_normalized", ("D",), ("bfloat16",), doc="upstream gradient of normalized"),
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
            TensorArg("gamma", ("D",), ("float32",), rows=False, sample="weight"),
            TensorArg("hidden", ("D",), ("bfloat16",), doc="of the forward"),
            TensorArg("comb", ("H", "J"), ("float32",), doc="of the forward"),
            TensorArg("pre", ("H",), ("float32",), doc="of the forward"),
            TensorArg("logits", ("N",), ("float32",), doc="of the forward"),
            TensorArg("proj", ("N",), ("float32",), doc="of the forward"),
            TensorArg("r", (), ("float32",), doc="of the forward"),
            TensorArg("q", (), ("float32",), doc="of the forward"),
            TensorArg("rstd", (), ("float32",), doc="of the forward"),
            TensorArg("start_weight", ("N", "K"), ("float32",), rows=False, optional=True),
            TensorArg("start_gain", ("N",), ("float32",), rows=False, optional=True),
            TensorArg("start_bias", ("N",), ("float32",), rows=False, optional=True),
            TensorArg("start_gamma", ("D",), ("float32",), rows=False, optional=True),
        ),
        results=(
            Result("grad_residual", ("H", "D"), "grad", doc="as in mhc_pre"),
            Result("grad_weight", ("N", "K"), "float32", rows=False),
            Result("grad_gain", ("N",), "float32", rows=False),
            Result("grad_bias", ("N",), "float32", rows=False),
            Result("grad_gamma", ("D",), "float32", rows=False),
        ),
    ),
    scalars=(
        Scalar(
            "eps",
            default=1e-6,
            minimum=2.0**-126,
            why="so that no reciprocal meets zero or a subnormal",
            doc="of the controller's RMS",
        ),
        Scalar(
            "norm_eps",
            default=1e-6,
            minimum=2.0**-126,
            why="so that rsqrt never sees zero or a subnormal, where devices and backends disagree",
            doc="of the norm: added to the mean square before rsqrt",
        ),
    ),
    fixed_sizes=(("H", 4), ("J", 4), ("N", 24)),
    size_limits=(("D", 1, 2**22),),
    products=(("K", ("H", "D")),),
    tuned=(("D", (4096, 7168)),),
    contracts=(
        _contract(
            "ascending",
            "mhc_pre ascending, then rmsnorm_residual ascending: the published manifest",
            "DeepSeek-V4, mode fused-pre-norm of the golden manifest",
        ),
        _contract(
            "ascending-dsv4",
            "mhc_pre ascending-dsv4, then rmsnorm_residual ascending",
            "DeepSeek-V4 inference code",
        ),
        _contract("fast", "mhc_pre fast, then rmsnorm_residual tree512", "samebits"),
        _contract("fast-dsv4", "mhc_pre fast-dsv4, then rmsnorm_residual tree512", "samebits"),
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
        "the published call also returns a copy of hidden: it has the bytes of hidden and is not written a second time",
        "without grad_streams its leg is not added at all; without grad_hidden zeros are added, as rmsnorm_residual does",
        "a zero row gives hidden = 0, normalized = 0 and finite gradients",
        "NaN and infinity stay in their row, and reach the parameter gradients",
    ),
)
