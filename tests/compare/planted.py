"""Peers of ``rmsnorm_residual`` with one fault each. A file for ``--peers``: it is also loaded in the process of a mode."""

from __future__ import annotations

import itertools
import os

import torch

import samebits
from samebits.bench.modes import Mode
from samebits.bench.peers import Peer


def clean(x, gamma, eps):
    return samebits.rmsnorm_residual(x, gamma, eps=eps, contract="ascending", backend="reference")


def widened(x, gamma, eps):
    return clean(x, gamma.float(), eps)


def nudged(y):
    """The next number, with the gradient of y."""
    return y + (torch.nextafter(y.detach(), torch.full_like(y, float("inf"))) - y.detach())


def in_batches_of(*sizes):
    """Other bits in batches of these sizes alone."""

    def run(x, gamma, eps):
        y, residual = clean(x, gamma, eps)
        return (nudged(y) if len(x) in sizes else y), residual

    return run


def other_bits(x, gamma, eps):
    y, residual = clean(x, gamma, eps)
    return nudged(y), residual


def other_dtype(x, gamma, eps):
    y, residual = clean(x, gamma, eps)
    return y.float(), residual


def extra_output(x, gamma, eps):
    return (*clean(x, gamma, eps), x.float().sum(-1))


def too_few(x, gamma, eps):
    return clean(x, gamma, eps)[:1]


def raises(x, gamma, eps):
    raise ArithmeticError("planted")


def lacks_a_library(x, gamma, eps):
    import no_such_library

    return no_such_library.run(x, gamma, eps)


def frozen_gamma(x, gamma, eps):
    return clean(x, gamma.detach(), eps)


class _Drifting(torch.autograd.Function):
    """Identity whose gradient is another one in every call."""

    calls = itertools.count()

    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * (1 + 2**-10 * next(_Drifting.calls))


def drifting_gamma(x, gamma, eps):
    return clean(x, _Drifting.apply(gamma), eps)


class _Batchwise(torch.autograd.Function):
    """Identity whose gradient depends on the number of rows."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * (1 + 2**-6 * (len(grad) > 16))


def batchwise_gradient(x, gamma, eps):
    return clean(_Batchwise.apply(x), gamma, eps)


def norm_alone(x, gamma, eps):
    return (clean(x, gamma, eps)[0],)


def obeys_its_mode(x, gamma, eps):
    """Other bits where the variable and the switch of the mode are both set."""
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ, "the variables of other modes must not reach this process"
    y, residual = clean(x, gamma, eps)
    moded = os.environ.get("SAMEBITS_PLANTED") == "1" and torch.are_deterministic_algorithms_enabled()
    return (nudged(y) if moded else y), residual


MODE = Mode("planted", (("SAMEBITS_PLANTED", "1"),), deterministic=True, cuda=False)
NOT_A_SWITCH = Mode("typo", flags=(("torch.backends.cuda.matmul.allow_tf23", True),), cuda=False)
NO_LIBRARY = Mode("absent", enable="no_such_library.modes:enable", cuda=False)
GPU_ONLY = Mode("gpu")

PEERS = (
    Peer("clean", clean),
    Peer("20 rows", in_batches_of(20)),
    Peer("24 rows", in_batches_of(24)),
    Peer("17 rows", in_batches_of(17)),
    Peer("other bits", other_bits),
    Peer("other dtype", other_dtype),
    Peer("extra output", extra_output),
    Peer("too few", too_few),
    Peer("raises", raises),
    Peer("lacks a library", lacks_a_library),
    Peer("needs a library", raises, needs=("no_such_library.part",)),
    Peer("needs a GPU", raises, cuda=True),
    Peer("frozen gamma", frozen_gamma),
    Peer("drifting gamma", drifting_gamma),
    Peer("batchwise gradient", batchwise_gradient),
    Peer("norm alone", norm_alone, outputs=("y",)),
    Peer("forward alone", clean, gradients=()),
    Peer("narrow gamma", widened, cast=(("gamma", "bfloat16"),)),
    Peer("compiled", clean, compiled=True),
    Peer("in a mode", obeys_its_mode, modes=(MODE, NO_LIBRARY, GPU_ONLY)),
)
