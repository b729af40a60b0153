"""Modules with the parameter names of the DeepSeek-V4 classes, so that their state dicts load without renaming."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from samebits.nn.boundary import Link, boundary_open, hyper_head, rms_norm
from samebits.nn.families import Contracts, contract_of

STREAMS = 4
OUTPUTS = 24


class RMSNorm(nn.Module):
    """RMSNorm with an FP32 gain that is never rounded: ``samebits.rmsnorm_residual`` without its copy.

    Args:
        hidden_size: D.
        eps: added to the mean square.
        contract: a family or a mapping, as of :func:`samebits.nn.boundary_open`; the operator is ``rmsnorm_residual``.
        backend: as of the operators.

    Parameters: ``weight`` (D,) FP32, ones.
    """

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, *, contract: Contracts = None, backend: str | None = None
    ) -> None:
        super().__init__()
        contract_of("rmsnorm_residual", contract)
        self.eps, self.contract, self.backend = eps, contract, backend
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D) BF16 to (..., D) BF16."""
        return rms_norm(x, self.weight, eps=self.eps, contract=self.contract, backend=self.backend)

    def samebits_parameters(self) -> Iterator[Tensor]:
        yield self.weight


class HyperConnection(nn.Module):
    """The boundary around one sublayer: controller, collapse, the sublayer's norm, and the post mix.

        x, link = connection.open(streams)
        streams = link.close(sublayer(x))

    or ``streams = connection(streams, sublayer)``. The gradient of the streams is rounded to BF16 once.

    Args:
        hidden_size: D.
        eps: of the controller's RMS.
        norm: whether the RMSNorm in front of the sublayer belongs to the boundary. Its parameter is ``norm.weight``.
        norm_eps: of that norm.
        contract: a family or a mapping, as of :func:`samebits.nn.boundary_open`.
        backend: as of the operators.

    Parameters: ``fn`` (24, 4 D) normal with deviation 0.02, ``base`` (24,) zeros, ``scale`` (3,) ones; all FP32.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        norm: bool = True,
        norm_eps: float = 1e-6,
        contract: Contracts = None,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        contract_of("mhc_post", contract)
        self.eps, self.contract, self.backend = eps, contract, backend
        self.fn = nn.Parameter(0.02 * torch.randn(OUTPUTS, STREAMS * hidden_size))
        self.base = nn.Parameter(torch.zeros(OUTPUTS))
        self.scale = nn.Parameter(torch.ones(3))
        self.norm = RMSNorm(hidden_size, norm_eps, contract=contract, backend=backend) if norm else None

    def open(self, streams: Tensor) -> tuple[Tensor, Link]:
        """streams (..., 4, D) BF16 to the sublayer's input (..., D) BF16 and the link that closes the boundary."""
        return boundary_open(
            streams,
            self.fn,
            self.scale,
            self.base,
            None if self.norm is None else self.norm.weight,
            eps=self.eps,
            norm_eps=1e-6 if self.norm is None else self.norm.eps,
            contract=self.contract,
            backend=self.backend,
        )

    def forward(self, streams: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """streams (..., 4, D) BF16 through the boundary and the sublayer, (..., D) to (..., D) BF16."""
        x, link = self.open(streams)
        return link.close(sublayer(x))

    def samebits_parameters(self) -> Iterator[Tensor]:
        yield from (self.fn, self.base, self.scale)


class HyperHead(nn.Module):
    """The collapse of the streams behind the last layer.

    Args:
        hidden_size: D.
        eps: of the controller's RMS.
        contract, backend: as of :class:`HyperConnection`.

    Parameters: ``hc_fn`` (4, 4 D) normal with deviation 0.02, ``hc_base`` (4,) zeros, ``hc_scale`` (1,) ones; all FP32.
    """

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, *, contract: Contracts = None, backend: str | None = None
    ) -> None:
        super().__init__()
        contract_of("hyper_head", contract)
        self.eps, self.contract, self.backend = eps, contract, backend
        self.hc_fn = nn.Parameter(0.02 * torch.randn(STREAMS, STREAMS * hidden_size))
        self.hc_base = nn.Parameter(torch.zeros(STREAMS))
        self.hc_scale = nn.Parameter(torch.ones(1))

    def forward(self, streams: Tensor) -> Tensor:
        """streams (..., 4, D) BF16 to (..., D) BF16."""
        parameters = (self.hc_fn, self.hc_scale, self.hc_base)
        return hyper_head(streams, *parameters, eps=self.eps, contract=self.contract, backend=self.backend)

    def samebits_parameters(self) -> Iterator[Tensor]:
        yield from (self.hc_fn, self.hc_base, self.hc_scale)
