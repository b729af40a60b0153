"""What ``qk_norm_rope`` should give: FP64, rounded only where the model stores a value. Judges accuracy, never bits.

The model stores the normalised head, and rotates what it stored; the gradient of that is stored between the two backwards. On
which side of a tie the head was rounded is decided by the ``rstd`` of the forward, in FP32; every other statistic is FP64 of
its own, so a wrong ``rstd`` shows in its own comparison.
"""

from __future__ import annotations

from torch import Tensor

from samebits.ops.qk_rmsnorm import golden as norm
from samebits.ops.rope_3axis.golden import turned


def forward(inputs: dict[str, Tensor], scalars: dict[str, float]) -> dict[str, Tensor]:
    given = norm.forward(inputs, scalars)
    return given | {"y": turned(given["y"], inputs["cos"], inputs["sin"], back=False)}


def backward(inputs: dict[str, Tensor], scalars: dict[str, float]) -> dict[str, Tensor]:
    stored = turned(inputs["grad_y"], inputs["cos"], inputs["sin"], back=True)
    return norm.backward(inputs | {"grad_y": stored}, scalars)
