"""The same formulas on a GPU: kernels, graphs, and the compiler that would fuse what it sees."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from nn.formulas import Leaves, block, differing, leaves, same, sublayer, upstream
from torch import Tensor

import samebits
from samebits.nn import FAMILIES, boundary_open

pytestmark = pytest.mark.gpu
ROWS, WIDTH = 33, 128


def on_gpu(given: Leaves) -> Leaves:
    return Leaves(**{f.name: getattr(given, f.name).detach().cuda().requires_grad_() for f in fields(given)})


def run(given: Leaves, family: str) -> Tensor:
    x, link = boundary_open(given.residual, given.weight, given.scale, given.bias, given.gamma, contract=family)
    return link.close(sublayer(x))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_kernels_arrive_at_the_written_formulas(family):
    given, weight = on_gpu(leaves(ROWS, WIDTH)), upstream(ROWS, WIDTH).cuda()
    streams = run(given, family)
    streams.backward(weight)
    expected, grads = block(given, weight, family)
    assert same(streams.detach(), expected)
    assert differing(given.grads(), grads) == []


@pytest.mark.parametrize("family", ["ascending", "fast-dsv4"])
def test_micro_batches_have_the_bytes_of_one_batch(family):
    rows = 256 + ROWS
    given, weight = on_gpu(leaves(rows, WIDTH)), upstream(rows, WIDTH).cuda()
    run(given, family).backward(weight)
    whole = {name: grad for name, grad in given.grads().items() if grad is not None and name != "residual"}
    given = on_gpu(given)
    with samebits.accumulate([getattr(given, name) for name in whole]):
        for part in (slice(0, 256), slice(256, rows)):
            run(given.rows(part.start, part.stop), family).backward(weight[part])
    assert differing(given.grads(), whole) == []


@pytest.mark.parametrize("family", ["ascending", "fast-dsv4"])
def test_captured_in_a_graph(family):
    given, weight = on_gpu(leaves(ROWS, WIDTH)), upstream(ROWS, WIDTH).cuda()
    inputs = [getattr(given, f.name) for f in fields(given)]

    def step() -> tuple[Tensor, ...]:
        streams = run(given, family)
        return (streams.detach(), *torch.autograd.grad(streams, inputs, weight))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        assert all(same(one, other) for one, other in zip(captured, expected, strict=True))


def test_compiled_by_inductor():
    torch._dynamo.reset()
    compiled = torch.compile(lambda given: run(given, "fast-dsv4"), fullgraph=True, dynamic=True)
    for rows in (ROWS, 5, 1):
        weight = upstream(rows, WIDTH).cuda()
        eager, traced = on_gpu(leaves(rows, WIDTH)), on_gpu(leaves(rows, WIDTH))
        streams = run(eager, "fast-dsv4"), compiled(traced)
        for value in streams:
            value.backward(weight)
        assert same(streams[0].detach(), streams[1].detach())
        assert differing(traced.grads(), {n: g for n, g in eager.grads().items() if g is not None}) == []
