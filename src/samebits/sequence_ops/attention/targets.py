"""Speed targets of ``attention`` on an H200: 56 heads of 128, BF16, not causal; T is the length of the sequence."""

from samebits.bench.targets import Target

SHAPE = (("H", 56), ("D", 128))
FLASH, FLASH_DETERMINISTIC, CUDNN = "FlashAttention-2", "FlashAttention-2 deterministic", "cuDNN"


def _ratio(direction: str, length: int, least: float, peer: str, *contracts: str) -> Target:
    rows = (length, length)
    return Target(direction, SHAPE, rows, "ratio", at_least=least, contracts=contracts, backend="cuda", peer=peer)  # type: ignore[arg-type]


TARGETS = (
    _ratio("fwd", 925, 1.0, FLASH, "cudnn"),
    _ratio("fwd", 3160, 1.3, FLASH, "cudnn"),
    _ratio("fwd", 16384, 1.4, FLASH, "cudnn"),
    _ratio("fwd", 3160, 1.0, FLASH, "fa2"),
    _ratio("fwd", 16384, 1.0, FLASH, "fa2"),
    *(_ratio("bwd", length, 1.2, FLASH) for length in (3160, 16384)),
    *(_ratio("bwd", length, 2.0, FLASH_DETERMINISTIC) for length in (3160, 16384)),
)
STRETCH = (
    *(_ratio("fwd", length, 0.95, CUDNN, "cudnn") for length in (925, 3160, 16384)),
    *(_ratio("fwd", length, 1.4, FLASH, "fa2") for length in (3160, 16384)),
    *(_ratio("bwd", length, 0.85, CUDNN) for length in (3160, 16384)),
)
