"""``samebits.explain`` for every operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from samebits import catalogue
from samebits.operator import explain as of_rows

if TYPE_CHECKING:
    from samebits.operator import Prepared
    from samebits.sequence_ops.attention.choice import Decision


def explain(operator: str, *tensors: Tensor | None, backward: bool = False, **options: Any) -> Prepared | Decision:
    """Which backend and launch plan a call would take, and why (``choice``). Runs nothing.

    ``tensors`` in the order of the torch operator. ``options``: ``contract``, ``backend`` and what else the operator takes; for the
    backward of an operator of rows ``grad_dtype`` and ``wanted``. What it returns has ``choice`` and ``call``; for an operator
    of rows also ``copies``, the inputs that would be copied.
    """
    if operator in catalogue.of_sequences():
        found: Decision = catalogue.part(operator, "explanation").explain(*tensors, backward=backward, **options)
        return found
    return of_rows(operator, *tensors, backward=backward, **options)
