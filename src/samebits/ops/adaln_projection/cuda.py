"""CUDA backend of ``adaln_projection``: which kernels run a call, and their launches. Every plan of a call has the same bits.

Forward: ``activation.cu``, then ``table_kchain.cu`` or ``table_fma.cu``. Backward, the same for both contracts: ``grad_bias.cu``;
``activation.cu`` and ``grad_weight_few.cu`` or ``grad_weight_many.cu``; ``grad_act.cu`` and ``grad_temb.cu``, which take 64 rows at
a time, so that their partials stay small. Only what is wanted runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from samebits.audit.build import Build
from samebits.dispatch import Call, other_tensor_core
from samebits.ops.adaln_projection.reference import CHAIN, CHAINS
from samebits.ops.adaln_projection.spec import SPEC
from samebits.runtime.launch import ELEMENTS, Launch, launch
from samebits.runtime.nvrtc import CudaKernel
from samebits.runtime.sweep import cuda_builds

SLAB = 64
"""Rows of grad_temb that are computed together."""
_GRID = 2**31 - 1
_STAGE_COLUMNS = 64
_FEW, _FEW_TILE, _MANY_TILE = 4, 32, 8
_PARTIAL, _COLUMNS = CHAIN * CHAINS, 256
"""Outputs and columns of a block of grad_act.cu."""


@dataclass(frozen=True)
class Plan:
    """The launches of a call; what its direction or its wanted results do not need is None.

    The arguments of ``activation`` are the padded rows, the pitch, the dtype to round to and whether to store FP32.
    """

    activation: Launch | None = None
    table: Launch | None = None
    grad_bias: Launch | None = None
    grad_weight: Launch | None = None
    grad_act: Launch | None = None
    grad_temb: Launch | None = None

    def __iter__(self) -> Iterator[Launch]:
        yield from (step for step in vars(self).values() if step is not None)

    def __str__(self) -> str:
        return "; then ".join(str(step) for step in self)


def refuses(call: Call) -> str | None:
    """Why this architecture does not get the contract, or None."""
    return other_tensor_core(call, "contract 'fma' runs here") if call.contract == "kchain" else None


def plans(call: Call) -> tuple[Plan, ...]:
    return _backward(call) if call.backward else _forward(call)


def _padded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _kernel(entry: str, **defines: int) -> CudaKernel:
    return CudaKernel("adaln_projection", entry, tuple(sorted(defines.items())))


def _vec(call: Call) -> int:
    """16-byte reads of the weight are legal."""
    return 8 if call.size("D") % 8 == 0 and call.layout("weight").aligned else 1


def _activation(rows: int, pitch: int, dtype: str, wide: bool) -> Launch:
    grid = min(-(-rows * pitch // 256), 2**16)
    return Launch(_kernel("activation"), grid, 256, arguments=(rows, pitch, ELEMENTS[dtype], int(wide)))


# --- forward ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Shape:
    """How a block of table_kchain.cu is cut; the names are those of its macros."""

    MT: int
    NT: int
    WARPS: int
    STAGES: int = 4

    @property
    def outputs(self) -> int:
        return 16 * self.MT * self.WARPS

    @property
    def steps(self) -> int:
        """Timesteps of a block."""
        return 8 * self.NT

    @property
    def shared(self) -> int:
        return 2 * self.STAGES * (self.outputs + self.steps) * _STAGE_COLUMNS


_NARROW, _ONE, _SOME, _MANY = _Shape(1, 1, 2, 8), _Shape(1, 1, 8), _Shape(1, 4, 8), _Shape(2, 8, 4)
"""For few outputs, where small blocks need more stages to keep memory busy; up to 8, 32 and any number of timesteps."""


def _forward(call: Call) -> tuple[Plan, ...]:
    dtype = call.layout("weight").dtype
    rows, outputs, size = call.rows, call.size("N"), call.size("D")
    if call.contract == "fma":
        tiles = (4, 8) if rows <= 4 else (8, 4)
        return tuple(_table_fma(rows, outputs, size, dtype, _vec(call), tile) for tile in tiles)
    vec = _vec(call)
    few = _ONE if vec == 8 and outputs >= 2 * _ONE.outputs * call.device.multiprocessors else _NARROW
    some = _SOME if vec == 8 else _MANY
    best = few if rows <= few.steps else some if rows <= some.steps else _MANY
    order = dict.fromkeys((best, few, some, *((_NARROW,) if vec == 8 else ()), _MANY))
    return tuple(_table_kchain(rows, outputs, size, dtype, vec, shape) for shape in order)


def _table_kchain(rows: int, outputs: int, size: int, dtype: str, vec: int, shape: _Shape) -> Plan:
    tiles = -(-rows // shape.steps) * -(-outputs // shape.outputs)
    kernel = _kernel("table_kchain", ELEMENT=ELEMENTS[dtype], VEC=vec, **vars(shape))
    table = Launch(kernel, min(tiles, _GRID), 32 * shape.WARPS, shape.shared)
    return Plan(_activation(_padded(rows, shape.steps), _padded(size, _STAGE_COLUMNS), dtype, wide=False), table)


def _table_fma(rows: int, outputs: int, size: int, dtype: str, vec: int, tile: int) -> Plan:
    warps = -(-rows // tile) * -(-outputs // 4)
    table = Launch(_kernel("table_fma", ELEMENT=ELEMENTS[dtype], ROWS=tile, VEC=vec), min(-(-warps // 4), _GRID), 128)
    return Plan(_activation(_padded(rows, tile), _padded(size, 8), dtype, wide=False), table)


# --- backward ---------------------------------------------------------------------------------------------------------


def _backward(call: Call) -> tuple[Plan, ...]:
    few = call.rows <= _FEW
    fixed, weights, acts = Plan(), [Plan()], [Plan()]
    if "grad_bias" in call.wanted:
        fixed = Plan(grad_bias=Launch(_kernel("grad_bias"), -(-call.size("N") // 256), 256))
    if "grad_weight" in call.wanted:
        weights = [_grad_weight(call, *kind) for kind in (("few", _FEW_TILE), ("many", _MANY_TILE))[0 if few else 1 :]]
    if "grad_temb" in call.wanted:
        acts = [_grad_temb(call, tile) for tile in ((4, 8) if few else (8, 4))]
    found = []
    for i in range(max(len(weights), len(acts))):
        weight, act = weights[i % len(weights)], acts[i % len(acts)]
        found.append(
            Plan(
                activation=weight.activation,
                grad_bias=fixed.grad_bias,
                grad_weight=weight.grad_weight,
                grad_act=act.grad_act,
                grad_temb=act.grad_temb,
            )
        )
    return tuple(found)


def _grad_weight(call: Call, kind: str, tile: int) -> Plan:
    """Threads of a block: as many as share the vectors of a row evenly, at most 384."""
    vectors = -(-call.size("D") // 8)
    threads = _padded(-(-vectors // -(-vectors // 384)), 32)
    tiles = -(-vectors // threads) * -(-call.size("N") // tile)
    kernel = _kernel(f"grad_weight_{kind}", ELEMENT=ELEMENTS[call.grad_dtype], VEC=8 if call.size("D") % 8 == 0 else 1)
    rounded = call.layout("weight").dtype
    act = _activation(_padded(call.rows, _FEW), _padded(call.size("D"), 8), rounded, wide=True)
    return Plan(activation=act, grad_weight=Launch(kernel, min(tiles, _GRID), threads))


def _grad_temb(call: Call, tile: int) -> Plan:
    """For the rows of one slab; the last one may have fewer."""
    rows, outputs, size = min(call.rows, SLAB), call.size("N"), call.size("D")
    tiles = -(-outputs // _PARTIAL) * -(-size // _COLUMNS) * -(-rows // tile)
    kernel = _kernel("grad_act", ELEMENT=ELEMENTS[call.layout("weight").dtype], ROWS=tile, VEC=_vec(call))
    shared = 4 * tile * (_PARTIAL + CHAINS * _COLUMNS)
    act = Launch(kernel, min(tiles, _GRID), 32 * CHAINS, shared)
    return Plan(grad_act=act, grad_temb=Launch(_kernel("grad_temb"), -(-rows * size // 128), 128))


# --- running ----------------------------------------------------------------------------------------------------------


def run(
    call: Call, plan: Plan, inputs: dict[str, Tensor], results: dict[str, Tensor], scalars: dict[str, float]
) -> None:
    temb, weight = inputs["temb"], inputs["weight"]
    outputs, size = weight.shape
    rows = temb.shape[0]
    if plan.table is not None:
        act = _activated(plan, temb, weight)
        given = (act, act.stride(0), weight, weight.stride(0), inputs["bias"])
        launch(plan.table, results["table"], *given, rows, outputs, size)
    if not call.backward:
        return
    grad = inputs["grad_table"]
    upstream = (grad, grad.stride(0), ELEMENTS[call.layout("grad_table").dtype])
    if plan.grad_bias is not None:
        launch(plan.grad_bias, results["grad_bias"], *upstream, rows, outputs)
    if plan.grad_weight is not None:
        act = _activated(plan, temb, temb)
        launch(plan.grad_weight, results["grad_weight"], *upstream, act, act.stride(0), rows, outputs, size)
    if plan.grad_act is not None and plan.grad_temb is not None:
        parts, pitch = -(-outputs // _PARTIAL), _padded(size, 8)
        partial = temb.new_empty(parts * min(rows, SLAB) * pitch)
        for first in range(0, rows, SLAB):
            own, g, x = min(SLAB, rows - first), grad[first:], temb[first:]
            here = (g, *upstream[1:], weight, weight.stride(0))
            launch(plan.grad_act, partial, *here, own, outputs, size, pitch)
            result = results["grad_temb"][first:]
            launch(plan.grad_temb, result, partial, parts, pitch, x, temb.stride(0), own, size)


def _activated(plan: Plan, temb: Tensor, like: Tensor) -> Tensor:
    """The padded activation, stored in the dtype of ``like``."""
    assert plan.activation is not None
    rows, pitch, dtype, wide = plan.activation.arguments
    act = like.new_empty(rows, pitch)
    launch(plan.activation, act, temb, temb.stride(0), *temb.shape, rows, pitch, dtype, wide)
    return act


def builds() -> tuple[Build, ...]:
    """Every kernel that a call can reach, for the audit."""
    return cuda_builds(SPEC, plans)
