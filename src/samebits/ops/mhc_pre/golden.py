"""What ``mhc_pre`` should give: FP64, rounded only where the contract rounds. Judges accuracy, never bits.

The gradients are those of the FP64 formula, by autograd: nothing that the backward was handed from a forward is read, so
a wrong one shows.
"""

from __future__ import annotations

import torch
from torch import Tensor

EPS = 1e-6
"""In pre, in the softmax and in every denominator of a Sinkhorn step."""


def reciprocal_rms(x: Tensor, eps: float, contract: str) -> tuple[Tensor, Tensor]:
    """(r, q) of x (T, K). p1: q = rms(x), r = 1 / (q + eps); dsv4: q = mean(x^2), r = (q + eps)^-1/2.

    The root of zero has no slope; a row of zeros gets a constant there, and so no gradient through r.
    """
    mean = x.square().mean(-1)
    if contract.endswith("-dsv4"):
        return (mean + eps).rsqrt(), mean
    zero = mean == 0
    q = torch.where(zero, 0.0, torch.where(zero, 1.0, mean).sqrt())
    return 1 / (q + eps), q


def controller(
    residual: Tensor, weight: Tensor, gain: Tensor, bias: Tensor, eps: float, contract: str
) -> tuple[Tensor, ...]:
    """(logits, proj, r, q)."""
    x = residual.flatten(1)
    r, q = reciprocal_rms(x, eps, contract)
    proj = x @ weight.T
    return proj * r[:, None] * gain + bias, proj, r, q


def balanced(logits: Tensor) -> Tensor:
    """The 4x4 mixing matrix of each token."""
    matrix: Tensor = logits.view(-1, 4, 4).softmax(-1) + EPS
    matrix = matrix / (matrix.sum(-2, keepdim=True) + EPS)
    for _ in range(19):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + EPS)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + EPS)
    return matrix


def formula(inputs: dict[str, Tensor], eps: float, contract: str) -> dict[str, Tensor]:
    """Every result of the forward in the precision of the inputs; nothing is rounded."""
    residual = inputs["residual"]
    logits, proj, r, q = controller(residual, inputs["weight"], inputs["gain"], inputs["bias"], eps, contract)
    pre = logits[:, :4].sigmoid() + EPS
    return {
        "hidden": torch.einsum("ti,tid->td", pre, residual),
        "post": 2 * logits[:, 4:8].sigmoid(),
        "comb": balanced(logits[:, 8:]),
        "pre": pre,
        "logits": logits,
        "proj": proj,
        "r": r,
        "q": q,
    }


def doubled(inputs: dict[str, Tensor], names: tuple[str, ...], grad: bool = False) -> dict[str, Tensor]:
    return {name: inputs[name].detach().double().requires_grad_(grad) for name in names}


def pulled_back(
    results: dict[str, Tensor], leaves: dict[str, Tensor], inputs: dict[str, Tensor], upstream: tuple[str, ...]
) -> dict[str, Tensor]:
    """``grad_<leaf>`` of every leaf, of the named results' upstream gradients; an absent one is zeros. Folds continue."""
    given = [name for name in upstream if inputs.get(f"grad_{name}") is not None]
    grads = torch.autograd.grad(
        [results[name] for name in given], list(leaves.values()), [inputs[f"grad_{name}"].double() for name in given]
    )
    found = {f"grad_{name}": grad for name, grad in zip(leaves, grads, strict=True)}
    for name in leaves:
        start = inputs.get(f"start_{name}")
        if start is not None:
            found[f"grad_{name}"] = found[f"grad_{name}"] + start.double()
    return found


def further_leg(inputs: dict[str, Tensor], comb: Tensor) -> Tensor | float:
    """The gradient of the streams through ``mhc_post``, where its upstream is given."""
    grad = inputs.get("grad_streams")
    return 0.0 if grad is None else torch.einsum("tij,tjd->tid", comb.detach(), grad.double())


LEAVES = ("residual", "weight", "gain", "bias")


def forward(inputs: dict[str, Tensor], scalars: dict[str, float], contract: str) -> dict[str, Tensor]:
    results = formula(doubled(inputs, LEAVES), scalars["eps"], contract)
    return results | {"hidden": results["hidden"].bfloat16()}


def backward(inputs: dict[str, Tensor], scalars: dict[str, float], contract: str) -> dict[str, Tensor]:
    with torch.enable_grad():
        leaves = doubled(inputs, LEAVES, grad=True)
        results = formula(leaves, scalars["eps"], contract)
        found = pulled_back(results, leaves, inputs, ("hidden", "post", "comb"))
    return found | {"grad_residual": found["grad_residual"] + further_leg(inputs, results["comb"])}
