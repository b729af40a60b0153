"""The contract of ``adaln_row_gather``. Source: the six modulations of a MiniMax-H3 block, picked for each position."""

from samebits.contract import ON_H200, BackendSpec, Contract, OpSpec, Pass, Reduction, Result, TensorArg
from samebits.ops.rmsnorm.spec import DTYPES
from samebits.ops.rmsnorm_modulated.spec import SEGMENT_INPUTS, TABLE_EDGES

CHUNKS = ("shift_msa", "scale_msa", "gate_msa", "shift_mlp", "scale_mlp", "gate_mlp")
"""What the six parts of a table row are, in their order in memory."""

_TABLE = ("R", "C", "H")

SPEC = OpSpec(
    name="adaln_row_gather",
    summary="The six modulation rows of each position: shift, scale and gate of attention, then of the FFN.",
    forward=Pass(
        inputs=(
            TensorArg("table", _TABLE, DTYPES, rows=False, doc="one row of six chunks for each timestep and modality"),
            TensorArg("index", (), ("int64",), below="R", doc="table row of each position"),
            *SEGMENT_INPUTS,
        ),
        results=tuple(
            Result(name, ("H",), "table", tolerance="elementwise", doc=f"chunk {at} of the table row, byte for byte")
            for at, name in enumerate(CHUNKS)
        ),
    ),
    backward=Pass(
        inputs=(
            *(
                TensorArg(
                    f"grad_{name}",
                    ("H",),
                    DTYPES,
                    optional=True,
                    like="" if name == CHUNKS[0] else f"grad_{CHUNKS[0]}",
                    doc=f"upstream gradient of {name}; absent: zeros",
                )
                for name in CHUNKS
            ),
            TensorArg("table", _TABLE, DTYPES, rows=False, like=f"grad_{CHUNKS[0]}", doc="only its shape is read"),
            TensorArg("index", (), ("int64",), below="R"),
            *SEGMENT_INPUTS,
        ),
        results=(Result("grad_table", _TABLE, "float32", rows=False, doc="gradient of the table"),),
    ),
    fixed_sizes=(("C", 6), ("P", 2)),
    size_limits=(("R", 1, 2**24), ("H", 1, 2**24)),
    tuned=(("R", (9,)), ("H", (5376,))),
    contracts=(
        Contract(
            name="tiles256",
            summary="a byte copy; the gradient of a table row sums its positions in tiles of 256",
            exactness="portable",
            reductions=(
                Reduction(
                    "grad_table",
                    "T",
                    "positions of a table row ascending, in tiles of 256; inside a tile one left fold from +0 per column; the "
                    "tiles of the row left-folded ascending from +0",
                ),
            ),
            rounding=(
                "the six results are byte copies",
                "grad_table: FP32, whatever the dtype of the gradients; autograd rounds it once to the dtype of the table",
            ),
            source="diffusers' MiniMaxH3TransformerBlock; the sums of the backward are ours",
            proofs=ON_H200,
            chain_rows=0,
        ),
    ),
    backends=(BackendSpec("cuda", min_arch=80), BackendSpec("reference")),
    edges=(
        "T = 0 gives empty rows and grad_table = 0",
        "NaN and infinity stay in their position forward, and reach the gradient of their table row",
        *TABLE_EDGES,
    ),
)
