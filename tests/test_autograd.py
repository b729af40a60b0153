"""Derivatives that are refused for every operator, because a part of them would silently be missing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from samebits import registry
from samebits.checks import DTYPES
from samebits.contract import Pass

OPERATORS = registry.names()


def tensors(name: str, direction: Pass) -> list[Tensor]:
    spec = registry.spec(name)
    sizes = spec.complete({axis: 8 for axis, _, _ in spec.size_limits})
    made = []
    for arg in direction.inputs:
        shape = ([3] if arg.rows else []) + [sizes.get(axis, 8) for axis in arg.axes]
        made.append(torch.rand(shape).to(DTYPES[arg.dtypes[0]]))
    return made


@pytest.mark.parametrize("name", OPERATORS)
def test_forward_mode_is_refused_not_dropped(name: str) -> None:
    op = registry.operator(name)
    given = tensors(name, op.spec.forward)
    with pytest.raises(NotImplementedError, match="forward-mode AD"):
        torch.func.jvp(lambda first: op.forward(first, *given[1:])[0], (given[0],), (given[0],))
    scalars = [s.default for s in op.spec.scalars]
    contract = op.spec.default_contract.name
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(given[0], given[0])
        with pytest.raises(NotImplementedError, match="forward-mode AD"):
            op.forward(dual, *given[1:])
        with pytest.raises(NotImplementedError, match="forward-mode AD"):
            getattr(torch.ops.samebits, name)(dual, *given[1:], *scalars, contract, None)
        backward = tensors(name, op.spec.backward)
        with pytest.raises(NotImplementedError, match=f"{name}_backward: forward-mode AD"):
            op.backward(forward_ad.make_dual(backward[0], backward[0]), *backward[1:])
        assert op.forward(*given)[0].shape[0] == 3  # a call without tangents is as always


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("dtype", ["float16", "float64", "junk"])
def test_gradients_are_given_in_the_contract_s_dtypes_alone(name: str, dtype: str) -> None:
    """The registered op takes the dtype as a string; what is not known would become a buffer of the wrong size."""
    op = registry.operator(name)
    scalars = [s.default for s in op.spec.scalars]
    mask = [True] * len(op.spec.backward.results)
    arguments: list[Any] = [
        *tensors(name, op.spec.backward),
        *scalars,
        op.spec.default_contract.name,
        None,
        dtype,
        mask,
    ]
    with pytest.raises(TypeError, match="grad_dtype must be"):
        getattr(torch.ops.samebits, f"{name}_backward")(*arguments)
