"""q, k and v of a patched block are one call, unless somebody stands between the block and one of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import samebits
from samebits.exact.compare import same_bits
from samebits.models.minimax_h3 import block_bench
from samebits.models.minimax_h3.geometry import reduced
from samebits.ops.linear import grouped

NAMES = ("to_q", "to_k", "to_v")


@pytest.fixture
def block() -> Any:
    return block_bench.subject(16, reduced(64), torch.device("cpu"))


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many projections each call of ``linear_group`` has."""
    seen: list[int] = []
    ours = grouped.linear_group

    def counted(x: Any, weights: Any, *rest: Any, **options: Any) -> Any:
        seen.append(len(weights))
        return ours(x, weights, *rest, **options)

    monkeypatch.setattr(samebits, "linear_group", counted, raising=False)
    return seen


def run(given: Any, module: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        made: torch.Tensor = module(given.hidden, given.temb, given.index, given.rotary)
    return made


def test_they_are_one_call_and_each_site_counts(block: Any, widths: list[int]) -> None:
    before = samebits.patched(block.ours).hits
    run(block, block.ours)
    hits = samebits.patched(block.ours).hits
    assert widths == [3]
    for name in NAMES:
        (at,) = (site for site in hits if site.endswith(name))
        assert hits[at] == before[at] + 1


def doubled(module: Any) -> None:
    module.register_forward_hook(lambda m, args, out: out * 2)


def replaced(module: Any) -> None:
    forward = module.forward
    module.forward = lambda x: forward(x) * 2


class Adapter(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.inner(x) * 2
        return made


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", [doubled, replaced, Adapter])
def test_who_changes_one_of_them_is_heard(
    block: Any, widths: list[int], name: str, change: Callable[[Any], Any]
) -> None:
    twin = copy.deepcopy(block.ours)
    attention = twin.attn
    with torch.no_grad():
        getattr(attention, name).weight.mul_(2)  # doubles what it makes, in every bit
    expected = run(block, twin)
    assert not same_bits(expected, run(block, block.ours))
    widths.clear()
    changed = block.ours.attn
    instead = change(getattr(changed, name))
    if instead is not None:
        setattr(changed, name, instead)
    assert same_bits(run(block, block.ours), expected)
    assert widths == []


def test_a_global_hook_sees_them(block: Any, widths: list[int]) -> None:
    seen: list[nn.Module] = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append(module))
    try:
        run(block, block.ours)
    finally:
        handle.remove()
    assert widths == [] and {getattr(block.ours.attn, name) for name in NAMES} <= set(seen)
