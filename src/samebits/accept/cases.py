"""The cases of acceptance: what is run, on which inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from samebits.accept import edges, integer, published
from samebits.accept.batch import Batch
from samebits.accept.block import run_block
from samebits.accept.contract import FusionMode, LayerContract, Trainability
from samebits.accept.provider import Provider
from samebits.accept.trace import Trace

Family = Literal["published", "integer", "edges"]


class Workload(Protocol):
    """A case on a device: it runs on a provider, and so does any choice of its rows."""

    @property
    def rows(self) -> int: ...

    def run(self, provider: Provider) -> Trace: ...

    def only(self, rows: Sequence[int]) -> Workload: ...

    def fingerprint(self) -> str:
        """Of every byte that a provider is given."""


@dataclass(frozen=True)
class BlockWorkload:
    batch: Batch

    @property
    def rows(self) -> int:
        return self.batch.rows

    def run(self, provider: Provider) -> Trace:
        return run_block(provider, self.batch)

    def only(self, rows: Sequence[int]) -> BlockWorkload:
        return BlockWorkload(self.batch.only(rows))

    def fingerprint(self) -> str:
        return self.batch.fingerprint()


@dataclass(frozen=True)
class Case:
    """One case. ``contract`` is that of its layer; where single operators are run, only its width counts."""

    name: str
    family: Family
    rows: int
    contract: LayerContract
    padding: tuple[int, ...] = ()
    """Rows of zeros. They may change no other row and no parameter gradient, and nothing may become NaN."""
    operators: Callable[[], edges.Workload] | None = None
    """Of a case that runs single operators."""

    def workload(self, device: torch.device) -> Workload:
        if self.operators is not None:
            return self.operators().to(device)
        if self.family == "published":
            batch = published.batch(self.name, self.rows, self.contract)
        else:
            batch = integer.batch(self.rows - len(self.padding), self.contract, self.padding)
        return BlockWorkload(batch.to(device))


def _layer(
    hidden: int = published.HIDDEN, fusion: FusionMode = "unfused", train: Trainability = "full"
) -> LayerContract:
    return LayerContract(hidden=hidden, fusion_mode=fusion, trainability=train)


_PLAIN, _FUSED, _FROZEN = _layer(), _layer(fusion="fused-pre-norm"), _layer(train="mixer-frozen")

CASES = (
    Case("one_row", "published", 1, _PLAIN),
    Case("packed_t16", "published", 16, _PLAIN),
    Case("packed_t7_odd", "published", 7, _PLAIN),
    Case("fused_pre_norm", "published", 16, _FUSED),
    Case("mixer_frozen", "published", 16, _FROZEN),
    Case("sinkhorn_edges", "edges", 4, _PLAIN, operators=edges.sinkhorn),
    Case("rms_edges", "edges", 4, _PLAIN, operators=edges.rms),
    Case("fixed_k_gemm", "integer", 16, _PLAIN, operators=edges.fixed_k_gemm),
    Case("integer_one_row", "integer", 1, _PLAIN),
    Case("integer_t16", "integer", 16, _PLAIN),
    Case("integer_t7_odd", "integer", 7, _layer(hidden=137)),
    Case("integer_fused", "integer", 16, _FUSED),
    Case("integer_frozen", "integer", 16, _FROZEN),
    Case("integer_zero_rows", "integer", 9, _PLAIN, padding=(3, 8)),
    Case("integer_d4096", "integer", 3, _layer(hidden=4096)),
    Case("integer_d7168", "integer", 2, _layer(hidden=7168, fusion="fused-pre-norm")),
)
"""In the order in which they run."""

MANIFEST_CASES = tuple(case.name for case in CASES if case.family == "published")


def chosen(names: Sequence[str] | None) -> tuple[Case, ...]:
    """The cases of these names, all by default. Raises ValueError for a name that is none, or for no name at all."""
    if names is None:
        return CASES
    known = {case.name: case for case in CASES}
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        what = f"no case named {unknown[0]!r}" if unknown else "no case named"
        raise ValueError(f"{what}; choose from {', '.join(known)}")
    return tuple(known[name] for name in dict.fromkeys(names))
