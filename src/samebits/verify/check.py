"""The four checks, and a fifth for whoever claims a contract: are these its bits?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from samebits.verify import callables
from samebits.verify.report import Report, environment
from samebits.verify.setup import Setup
from samebits.verify.subject import UsageError, first_line
from samebits.verify.variations import AXES

QUESTIONS = ("accuracy", "reference")
ONLY = (*AXES, *QUESTIONS)
"""What ``only`` accepts for rows: an axis of invariance, or one of the other two questions. Sequences have axes of their own."""
DEFAULT_ROWS = {"cpu": 40, "cuda": 300}


def check(
    candidate: str | Callable[..., Any],
    *,
    against: str | Callable[..., Any] | None = None,
    contract: str | None = None,
    backend: str | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    rows: int | None = None,
    seed: int = 0,
    sizes: Mapping[str, int] | None = None,
    shapes: Sequence[str] = (),
    only: Sequence[str] = (),
    forward_only: bool = False,
) -> Report:
    """Check accuracy and batch invariance of an operator, forward and backward.

    Args:
        candidate: the name of a samebits operator, a callable, or where to find one (``module:callable``,
            ``path/file.py:function``, ``torch.mm``).
        against: for an operator, the callable to judge by the operator's inputs and golden in its place; for a callable,
            the callable (or the operator) that judges it.
        contract, backend: of the operator. A callable that is judged as an operator and names a contract claims its bits.
        device: default the GPU if there is one.
        dtype: of the floating inputs; for an operator, of those inputs that take more than one.
        rows: T of the canonical batch, queries of a sequence; default 40 on a CPU, 300 on a GPU.
        sizes: axis sizes, e.g. ``{"D": 4096}``.
        shapes: argument shapes of a callable that samebits does not know, e.g. ``["T,64", "64,64"]``; T marks the rows.
        only: axes or questions to look at, from ``samebits.verify.ONLY``; default everything.
        forward_only: leave the gradient checks out.

    Raises:
        UsageError (a ValueError): the candidate cannot be found, fed or judged as asked.
    """
    place = _device(device)
    count = rows if rows is not None else DEFAULT_ROWS.get(place.type, 40)
    if count < 1:
        raise UsageError(f"rows must be at least 1, not {count}")
    setup = Setup(candidate, against, contract, backend, place, dtype, count, seed, sizes, tuple(shapes))
    known = (*setup.axes, *QUESTIONS)
    unknown = [axis for axis in only if axis not in known]
    if unknown:
        raise UsageError(f"no axis {unknown[0]!r}; choose from {', '.join(known)}")
    with callables.importable_from_here():
        found = setup.examined(tuple(only), forward_only)
    return Report(
        candidate=found.title,
        judged_against=found.judge_note,
        options=found.options,
        environment=environment(place),
        checks=found.questions.run(),
    )


def _device(asked: str | torch.device | None) -> torch.device:
    available = torch.cuda.is_available()
    if asked is None:
        return torch.device("cuda" if available else "cpu")
    try:
        device = torch.device(asked)
    except RuntimeError as error:
        raise UsageError(f"no device {asked!r}: {first_line(error)}") from error
    if device.type == "cuda" and not available:
        raise UsageError("device='cuda': torch finds no CUDA device here")
    return device
