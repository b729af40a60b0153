"""What would run a call of ``attention``, for ``samebits explain``: of given tensors, or of sizes on a machine that is not here."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from samebits import dispatch
from samebits.dispatch import DeviceInfo
from samebits.runtime import device as devices
from samebits.sequence_ops.attention import contracts
from samebits.sequence_ops.attention.checks import check, check_gradient
from samebits.sequence_ops.attention.choice import Decision, decide, plans
from samebits.sequence_ops.attention.op import GRADIENTS
from samebits.sequence_ops.attention.spec import SPEC
from samebits.sequence_ops.attention.targets import SHAPE


def explain(
    *tensors: Tensor,
    backward: bool = False,
    causal: bool = False,
    scale: float = 1.0,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    contract: str | None = None,
    backend: str | None = None,
) -> Decision:
    """Of q, k, v, or in a backward of grad_out, q, k, v, out, lse. Runs nothing; raises what the call would, but for values."""
    names = [arg.name for arg in SPEC.direction(backward).inputs if not arg.name.startswith("cu_")]
    if len(tensors) != len(names):
        raise TypeError(f"{contracts.NAME}: expected {len(names)} tensors ({', '.join(names)}), got {len(tensors)}")
    given = dict(zip(names, tensors, strict=True))
    q, k, v = (given[name] for name in "qkv")
    chosen = SPEC.contract(contract).name
    problem = check(contracts.NAME, q, k, v, cu_seqlens, cu_seqlens_k, scale, chosen)
    read = [q, k, v]
    if backward:
        check_gradient(contracts.NAME, q, given["out"], given["lse"], given["grad_out"])
        read.append(given["grad_out"].contiguous())
    wanted = GRADIENTS if backward else ("out", "lse")
    info = devices.info(q.device)
    return decide(problem, contracts.recipe(chosen), backward, causal, backend, info, read, wanted)


def of_sizes(
    rows: int,
    sizes: Mapping[str, int],
    backward: bool,
    causal: bool,
    contract: str,
    backend: str | None,
    info: DeviceInfo,
) -> tuple[Decision, dict[str, tuple[object, ...]]]:
    """Of dense BF16 tensors with ``rows`` queries; with the plans of every backend that takes the call. ValueError: a size."""
    known = {"B": 1, "S_k": rows, **dict(SHAPE)}
    for axis in sizes:
        if axis not in (*known, "H_kv"):
            raise ValueError(
                f"{SPEC.name} has no axis {axis!r}; its axes are {', '.join((*known, 'H_kv'))}; rows are S_q"
            )
    known |= sizes
    known.setdefault("H_kv", known["H"])
    q = torch.empty(known["B"], rows, known["H"], known["D"], dtype=torch.bfloat16, device="meta")
    k = torch.empty(known["B"], known["S_k"], known["H_kv"], known["D"], dtype=torch.bfloat16, device="meta")
    problem, recipe = check(SPEC.name, q, k, k, None, None, 1.0, contract), contracts.recipe(contract)
    wanted = GRADIENTS if backward else ("out", "lse")
    found: dict[str, tuple[object, ...]] = {}
    for declared in SPEC.backends:
        try:
            decide(problem, recipe, backward, causal, declared.name, info, (q, k, k), wanted)
        except dispatch.UnsupportedError:
            continue
        found[declared.name] = plans(declared, problem, recipe, backward, causal, info.arch)
    return decide(problem, recipe, backward, causal, backend, info, (q, k, k), wanted), found
