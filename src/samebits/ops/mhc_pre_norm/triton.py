"""``mhc_pre_norm`` in Triton, ascending contracts, with the bits of ``reference.py``: ``mhc_pre`` and ``rmsnorm_residual``."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from samebits.dispatch import Call
from samebits.ops.mhc_pre import triton as mhc_pre
from samebits.ops.rmsnorm_residual import triton as rmsnorm_residual

if TYPE_CHECKING:
    from samebits.audit.build import Build

_NORM_NAMES = {"grad_normalized": "grad_y", "grad_hidden": "grad_residual", "hidden": "x"}
"""What rmsnorm_residual calls them."""
_NORM_INPUTS = ("grad_normalized", "grad_hidden", "hidden", "gamma", "rstd", "start_gamma")
NORM: Any = rmsnorm_residual


@dataclass(frozen=True)
class Plan:
    mix_call: Call
    mix: mhc_pre.Plan | None
    """None where only grad_gamma is wanted."""
    norm_call: Call
    norm: Any


def plans(call: Call) -> tuple[Plan, ...]:
    mix_call, norm_call = _mix_call(call), _norm_call(call)
    mixes: tuple[mhc_pre.Plan | None, ...] = mhc_pre.plans(mix_call) if mix_call.wanted else (None,)
    norms = NORM.plans(norm_call)
    most = max(len(mixes), len(norms))
    return tuple(Plan(mix_call, mixes[i % len(mixes)], norm_call, norms[i % len(norms)]) for i in range(most))


def run(
    call: Call, plan: Plan, inputs: dict[str, Tensor], results: dict[str, Tensor], scalars: dict[str, float]
) -> None:
    eps = {"eps": scalars["norm_eps"]}
    if not call.backward:
        assert plan.mix is not None
        mhc_pre.run(plan.mix_call, plan.mix, inputs, results, scalars)
        hidden = results["hidden"]
        normed = {"y": results["normalized"], "residual": torch.empty_like(hidden), "rstd": results["rstd"]}
        NORM.run(plan.norm_call, plan.norm, {"x": hidden, "gamma": inputs["gamma"]}, normed, eps)
        return
    given = {_NORM_NAMES.get(name, name): tensor for name, tensor in inputs.items() if name in _NORM_INPUTS}
    normed = {name: results[name] for name in ("grad_gamma",) if name in results}
    if plan.mix is not None:
        normed["grad_x"] = inputs["hidden"].new_empty(call.rows, call.size("D"), dtype=torch.float32)
    NORM.run(plan.norm_call, plan.norm, given, normed, eps)
    if plan.mix is not None:
        mhc_pre.run(plan.mix_call, plan.mix, inputs | {"grad_hidden": normed["grad_x"]}, results, scalars)


def _mix_call(call: Call) -> Call:
    layouts = tuple((name, layout) for name, layout in call.layouts if name not in _NORM_INPUTS)
    if call.backward:
        layouts = (("grad_hidden", mhc_pre.dense(call.size("D"))), *layouts)
    wanted = tuple(name for name in call.wanted if name not in ("normalized", "rstd", "grad_gamma"))
    return dataclasses.replace(call, op="mhc_pre", layouts=layouts, wanted=wanted)


def _norm_call(call: Call) -> Call:
    if call.backward:
        layouts = tuple((_NORM_NAMES.get(n, n), layout) for n, layout in call.layouts if n in _NORM_INPUTS)
        mixed = any(name != "grad_gamma" for name in call.wanted)
        wanted = (*(("grad_x",) if mixed else ()), *(name for name in call.wanted if name == "grad_gamma"))
    else:
        layouts = (("x", mhc_pre.dense(call.size("D"), dtype="bfloat16")), ("gamma", call.layout("gamma")))
        wanted = ("y", "residual", "rstd")
    return dataclasses.replace(
        call, op="rmsnorm_residual", contract="ascending", layouts=layouts, wanted=wanted, grad_dtype="float32"
    )


def builds() -> tuple[Build, ...]:
    """Every kernel that a call can reach, for the audit."""
    from samebits.audit.build import Build

    both = ("ascending", "ascending-dsv4")
    norms = (Build(made.kernel, both) for made in NORM.builds() if "ascending" in made.contracts)
    return (*mhc_pre.builds(), *norms)
