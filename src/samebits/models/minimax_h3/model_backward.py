"""Gradients of a whole transformer: of its rows and parameters, and what reaches every boundary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samebits.exact.bits import digest
from samebits.models.minimax_h3.block_backward import BlockLeaf
from samebits.models.minimax_h3.forward import RowCheck
from samebits.models.minimax_h3.measure import Agreement, agreement, error, repeats
from samebits.models.minimax_h3.model_run import (
    TIME,
    VELOCITIES,
    Made,
    backwards,
    row_check,
    run,
    sequences,
    widened,
)
from samebits.models.minimax_h3.subject import PER_ROW, Subject
from samebits.verify.tolerance import tolerance


@dataclass(frozen=True)
class Reached:
    """The gradient that reaches a boundary, or the rows that the model was given."""

    name: str
    digest: str
    repeat: bool
    peer_repeat: bool
    rows: RowCheck
    """Rows that have other bits with their sequence alone, or at another place in the batch."""
    peer_rows: RowCheck
    chained: Agreement


@dataclass(frozen=True)
class Leaf(BlockLeaf):
    """The gradient of one parameter, or of the rows of one modality."""

    digest: str = ""


@dataclass(frozen=True)
class ModelGradients:
    leaves: tuple[Leaf, ...]
    reached: tuple[Reached, ...]


@dataclass(frozen=True)
class Side:
    """One model's gradients: twice, and those that reach a boundary with its sequences arranged otherwise."""

    first: Made
    repeat: dict[str, bool]
    rows: dict[str, RowCheck]


def upstream(subject: Subject, outputs: tuple[Tensor, ...], seed: int) -> tuple[Tensor, ...]:
    """Random gradients of both velocities, from torch's CPU generator."""
    generator = torch.Generator().manual_seed(seed + 2)
    return tuple(torch.randn(value.shape, generator=generator).to(value) for value in outputs)


def gradients(subject: Subject, given: tuple[Tensor, ...], **changes: Any) -> Made:
    """By the name of a parameter, of the rows of a modality, and of a boundary."""
    drawn = subject.inputs | changes
    tensors = {name: drawn[name].detach().clone().requires_grad_() for name in PER_ROW}
    leaves: Made = tensors | dict(subject.model.named_parameters())
    with torch.enable_grad():
        made = run(subject, **changes | tensors).made
    outputs = [made.pop(name) for name in VELOCITIES]
    names = (*leaves, *(_at(name) for name in made))
    found = torch.autograd.grad(outputs, [*leaves.values(), *made.values()], [g.to(outputs[0].dtype) for g in given])
    return dict(zip(names, found, strict=True))


def _at(boundary: str) -> str:
    return f"at {boundary}"


def _has_rows(name: str) -> bool:
    """Whether there is a gradient for every row of every sequence, and not a sum over all of them."""
    return name in PER_ROW or (name.startswith("at ") and name != _at(TIME))


def side(subject: Subject, given: tuple[Tensor, ...]) -> Side:
    first = gradients(subject, given)
    again = gradients(subject, given)
    repeat = {name: repeats((value,), (again[name],)) for name, value in first.items()}
    del again
    names = [name for name in first if _has_rows(name)]
    others: dict[str, list[tuple[slice, Tensor]]] = {name: [] for name in names}
    for item in range(sequences(subject)):
        alone = gradients(subject, tuple(g[item : item + 1] for g in given), **subject.alone(item))
        for name in names:
            others[name].append((slice(item, item + 1), alone[name]))
    turned = gradients(subject, tuple(g.flip(0) for g in given), **backwards(subject))
    for name in names:
        others[name].append((slice(None), turned[name].flip(0)))
    return Side(first, repeat, {name: row_check(name, first[name], others[name]) for name in names})


def exact(subject: Subject, given: tuple[Tensor, ...]) -> Made:
    """The gradients of the class in FP64. The whole model is wide at once: eight bytes a parameter, and as much for gradients."""
    with widened(subject.model):
        return gradients(subject, given)


def compare(ours: Side, theirs: Side, golden: Made) -> ModelGradients:
    leaves, reached = [], []
    for name, value in ours.first.items():
        peer = theirs.first[name]
        beside = agreement((value,), (peer,))
        if name in ours.rows:
            pair = ours.rows[name], theirs.rows[name]
            reached.append(Reached(name, digest(value), ours.repeat[name], theirs.repeat[name], *pair, beside))
        if not name.startswith("at "):
            limit = tolerance("reduction", value.dtype, gradient=True)
            leaves.append(
                Leaf(
                    name=name,
                    dtype=str(value.dtype).removeprefix("torch."),
                    golden_absmax=float(golden[name].abs().max()),
                    repeat=ours.repeat[name],
                    peer_repeat=theirs.repeat[name],
                    chained=beside,
                    error=error((value,), (golden[name],), limit),
                    peer_error=error((peer,), (golden[name],), limit),
                    digest=digest(value),
                )
            )
    return ModelGradients(tuple(leaves), tuple(reached))
