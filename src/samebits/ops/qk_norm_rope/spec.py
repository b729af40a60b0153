"""The contract of ``qk_norm_rope``. Source: MiniMax-H3's attention, between its projections and its product."""

from samebits.contract import ON_H200, BackendSpec, Contract, OpSpec, Pass, Result
from samebits.ops.qk_rmsnorm.spec import (
    GRADIENTS,
    HEAD_EDGES,
    NORM_REDUCTIONS,
    NORM_ROUNDING,
    RSTD_RESULT,
    SAVED,
    SAVED_RSTD,
    WEIGHT,
    X,
)
from samebits.ops.rmsnorm.spec import EPS, RSQRT
from samebits.ops.rope_3axis.spec import (
    ANGLE_INPUTS,
    HEAD_LIMITS,
    PAIRED,
    ROTATED_LIMIT,
    ROTATION,
    ROTATION_BACK,
    ROTATION_EDGES,
)

SPEC = OpSpec(
    name="qk_norm_rope",
    summary="RMSNorm of every head of q or k and its rotary embedding, in one reading.",
    forward=Pass(
        inputs=(X, WEIGHT, *ANGLE_INPUTS),
        results=(Result("y", ("N", "D"), "x", doc="normalised and rotated heads"), RSTD_RESULT),
    ),
    backward=Pass(inputs=(*SAVED, *ANGLE_INPUTS, SAVED_RSTD), results=GRADIENTS),
    scalars=(EPS,),
    size_limits=(*HEAD_LIMITS, ROTATED_LIMIT),
    paired=PAIRED,
    tuned=(("N", (56,)), ("D", (128,)), ("R", (96,))),
    contracts=(
        Contract(
            name="torch",
            summary="the bits of qk_rmsnorm and then rope_3axis, forward and backward",
            exactness="device",
            reductions=NORM_REDUCTIONS,
            rounding=(
                "n = rd(weight * (rstd * x)): to the dtype of x",
                *ROTATION,
                f"the gradient of n: {ROTATION_BACK}",
                *NORM_ROUNDING,
            ),
            fma="explicit",
            approximate=RSQRT,
            source="torch.nn.functional.rms_norm on CUDA and diffusers' transformer_minimax_h3; the sums of the backward are ours",
            proofs=ON_H200,
            chain_rows=0,
        ),
    ),
    backends=(BackendSpec("cuda", min_arch=80), BackendSpec("reference")),
    edges=(*HEAD_EDGES, *ROTATION_EDGES),
)
