"""What passes between the parts of a whole transformer: caught by hooks as it runs, alone or in a batch, in BF16 or in FP64.

A *boundary* is what one part hands to the next: the embedded rows of each modality, the refiner and its blocks, the packed
sequence, the time embedding, the residual stream behind every block, the last norm, both heads, the two velocities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from samebits.models.difference import rows_differing
from samebits.models.minimax_h3.forward import RowCheck
from samebits.models.minimax_h3.subject import PER_ROW, Subject

Made = dict[str, Tensor]
"""By boundary, in the order in which the model makes them."""
PACKED = "packed rows"
"""What the first block reads."""
TIME = "time_embedder"
"""Its output (T, D) is of no sequence: the whole batch shares it."""
VELOCITIES = ("video velocity", "audio velocity")
ROUNDS = 3
"""Of a timed call; the shortest counts."""


def parts(model: Any) -> dict[str, nn.Module]:
    """The modules behind which there is a boundary, by name."""
    names = (
        "proj_in",
        "audio_proj_in",
        "context_embedder",
        "token_refiner",
        TIME,
        "norm_out",
        "proj_out",
        "audio_proj_out",
    )
    named: dict[str, nn.Module] = {name: getattr(model, name) for name in names}
    refiner = model.token_refiner.refiner_blocks
    named |= {f"token_refiner.refiner_blocks.{at}": block for at, block in enumerate(refiner)}
    return named | {f"transformer_blocks.{at}": block for at, block in enumerate(model.transformer_blocks)}


@dataclass(frozen=True)
class Caught:
    made: Made
    given: dict[str, tuple[Any, ...]]
    """What each part was called with."""


def run(subject: Subject, **changes: Any) -> Caught:
    """Every boundary of one forward, with gradients where they are enabled. ``changes`` are other arguments."""
    made: Made = {}
    given: dict[str, tuple[Any, ...]] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
            if name == "transformer_blocks.0":
                made[PACKED] = arguments[0]
            made[name], given[name] = output, arguments

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in parts(subject.model).items()]
    try:
        outputs = subject.model(**subject.inputs | changes)
    finally:
        for handle in handles:
            handle.remove()
    return Caught(made | dict(zip(VELOCITIES, outputs, strict=True)), given)


def sequences(subject: Subject) -> int:
    return int(subject.inputs[PER_ROW[0]].shape[0])


def backwards(subject: Subject) -> dict[str, Tensor]:
    """The arguments with the sequences of the batch in the other order, so that each has another place and neighbour."""
    return {name: subject.inputs[name].flip(0) for name in PER_ROW}


def row_check(
    name: str, batch: Tensor, others: Iterator[tuple[slice, Tensor]] | list[tuple[slice, Tensor]]
) -> RowCheck:
    """Rows of a boundary that differ from those of other runs.

    Args:
        batch: (B, N, ...) of the run with all sequences; what they share has no B.
        others: which sequences another run had, and what it made of them, in that order.
    """
    if name == TIME:
        varying = torch.zeros(batch.shape[0], dtype=torch.bool)
        for _, value in others:
            varying |= rows_differing(batch, value).cpu()
    else:
        varying = torch.zeros(batch.shape[:2], dtype=torch.bool)
        for where, value in others:
            part = batch[where]
            varying[where] |= rows_differing(part.flatten(0, 1), value.flatten(0, 1)).cpu().view(part.shape[:2])
    found = varying.flatten().nonzero().flatten().tolist()
    return RowCheck(varying.numel(), len(found), found[0] if found else None)


@torch.no_grad()
def rows(subject: Subject, whole: Made) -> dict[str, RowCheck]:
    """Every boundary with each sequence alone, and in the batch in the other order."""
    others: dict[str, list[tuple[slice, Tensor]]] = {name: [] for name in whole}
    for item in range(sequences(subject)):
        for name, value in run(subject, **subject.alone(item)).made.items():
            others[name].append((slice(item, item + 1), value))
    for name, value in run(subject, **backwards(subject)).made.items():
        others[name].append((slice(None), value if name == TIME else value.flip(0)))
    return {name: row_check(name, value, others[name]) for name, value in whole.items()}


# --- in FP64 ----------------------------------------------------------------------------------------------------------


@contextmanager
def widened(module: nn.Module) -> Iterator[None]:
    """Parameters and buffers in FP64, then the same bits as before: a number of fewer bits comes back exactly."""
    held = [value for value in (*module.parameters(), *module.buffers()) if value.is_floating_point()]
    dtypes = [value.dtype for value in held]
    try:
        for value in held:
            value.data = value.data.double()
        yield
    finally:
        for value, dtype in zip(held, dtypes, strict=True):
            value.data = value.data.to(dtype)


@torch.no_grad()
def exact(subject: Subject) -> Made:
    """Every boundary of the class in FP64, nothing rounded in between; one block at a time is wide, so that any depth fits."""
    model: Any = subject.model
    open_now: list[Any] = []

    def widen(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        context = widened(module)
        context.__enter__()
        open_now.append(context)

    def narrow(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
        open_now.pop().__exit__(None, None, None)

    blocks = model.transformer_blocks
    handles = [block.register_forward_pre_hook(widen) for block in blocks]
    handles += [block.register_forward_hook(narrow) for block in blocks]
    others = nn.ModuleList(child for name, child in model.named_children() if name != "transformer_blocks")
    try:
        with widened(others):
            return run(subject).made
    finally:
        for handle in handles:
            handle.remove()
        for context in open_now:
            context.__exit__(None, None, None)


# --- time and memory --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    seconds: float
    """Of the shortest of a few calls, by the clock of the host, with the device idle before and after."""
    extra_bytes: int | None
    """Most memory beyond what was there before; None on a CPU, where it is not known."""


def cost(function: Callable[[], object], device: torch.device) -> Cost:
    """Of a call that has run before, so that nothing is compiled or loaded in it."""
    before = 0
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    times = []
    for _ in range(ROUNDS):
        start = perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(perf_counter() - start)
    extra = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else None
    return Cost(min(times), extra)
