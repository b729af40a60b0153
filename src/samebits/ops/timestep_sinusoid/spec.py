"""The contract of ``timestep_sinusoid``. Source: MiniMax-H3 (diffusers 0.42.1), ``time_proj``."""

from samebits.contract import ON_H200, BackendSpec, Contract, OpSpec, Pass, Reduction, Result, TensorArg

_FREQUENCIES = TensorArg(
    "frequencies", ("F",), ("float32",), rows=False, sample="positive", doc="radians per unit of time; no gradient"
)

SPEC = OpSpec(
    name="timestep_sinusoid",
    summary="Sinusoidal features of a diffusion time in [0, 1]: all cosines, then all sines.",
    forward=Pass(
        inputs=(
            TensorArg("timestep", (), ("float32", "bfloat16", "float16"), sample="unit", doc="one time per row"),
            _FREQUENCIES,
        ),
        results=(Result("features", ("C",), "float32", tolerance="elementwise", doc="[cos(t f) | sin(t f)]"),),
    ),
    backward=Pass(
        inputs=(
            TensorArg("grad_features", ("C",), ("float32",), doc="upstream gradient of features"),
            _FREQUENCIES,
            TensorArg("features", ("C",), ("float32",), doc="as the forward returned them; no sine is computed again"),
        ),
        results=(Result("grad_timestep", (), "float32", doc="gradient of timestep"),),
    ),
    fixed_sizes=(("P", 2),),
    products=(("C", ("P", "F")),),
    size_limits=(("F", 1, 4096),),
    tuned=(("F", (128,)),),
    contracts=(
        Contract(
            name="halving",
            summary="sine and cosine of torch on the same device; the gradient is a halving tree over the channels",
            exactness="device",
            reductions=(
                Reduction(
                    "grad_timestep",
                    "C",
                    "terms -(grad_cos * sin) * f, then (grad_sin * cos) * f, each product rounded; padded with +0 to a power "
                    "of two; then p[u] = p[u] + p[u + half], half = n/2, n/4, ..., 1",
                ),
            ),
            rounding=(
                "a BF16 or FP16 timestep is widened to FP32 first, which is exact",
                "argument: the FP32 product t * f, rounded before the sine and the cosine see it",
                "grad_timestep: FP32; autograd rounds it once to the dtype of timestep",
            ),
            fma="explicit",  # inside sin and cos, as the CUDA library writes them
            source="MiniMax-H3, time_proj of diffusers 0.42.1",
            proofs=ON_H200,
        ),
    ),
    backends=(BackendSpec("cuda", min_arch=80), BackendSpec("reference")),
    edges=(
        "T = 0 gives no rows",
        "the public function refuses times outside [0, 1], NaN and infinities; where it may not look at values (graph capture, "
        "torch.compile) and in the torch op such a row is NaN, and so is its gradient: no later value hides it",
        "an argument beyond 65536 is NaN: the reduction of large arguments is not needed for times in [0, 1]",
    ),
)
