"""Small models that a trace is tried on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """A residual block: its input has two consumers, so the order in which gradients meet matters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks, each checkpointed where ``reentrant`` is given."""

    def __init__(self, width: int = 8, blocks: int = 2, reentrant: bool | None = None, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class Nudged(nn.Module):
    """Another module, whose output is one ulp off in one element of one row."""

    def __init__(self, module: nn.Module, row: int = 0) -> None:
        super().__init__()
        self.module, self.row = module, row

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return nudge(self.module(*args, **kwargs), self.row)


def nudge(y: Tensor, row: int = 0) -> Tensor:
    """``y`` with one element of a row one ulp up; the gradient passes."""
    moved = y.detach().clone()
    flat = moved[row].view(-1)
    flat[0] = torch.nextafter(flat[0], torch.tensor(torch.inf))
    return y + (moved - y).detach()


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        changed = grad.clone()
        changed.view(-1)[0] += 1  # more than a sum with other gradients can absorb
        return changed


def wrong_gradient(x: Tensor) -> Tensor:
    """The identity, whose gradient is off in one element."""
    return _WrongGradient.apply(x)


def batch(rows: int = 4, width: int = 8, seed: int = 5) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
