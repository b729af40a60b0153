"""The contract of ``adaln_gate_residual``. Source: the gated additions of MiniMax-H3, after attention and after the FFN."""

from samebits.contract import ON_H200, BackendSpec, Contract, OpSpec, Pass, Reduction, Result, TensorArg
from samebits.ops.rmsnorm.spec import DTYPES
from samebits.ops.rmsnorm_modulated.spec import BY_TABLE_ROW, SEGMENT_INPUTS, TABLE_EDGES

SPEC = OpSpec(
    name="adaln_gate_residual",
    summary="Add a sublayer's output to the residual, times the gate of each position: rd(residual + rd(gate * y)).",
    forward=Pass(
        inputs=(
            TensorArg("residual", ("H",), DTYPES, doc="the stream that is added to"),
            TensorArg("y", ("H",), DTYPES, like="residual", doc="output of the sublayer"),
            TensorArg("gate", ("R", "H"), DTYPES, rows=False, like="residual", doc="table of gates"),
            TensorArg("index", (), ("int64",), below="R", doc="table row of each position"),
            *SEGMENT_INPUTS,
        ),
        results=(Result("out", ("H",), "residual", tolerance="elementwise", doc="the stream afterwards"),),
    ),
    backward=Pass(
        inputs=(
            TensorArg("grad_out", ("H",), DTYPES, doc="upstream gradient of out"),
            TensorArg("y", ("H",), DTYPES, like="grad_out"),
            TensorArg("gate", ("R", "H"), DTYPES, rows=False, like="grad_out"),
            TensorArg("index", (), ("int64",), below="R"),
            *SEGMENT_INPUTS,
        ),
        results=(
            Result("grad_y", ("H",), "grad", tolerance="elementwise", doc="gradient of y"),
            Result("grad_gate", ("R", "H"), "float32", rows=False, doc="gradient of the table of gates"),
        ),
    ),
    fixed_sizes=(("P", 2),),
    size_limits=(("H", 1, 2**24), ("R", 1, 2**24)),
    tuned=(("H", (5376,)), ("R", (9,))),
    through=(("residual", "out"),),
    contracts=(
        Contract(
            name="torch",
            summary="the element-wise operations of the model, each rounded; gate gradients in a fixed order",
            exactness="portable",
            reductions=(Reduction("grad_gate", "T", BY_TABLE_ROW),),
            rounding=(
                "gate * y: to the dtype of residual",
                "out: the sum with residual, to the dtype of residual",
                "grad_y = grad_out * gate: FP32, or one rounding to the dtype of y where grad_dtype asks for it",
                "grad_gate: FP32; autograd rounds it once to the dtype of the table",
                "the gradient of residual is grad_out itself",
            ),
            source="diffusers' MiniMaxH3TransformerBlock; the sums of the backward are ours",
            proofs=ON_H200,
            chain_rows=0,
        ),
    ),
    backends=(BackendSpec("cuda", min_arch=80), BackendSpec("reference")),
    edges=(
        "T = 0 gives empty rows and grad_gate = 0",
        "NaN and infinity stay in their row, and reach grad_gate",
        *TABLE_EDGES,
    ),
)
