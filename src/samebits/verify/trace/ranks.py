"""Which process of a distributed run this is."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist


def rank_and_world() -> tuple[int, int]:
    """(0, 1) where no process group exists."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def own_path(path: Path) -> Path:
    """``run.trace`` of rank 1 of several is ``run.rank1.trace``; a process alone keeps the name."""
    rank, world = rank_and_world()
    return path if world == 1 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
