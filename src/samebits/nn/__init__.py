"""Hyper-connections as functions and modules: streams to sublayer and back, with the gradients of the contract.

The operators alone are in ``samebits``; here are the parts that span several of them.
"""

from samebits.nn.boundary import Link, boundary_close, boundary_open, hyper_head, rms_norm
from samebits.nn.chain import GradientChain, accumulate
from samebits.nn.families import FAMILIES, Contracts, contract_of
from samebits.nn.gain import expand_gain, fold_gain
from samebits.nn.modules import HyperConnection, HyperHead, RMSNorm

__all__ = [
    "FAMILIES",
    "Contracts",
    "GradientChain",
    "HyperConnection",
    "HyperHead",
    "Link",
    "RMSNorm",
    "accumulate",
    "boundary_close",
    "boundary_open",
    "contract_of",
    "expand_gain",
    "fold_gain",
    "hyper_head",
    "rms_norm",
]
