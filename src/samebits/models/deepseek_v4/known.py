"""Which ``transformers`` code we know. The version is only the name of the code: what is checked is the code itself.

A replacement is right only for the forward it was written against, so the source of every replaced forward (comments and
docstring aside) is compared with a digest taken when the replacement was verified. A release that changes none is
accepted, one that changes any is refused until somebody has looked.
"""

from __future__ import annotations

from types import ModuleType

from torch import nn

from samebits.models.source import digest

LAYER = "DeepseekV4DecoderLayer"
HYPER_CONNECTION = "DeepseekV4HyperConnection"
HYPER_HEAD = "DeepseekV4HyperHead"
RMSNORM = "DeepseekV4RMSNorm"
VERIFIED = ("5.17.0", "5.24.0")
DIGESTS: dict[str, dict[str, str]] = {
    LAYER: {"2ed292c80fca9361": "5.17.0"},
    HYPER_CONNECTION: {"6e08ac93a21c134d": "5.17.0", "aa7decb5288c664b": "5.24.0"},
    HYPER_HEAD: {"e17ba64bc3c7c81d": "5.17.0"},
    RMSNORM: {"43166e7d2d714cbb": "5.17.0", "1445da9c92743435": "5.24.0"},
}
"""Class to digest of its forward to the first release it was read in."""


def modeling() -> ModuleType:
    """The module of the DeepSeek-V4 classes.

    Raises:
        ModuleNotFoundError: transformers is not installed, or is too old to have the model.
    """
    try:
        from transformers.models.deepseek_v4 import modeling_deepseek_v4
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"the DeepSeek-V4 classes need transformers {VERIFIED[0]} or later: pip install 'samebits[models]' ({error})"
        ) from error
    return modeling_deepseek_v4


def transformers_version() -> str:
    import transformers

    return str(transformers.__version__)


def require(module: nn.Module, name: str, where: str) -> None:
    """Refuse a module that is not exactly the known class with the known forward.

    Raises:
        TypeError: another class, a subclass, or an instance whose forward was already replaced.
        RuntimeError: the class, but with a forward that was never verified.
    """
    expected = getattr(modeling(), name)
    if type(module) is not expected:
        raise TypeError(
            f"{where} is a {type(module).__module__}.{type(module).__qualname__}; only {expected.__module__}.{name} "
            f"itself is supported (a subclass may compute something else)"
        )
    if "forward" in vars(module):
        raise TypeError(f"{where} already has a forward of its own (a patch or a hub kernel); undo that first")
    found = digest(expected.forward)
    if found not in DIGESTS[name]:
        raise RuntimeError(
            f"{name}.forward of transformers {transformers_version()} (digest {found}) is not one that samebits was "
            f"verified against: transformers {', '.join(VERIFIED)}; install one of those releases"
        )


def norm_rounds_before_weight() -> bool:
    """Whether this release rounds x * rstd to BF16 before the weight (5.17) or only the finished product (5.24)."""
    return DIGESTS[RMSNORM][digest(getattr(modeling(), RMSNORM).forward)] == "5.17.0"
