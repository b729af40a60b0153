"""What a piece of code may do: read from the contracts it serves, or from a user's ``--allow`` for a foreign file."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from samebits.contract import Contract

RULE_NAMES = ("float-atomic", "contraction", "approximate", "ftz", "local-memory", "tensor-core")

_APPROXIMATE = re.compile(
    r"((rcp|rsqrt|sqrt|ex2|lg2|sin|cos|tanh|div)\.approx|div\.full)(\.ftz)?\.(f16|f16x2|bf16|bf16x2|f32|f64)"
)


@dataclass(frozen=True)
class Limits:
    fma: Literal["forbid", "explicit", "any"] = "forbid"
    """``explicit``: written fused multiply-adds are fine, but nothing may be left for the assembler to fuse."""
    approximate: frozenset[str] = frozenset()
    """PTX instructions, exactly as written: ``rsqrt.approx.f32`` does not allow ``rsqrt.approx.ftz.f32``."""
    off: frozenset[str] = frozenset()
    """Rules that are not applied."""


STRICT = Limits()
"""For a foreign file: report everything."""


def of_contracts(contracts: Iterable[Contract]) -> Limits:
    """Only what every one of the contracts allows."""
    served = tuple(contracts)
    if not served:
        raise ValueError("a kernel that serves no contract cannot be judged")
    tensor_cores = all(contract.exactness == "kchain" for contract in served)
    return Limits(
        fma="explicit" if all(contract.fma == "explicit" for contract in served) else "forbid",
        approximate=frozenset.intersection(*(frozenset(contract.approximate) for contract in served)),
        off=frozenset({"tensor-core"} if tensor_cores else ()),
    )


def of_allowed(names: Iterable[str]) -> Limits:
    """From ``--allow``: ``fma``, a rule's name, or a PTX instruction such as ``rsqrt.approx.f32``. Else ValueError."""
    fma: Literal["forbid", "any"] = "forbid"
    approximate, off = set(), set()
    for name in names:
        if name in ("fma", "contraction"):
            fma = "any"
        elif name in RULE_NAMES:
            off.add(name)
        elif _APPROXIMATE.fullmatch(name):
            approximate.add(name)
        else:
            raise ValueError(
                f"cannot allow {name!r}; give fma, one of {', '.join(RULE_NAMES)}, "
                "or an approximate PTX instruction such as rsqrt.approx.f32"
            )
    return Limits(fma, frozenset(approximate), frozenset(off))
