"""The declaration of ``attention``."""

from samebits.contract import BackendSpec
from samebits.sequence_ops.attention.contracts import DTYPES, NAME, RECIPES
from samebits.sequence_ops.declaration import SequencePass, SequenceSpec, TensorSpec

_Q, _K = "(B, S_q, H, D)", "(B, S_k, H_kv, D)"
_BOUNDS = ("int32", "int64")

_GIVEN = (
    TensorSpec("q", _Q, DTYPES, "queries, D = 64 or 128; any strides with a dense last axis"),
    TensorSpec("k", _K, DTYPES, "keys, dtype of q; H is a multiple of H_kv"),
    TensorSpec("v", _K, DTYPES, "values, like the keys"),
)
_PACKING = (
    TensorSpec("cu_seqlens", "(N + 1)", _BOUNDS, "optional: B is 1 and holds N documents, cut here"),
    TensorSpec("cu_seqlens_k", "(N + 1)", _BOUNDS, "optional: as much for the keys, where they are packed otherwise"),
)
_OUT = TensorSpec("out", _Q, ("q",), "softmax(scale q k^T) v")
_LSE = TensorSpec("lse", "(B, H, S_q)", ("float32",), "ln sum exp(scale s); -inf where no key is seen; no gradient")

SPEC = SequenceSpec(
    name=NAME,
    summary="Softmax attention, causal or not, shared key heads, packed documents.",
    forward=SequencePass((*_GIVEN, *_PACKING), (_OUT, _LSE), values=("s", "l", "p")),
    backward=SequencePass(
        inputs=(TensorSpec("grad_out", _Q, ("q",), "upstream gradient of out"), *_GIVEN, _OUT, _LSE, *_PACKING),
        results=(
            TensorSpec("grad_q", _Q, ("q",)),
            TensorSpec("grad_k", _K, ("k",)),
            TensorSpec("grad_v", _K, ("v",)),
        ),
        values=("s", "delta", "p", "ds"),
    ),
    contracts=tuple(recipe.contract for recipe in RECIPES.values()),
    backends=(
        BackendSpec("cuda", min_arch=90, note="compute capability 9.0 alone, tensors that TMA can read"),
        BackendSpec("triton", min_arch=80),
        BackendSpec("reference"),
    ),
    edges=(
        "A query that sees no key (causal, more queries than keys; an empty document): out = 0, lse = -inf, no gradient.",
        "No query, no key, an empty batch: nothing is launched; gradients of keys that no query sees are +0.",
        "A hidden key whose value is not finite may or may not reach a row (0 * inf); other documents are never read.",
    ),
)
