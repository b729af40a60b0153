"""What the ranks do. Inputs come from the integer generator, so every rank can draw any token's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from samebits import parallel, registry
from samebits.exact.bits import digest
from samebits.verify.operators import OperatorSubject

ROWS = 24
SIZES = {
    "rmsnorm_residual": {"D": 40},
    "mhc_pre": {"D": 12},
    "fp32_gemm_rms": {"N": 4, "K": 48},
    "hyper_head": {"D": 12},
}


def device() -> torch.device:
    return torch.device("cuda", dist.get_rank()) if dist.get_backend() == "nccl" else torch.device("cpu")


def subject(op: str, rows: int, contract: str | None, backend: str | None, where: torch.device) -> OperatorSubject:
    return OperatorSubject(op, contract, backend, where, None, rows, 7, SIZES[op])


def inputs(made: OperatorSubject, first: int, last: int) -> list[Any]:
    batch = made.batch(range(first, last))
    known = made.backward_inputs(batch, made.forward(batch))
    beside = {arg.name for arg in made.spec.beside()}
    return [None if arg.name in beside else t for arg, t in zip(made.spec.backward.inputs, known, strict=True)]


def expected(
    op: str, rows: int = ROWS, contract: str | None = None, backend: str | None = "reference", where: str = "cpu"
) -> dict[str, Any]:
    """One process with the whole batch: digests of every row gradient row by row, and of every parameter gradient."""
    made = subject(op, rows, contract, backend, torch.device(where))
    results = registry.operator(op).backward(*inputs(made, 0, rows), contract=contract, backend=backend, **made.scalars)
    found: dict[str, Any] = {}
    for declared, value in zip(made.spec.backward.results, results, strict=True):
        assert value is not None
        found[declared.name] = [digest(row) for row in value] if declared.rows else digest(value)
    return found


def sharded(
    op: str, order: parallel.TokenOrder, contract: str | None = None, backend: str | None = "reference"
) -> dict[str, Any]:
    """This rank's part: row digests by token, parameter digests."""
    made = subject(op, order.rows, contract, backend, device())
    mine = order.of(dist.get_rank())
    rows, parameters = parallel.token_sharded_backward(
        op, [inputs(made, c.first, c.last) for c in mine], order, contract=contract, backend=backend, **made.scalars
    )
    found: dict[str, Any] = {name: digest(value) for name, value in parameters.items()}
    for chunk, grads in zip(mine, rows, strict=True):
        for name, value in grads.items():
            found.setdefault(name, {}).update({chunk.first + i: digest(row) for i, row in enumerate(value)})
    return found


def orders(world: int) -> dict[str, parallel.TokenOrder]:
    uneven = [ROWS - 3 * (world - 1), *[3] * (world - 1)]
    found = {
        "contiguous": parallel.TokenOrder.contiguous([ROWS // world] * world),
        "uneven": parallel.TokenOrder.contiguous(uneven),
        "an empty shard": parallel.TokenOrder.contiguous([ROWS - 2 * (world - 2), 0, *[2] * (world - 2)]),
        "zigzag": parallel.TokenOrder.zigzag(world, ROWS // (2 * world)),
    }
    return found


def everything(ops: tuple[str, ...], contract: str | None = None, backend: str | None = "reference") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for op in ops:
        for name, order in orders(dist.get_world_size()).items():
            found[f"{op}/{name}"] = sharded(op, order, contract, backend)
    found["hidden"] = hidden()
    found["replicas"] = replicas()
    found["refused"] = refused()
    return found


def hidden() -> dict[str, str]:
    """A forward and backward on hidden shards: whole columns are gathered, the gradient comes back as this rank's columns."""
    world, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 48, generator=generator).bfloat16()
    gamma = 1 + torch.randn(48, generator=generator)
    upstream = torch.randn(5, 48, generator=generator).bfloat16()
    width = 48 // world
    from samebits import rmsnorm_residual

    local = x[:, rank * width : (rank + 1) * width].to(device()).requires_grad_()
    gathered = parallel.gather_hidden(local)
    y, _ = rmsnorm_residual(gathered, gamma.to(device()))
    y.backward(upstream.to(device()))
    whole = x.to(device()).requires_grad_()
    alone, _ = rmsnorm_residual(whole, gamma.to(device()))
    alone.backward(upstream.to(device()))
    assert local.grad is not None and whole.grad is not None
    return {
        "y": digest(y), "expected y": digest(alone), "grad": digest(local.grad),
        "expected grad": digest(whole.grad[:, rank * width : (rank + 1) * width]),
    }  # fmt: skip


def replicas() -> str:
    same = torch.arange(4.0, device=device())
    parallel.require_same_on_all_ranks({"same": same})
    try:
        parallel.require_same_on_all_ranks({"same": same, "sign": same * (-1.0 if dist.get_rank() == 1 else 1.0)})
    except RuntimeError as error:
        return str(error)
    return "nothing was said"


def refused() -> list[str]:
    """Placements that name other ranks than the group has."""
    said = []
    for rows in ([4], [4] * (dist.get_world_size() + 1)):
        try:
            parallel.carry(parallel.TokenOrder.contiguous(rows), lambda chunk, acc: [], [])
        except ValueError as error:
            said.append(str(error))
    return said


def boundary(rows: range, chain: Callable[[list[torch.Tensor]], Any], where: torch.device) -> dict[str, str]:
    """A whole boundary on some of the tokens, its parameter gradients through a chain."""
    from samebits.nn import HyperConnection

    generator = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    layer = HyperConnection(16, norm=True)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(drawn(*parameter.shape) * 0.1)
    layer = layer.to(where)
    streams, upstream = (drawn(ROWS, 4, 16).bfloat16()[rows.start : rows.stop].to(where) for _ in range(2))
    streams.requires_grad_()
    with chain(list(layer.parameters())) as opened:
        given, link = layer.open(streams)
        link.close(given * 0.5).backward(upstream)
    opened.finish()
    assert streams.grad is not None
    found = {name: digest(p.grad) for name, p in layer.named_parameters() if p.grad is not None}
    return found | {"streams": [digest(row) for row in streams.grad]}  # type: ignore[dict-item]


def boundary_of_rank() -> dict[str, str]:
    world, rank = dist.get_world_size(), dist.get_rank()
    share = ROWS // world
    return boundary(range(rank * share, (rank + 1) * share), parallel.RankChain, device())


def fast() -> dict[str, Any]:
    order = parallel.TokenOrder.contiguous([256] + [8] + [0] * (dist.get_world_size() - 2))
    return sharded("fp32_gemm_rms", order, "fast")


def on_gpus(contract: str, backend: str) -> dict[str, Any]:
    return everything(("rmsnorm_residual", "mhc_pre"), contract, backend)


cpu_ops = partial(everything, ("rmsnorm_residual", "mhc_pre", "fp32_gemm_rms"))
