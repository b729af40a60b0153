"""A look at whether ranks that should hold the same bytes do."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor

from samebits.exact.bits import digest


def require_same_on_all_ranks(tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Raise unless every named tensor has the same bytes, dtype and shape on all ranks of the group.

    For replicated controllers under tensor parallelism: every rank computes the whole gradient, which must be equal and
    must not be summed. A synchronising check, meant for the first steps of a run and for tests.

    Raises:
        RuntimeError: names the tensors that differ, and the ranks that have another value than rank 0.
    """
    here = {name: f"{t.dtype} {tuple(t.shape)} {digest(t)}" for name, t in tensors.items()}
    found: list[dict[str, str]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(found, here, group=group)
    if any(other.keys() != found[0].keys() for other in found):
        raise RuntimeError(f"ranks hold different tensors: {[sorted(other) for other in found]}")
    differ = {name: [r for r, other in enumerate(found) if other[name] != value] for name, value in found[0].items()}
    told = [f"{name} on ranks {ranks}" for name, ranks in differ.items() if ranks]
    if told:
        raise RuntimeError(f"replicas differ from rank 0: {'; '.join(told)}")
