"""The contract of ``linear``. Source: ``torch.nn.Linear`` in BF16, as the four projections of a MiniMax-H3 block use it."""

from samebits.contract import ON_H200, BackendSpec, Contract, OpSpec, Pass, Reduction, Result, TensorArg

DTYPES = ("bfloat16", "float16")
CHAIN = (
    "one tensor-core chain from +0 over ascending {axis} in steps of 16, the FP32 accumulator carried through every step; what is "
    "not finite becomes NaN; then + 0"
)

SPEC = OpSpec(
    name="linear",
    summary="x @ weight^T + bias on the tensor cores, one chain per output.",
    forward=Pass(
        inputs=(
            TensorArg("x", ("K",), DTYPES, doc="rows"),
            TensorArg("weight", ("N", "K"), DTYPES, rows=False, like="x", sample="small", doc="in the dtype of x"),
            TensorArg("bias", ("N",), DTYPES, rows=False, like="x", optional=True, doc="absent means zeros"),
        ),
        results=(Result("y", ("N",), "x", doc="projected rows", wide=True),),
    ),
    backward=Pass(
        inputs=(
            TensorArg("grad_y", ("N",), DTYPES, doc="upstream gradient of y"),
            TensorArg("x", ("K",), DTYPES, like="grad_y"),
            TensorArg("weight", ("N", "K"), DTYPES, rows=False, like="grad_y", sample="small"),
            TensorArg(
                "start_weight",
                ("N", "K"),
                ("float32",),
                rows=False,
                optional=True,
                doc="where the chain of grad_weight starts: that of the rows before these. None: +0",
            ),
            TensorArg(
                "start_bias",
                ("N",),
                ("float32",),
                rows=False,
                optional=True,
                doc="where the fold of grad_bias starts",
            ),
        ),
        results=(
            Result("grad_x", ("K",), "grad", doc="gradient of x"),
            Result("grad_weight", ("N", "K"), "grad", rows=False, doc="gradient of weight"),
            Result("grad_bias", ("N",), "float32", rows=False, doc="gradient of bias"),
        ),
    ),
    size_limits=(("N", 1, 2**24), ("K", 1, 2**24)),
    tuned=(("N", (5376, 21504, 28672)), ("K", (5376, 7168, 14336))),
    contracts=(
        Contract(
            name="kchain",
            summary="one chain per element: on Hopper the bits of cuBLAS without split-K",
            exactness="kchain",
            reductions=(
                Reduction("y", "K", f"{CHAIN.format(axis='k')} + bias"),
                Reduction("grad_x", "N", CHAIN.format(axis="n")),
                Reduction(
                    "grad_weight",
                    "T",
                    f"{CHAIN.format(axis='rows')}. It can be continued after every multiple of 16 rows",
                ),
                Reduction("grad_bias", "T", "left fold from +0 over ascending rows"),
            ),
            rounding=(
                "y: FP32 to the dtype of x, once, after the bias; not at all where out_dtype asks for FP32, and then its upstream "
                "gradient is rounded once to the dtype of x",
                "grad_x, grad_weight: FP32, or one rounding to the dtype of x where grad_dtype asks for it",
                "grad_bias: FP32",
            ),
            source="samebits",
            proofs=ON_H200,
            chain_rows=16,
        ),
    ),
    backends=(
        BackendSpec(
            "cuda",
            min_arch=80,
            note="compute capability 9.0 alone, whose tensor cores the model of the contract describes",
        ),
        BackendSpec("reference"),
    ),
    edges=(
        "T = 0 gives an empty y, and zeros (or the starts) for grad_weight and grad_bias",
        "an operand that is not finite, or a sum that overflows FP32, gives NaN, never infinity, in its elements; a sum that is "
        "finite in FP32 and too large for the dtype rounds to infinity",
        "y is never -0: the sum is +0 before the bias is added, and -0 + 0 = 0",
    ),
)
