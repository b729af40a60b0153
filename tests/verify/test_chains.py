"""Folds over rows continue from a start: micro-batches give the bytes of the single batch, for every operator that can."""

import pytest
import torch

from samebits import registry
from samebits.verify.operators import OperatorSubject

CONTINUED = [
    (name, contract.name)
    for name in registry.names()
    for contract in registry.spec(name).contracts
    if any(arg.name.startswith("start_") for arg in registry.spec(name).backward.inputs)
]


def test_some_operator_continues_a_chain() -> None:
    assert ("rmsnorm_residual", "ascending") in CONTINUED


@pytest.mark.parametrize(("name", "contract"), CONTINUED)
def test_micro_batches_continue_one_chain(name: str, contract: str) -> None:
    spec = registry.spec(name)
    step = spec.contract(contract).chain_rows
    parts = (5, 1, 7, 0, 4) if step == 1 else (step, 7)
    sizes = {axis: min(most, 12) for axis, _, most in spec.size_limits}
    subject = OperatorSubject(name, contract, "reference", torch.device("cpu"), None, sum(parts), 3, sizes)
    op = registry.operator(name)

    def backward(ids: range, starts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        batch = subject.batch(ids)
        tensors = subject.backward_inputs(batch, subject.forward(batch))
        given = [starts.get(a.name, t) for a, t in zip(spec.backward.inputs, tensors, strict=True)]
        results = op.backward(*given, contract=contract, backend="reference", **subject.scalars)
        shared = zip(spec.backward.results, results, strict=True)
        return {r.name.removeprefix("grad_"): v for r, v in shared if not r.rows and v is not None}

    whole = backward(range(sum(parts)), {})
    carried: dict[str, torch.Tensor] = {}
    first = 0
    for count in parts:
        carried = backward(range(first, first + count), {f"start_{n}": v for n, v in carried.items()})
        first += count
    assert carried.keys() == whole.keys() and whole
    for key, value in whole.items():
        assert torch.equal(value.view(torch.int32), carried[key].view(torch.int32)), key
        assert value.abs().max() > 0
