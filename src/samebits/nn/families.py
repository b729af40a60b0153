"""One name for the contracts of all operators of a hyper-connection, so that a model has one word for its bits."""

from __future__ import annotations

from collections.abc import Mapping

from samebits import registry

FAMILIES = ("ascending", "ascending-dsv4", "fast", "fast-dsv4")
"""``-dsv4``: the RMS of the controller as the DeepSeek-V4 checkpoint was trained, otherwise as the published manifest."""
OPERATORS = ("mhc_pre", "mhc_pre_norm", "mhc_post", "hyper_head", "rmsnorm_residual")
"""What a model with hyper-connections calls."""

Contracts = str | Mapping[str, str] | None
"""A family, or operator name to contract name (published where not named), or None: published."""

_OTHER_NAMES = {("rmsnorm_residual", "fast"): "tree512"}


def _member(operator: str, family: str) -> str:
    known = {contract.name for contract in registry.spec(operator).contracts}
    if family in known:
        return family
    plain = family.removesuffix("-dsv4")  # no controller in it, so no form of its RMS either
    return registry.spec(operator).contract(_OTHER_NAMES.get((operator, plain), plain)).name


_MEMBERS = {family: {operator: _member(operator, family) for operator in OPERATORS} for family in FAMILIES}
_KNOWN = {operator: tuple(c.name for c in registry.spec(operator).contracts) for operator in OPERATORS}


def contract_of(operator: str, contracts: Contracts) -> str:
    """The contract of one of ``OPERATORS``.

    Raises:
        ValueError: no family of that name, an operator that is none of these, or a contract that it does not have.
    """
    if contracts is None:
        return _KNOWN[operator][0]
    if isinstance(contracts, str):
        if contracts not in _MEMBERS:
            raise ValueError(f"no family of contracts named {contracts!r}; choose one of {', '.join(FAMILIES)}")
        return _MEMBERS[contracts][operator]
    for name, contract in contracts.items():
        if name not in _KNOWN:
            raise ValueError(f"contracts names {name!r}, which is not used here; used are {', '.join(OPERATORS)}")
        if contract not in _KNOWN[name]:
            raise ValueError(f"{name}: no contract named {contract!r}; choose one of {', '.join(_KNOWN[name])}")
    return contracts.get(operator, _KNOWN[operator][0])
