"""Which code of diffusers we know. The release is only the name of the code: what is checked is the code itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from samebits.models.minimax_h3.peer import modeling
from samebits.models.source import digest

VERIFIED = ("0.42.1",)
BLOCK = "MiniMaxH3TransformerBlock"
MODULATION = "MiniMaxH3AdaLayerNormModulation"
NORM_OUT = "MiniMaxH3AdaLayerNormOut"
ATTENTION = "MiniMaxH3Attention"
PROCESSOR = "MiniMaxH3AttnProcessor"
REFINER_BLOCK = "MiniMaxH3TokenRefinerBlock"
REFINER = "MiniMaxH3TokenRefiner"
MODEL = "MiniMaxH3Transformer3DModel"
SWIGLU, TIME_EMBEDDING, TIMESTEPS = "SwiGLU", "TimestepEmbedding", "Timesteps"
DIGESTS: dict[str, dict[str, str]] = {
    BLOCK: {"914e0c67e3fb15eb": "0.42.1"},
    MODULATION: {"90fc709e97d568e8": "0.42.1"},
    NORM_OUT: {"07a129dfad0a35e4": "0.42.1"},
    PROCESSOR: {"07171e4e55ed1542": "0.42.1"},
    "_apply_rotary_emb": {"c64215a9ab22fdd4": "0.42.1"},
    SWIGLU: {"806e254ed4561434": "0.42.1"},
    TIME_EMBEDDING: {"7894dd4ca2ac4763": "0.42.1"},
    TIMESTEPS: {"c85e07a86c4b55f8": "0.42.1"},
    "get_timestep_embedding": {"23ace55e3c0c965a": "0.42.1"},
    ATTENTION: {"4bfc3bd9d0a56f7d": "0.42.1"},
    REFINER_BLOCK: {"41dbdab26668e553": "0.42.1"},
    MODEL: {"69d63d589c9f3f09": "0.42.1"},
}
"""What we replace, or rely on to call what we replace: to the digest of its code, and the first release it was read in."""


def home(name: str) -> Any:
    """A class or function of diffusers by its name."""
    from diffusers.models import activations, embeddings

    for module in (modeling(), embeddings, activations):
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"diffusers has no {name}")


def code(name: str) -> Callable[..., Any]:
    """The function whose code is known: a module's forward, a processor's call, or the function itself."""
    found: Any = home(name)
    if isinstance(found, type):
        found = found.forward if issubclass(found, nn.Module) else found.__call__
    while hasattr(found, "__wrapped__"):
        found = found.__wrapped__
    return found


def require_known() -> None:
    """Refuse a release whose code was never looked at.

    Raises:
        ImportError: diffusers is missing, or too old to have the model.
        RuntimeError: a function differs from all releases we know.
    """
    modeling()
    for name, known in DIGESTS.items():
        found = digest(code(name))
        if found not in known:
            raise RuntimeError(
                f"{name} of diffusers {version()} (digest {found}) is not one that samebits was verified against: diffusers "
                f"{', '.join(VERIFIED)}; install one of those releases"
            )


def version() -> str:
    import diffusers

    return str(diffusers.__version__)


def require_class(module: Any, expected: type, where: str) -> None:
    """TypeError: not exactly this class, or an instance whose forward was replaced."""
    if type(module) is not expected:
        raise TypeError(
            f"{where} is a {type(module).__module__}.{type(module).__qualname__}; only {expected.__module__}."
            f"{expected.__qualname__} itself is supported (a subclass may compute something else; fully_shard after the patch)"
        )
    if "forward" in vars(module):
        raise TypeError(f"{where} already has a forward of its own (a patch or a hub kernel); undo that first")
