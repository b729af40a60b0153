"""What goes into one block: the layer's weights, the tokens, and the gradients that come back from above."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samebits.accept.contract import LayerContract
from samebits.checks import dtype_name
from samebits.exact.bits import digest


@dataclass(frozen=True)
class Weights:
    """The parameters of a layer, all FP32: controller (24, 4 D), three gains (1,), bias (24,), norm gain (D,)."""

    controller: Tensor
    alpha_pre: Tensor
    alpha_post: Tensor
    alpha_res: Tensor
    bias: Tensor
    gamma: Tensor

    def gain(self) -> Tensor:
        """The gain of each of the 24 controller outputs: alpha_pre 4 times, alpha_post 4 times, alpha_res 16 times."""
        return torch.cat((self.alpha_pre.expand(4), self.alpha_post.expand(4), self.alpha_res.expand(16)))

    def fingerprint(self, contract: LayerContract) -> str:
        """SHA-256 over the contract's fingerprint, the controller's bytes and the bytes of gamma."""
        parts = (contract.fingerprint(), *(digest(tensor) for tensor in _tensors(self).values()))
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@dataclass(frozen=True)
class Batch:
    """One packed batch of T tokens, sealed: the fingerprint of its weights is taken once and can be checked later.

    r_old (T, 4, D), y (T, D) and the gradients d_r_new (T, 4, D), d_normalized (T, D), d_residual (T, D) are BF16.
    """

    contract: LayerContract
    weights: Weights
    token_id: Tensor
    r_old: Tensor
    y: Tensor
    d_r_new: Tensor
    d_normalized: Tensor
    d_residual: Tensor
    seal: str = ""

    @property
    def rows(self) -> int:
        return self.r_old.shape[0]

    @property
    def device(self) -> torch.device:
        return self.r_old.device

    def sealed(self) -> Batch:
        """The same batch with the fingerprint of its weights. Raises ValueError where a shape or dtype is not the contract's."""
        self.contract.validate()
        rows, hidden, outputs = self.rows, self.contract.hidden, self.contract.controller_n
        streams, flat = (rows, self.contract.hc_mult, hidden), (rows, hidden)
        _need("token_id", self.token_id, (rows,), torch.int64)
        for name in ("r_old", "d_r_new"):
            _need(name, getattr(self, name), streams, torch.bfloat16)
        for name in ("y", "d_normalized", "d_residual"):
            _need(name, getattr(self, name), flat, torch.bfloat16)
        _need("controller", self.weights.controller, (outputs, self.contract.controller_k), torch.float32)
        for name in ("alpha_pre", "alpha_post", "alpha_res"):
            _need(name, getattr(self.weights, name), (1,), torch.float32)
        _need("bias", self.weights.bias, (outputs,), torch.float32)
        _need("gamma", self.weights.gamma, (hidden,), torch.float32)
        return dataclasses.replace(self, seal=self.weights.fingerprint(self.contract))

    def check_seal(self) -> None:
        """Raises ValueError where the weights are no longer those that were sealed, or never were."""
        if self.seal != self.weights.fingerprint(self.contract):
            raise ValueError("the weights are not those the batch was sealed with")

    def fingerprint(self) -> str:
        """SHA-256 over everything a provider is given, weights included."""
        parts = [self.weights.fingerprint(self.contract), *(digest(tensor) for tensor in _tensors(self).values())]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def only(self, rows: Sequence[int]) -> Batch:
        """These tokens as a batch of their own, in memory of their own."""
        index = torch.tensor(list(rows), dtype=torch.int64, device=self.device)
        chosen: dict[str, Any] = {name: tensor[index] for name, tensor in _tensors(self).items()}
        return dataclasses.replace(self, **chosen)

    def to(self, device: torch.device) -> Batch:
        weights = Weights(**{name: tensor.to(device) for name, tensor in _tensors(self.weights).items()})
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in _tensors(self).items()}
        return dataclasses.replace(self, weights=weights, **moved)


def _tensors(holder: Batch | Weights) -> dict[str, Tensor]:
    fields = ((f.name, getattr(holder, f.name)) for f in dataclasses.fields(holder))
    return {name: value for name, value in fields if isinstance(value, Tensor)}


def _need(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        found = f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}"
        raise ValueError(f"{name} is {found}; the contract needs {dtype_name(dtype)} {shape}")
