"""The contract of ``adaln_projection``. Source: MiniMax-H3 conditioning, ``adaln_proj`` and ``norm_out.linear`` of diffusers."""

from samebits.contract import ON_H200, BackendSpec, Contract, OpSpec, Pass, Reduction, Result, TensorArg

_WEIGHT = ("bfloat16", "float16", "float32")
_HALF = ("bfloat16", "float16")
_EXP = (
    "ex2.approx.ftz.f32",
    "rcp.approx.ftz.f32",
)  # inside exp, as the CUDA library writes it, and inside an IEEE division
_KCHAIN = (
    "one tensor-core chain from +0 over ascending d in steps of 16, the FP32 accumulator carried through every step; what is "
    "not finite becomes NaN; then (sum + 0) + bias"
)
_LANES = (
    "vectors of 8 consecutive d, vector v belongs to lane v mod 32; a lane is a chain of fused multiply-adds from +0 over "
    "ascending d; the lanes p[u] + p[u + half], half = 16, 8, 4, 2, 1; then (sum + 0) + bias"
)
_ROUNDING = (
    "act: FP32 silu(temb) = temb / (1 + exp(-temb)) to the dtype of weight, once",
    "table: FP32 to the dtype of weight, once, after the bias",
    "grad_temb: FP32; silu'(x) = s * (1 + x * (1 - s)), s = 1 / (1 + exp(-x)); the cast of act has the identity as its VJP",
    "grad_weight: FP32, or one more rounding where grad_dtype asks for it",
    "grad_bias: FP32",
)


def _reductions(over_d: str) -> tuple[Reduction, ...]:
    rows = "left fold from +0 over ascending rows"
    return (
        Reduction("table", "D", over_d),
        Reduction(
            "grad_temb",
            "N",
            "chains of fused multiply-adds from +0 over 64 consecutive n; 8 chains left-folded from +0 into a partial of 512 n; "
            "the partials left-folded from +0; all ascending",
        ),
        Reduction("grad_weight", "T", f"{rows}, each product rounded first"),
        Reduction("grad_bias", "T", rows),
    )


SPEC = OpSpec(
    name="adaln_projection",
    summary="AdaLN table of the timesteps: silu(temb) @ weight^T + bias.",
    forward=Pass(
        inputs=(
            TensorArg("temb", ("D",), ("float32",), doc="time embedding; FP32 until after the SiLU"),
            TensorArg("weight", ("N", "D"), _WEIGHT, rows=False, sample="small", doc="projection weight"),
            TensorArg("bias", ("N",), _WEIGHT, rows=False, like="weight", doc="projection bias"),
        ),
        results=(Result("table", ("N",), "weight", doc="one row of modulation values per timestep"),),
    ),
    backward=Pass(
        inputs=(
            TensorArg("grad_table", ("N",), ("float32", "bfloat16", "float16"), doc="upstream gradient of table"),
            TensorArg("temb", ("D",), ("float32",)),
            TensorArg("weight", ("N", "D"), _WEIGHT, rows=False, sample="small"),
        ),
        results=(
            Result("grad_temb", ("D",), "float32", doc="gradient of temb, through the SiLU"),
            Result("grad_weight", ("N", "D"), "grad", rows=False, doc="gradient of weight"),
            Result("grad_bias", ("N",), "float32", rows=False, doc="gradient of bias"),
        ),
    ),
    size_limits=(("N", 1, 2**24), ("D", 1, 2**24)),
    tuned=(("N", (10752, 96768)), ("D", (2688,))),
    contracts=(
        Contract(
            name="kchain",
            summary="BF16 and FP16 on the tensor cores, one chain per output: on Hopper the bits of cuBLAS without split-K",
            exactness="kchain",
            reductions=_reductions(_KCHAIN),
            rounding=_ROUNDING,
            fma="explicit",
            approximate=_EXP,
            source="samebits",
            proofs=ON_H200,
            dtypes=(("weight", _HALF), ("bias", _HALF)),
        ),
        Contract(
            name="fma",
            summary="any weight dtype on the FP32 lanes, on any architecture: 32 chains of fused multiply-adds per output",
            exactness="device",
            reductions=_reductions(_LANES),
            rounding=_ROUNDING,
            fma="explicit",
            approximate=_EXP,
            source="samebits",
            proofs=ON_H200,
        ),
    ),
    backends=(
        BackendSpec(
            "cuda", min_arch=80, note="kchain: compute capability 9.0 alone, whose tensor cores its model describes"
        ),
        BackendSpec("reference"),
    ),
    edges=(
        "T = 0 gives an empty table, and zeros for grad_weight and grad_bias",
        "kchain: an operand that is not finite, or a sum that overflows, gives NaN, never infinity, in its element of table",
        "temb = -inf gives NaN, as torch's FP32 SiLU does",
        "table is never -0: the sum is +0 before the bias is added, and -0 + 0 = 0",
    ),
)
