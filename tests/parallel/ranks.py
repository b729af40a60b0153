"""Runs a function on several ranks, each a process of its own, and hands back what each returned."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _enter(rank: int, world: int, store: str, backend: str, function: Callable[..., Any], queue: Any) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=120)
    )
    try:
        queue.put((rank, function(), None))
    except BaseException:
        queue.put((rank, None, traceback.format_exc()))
    finally:
        dist.destroy_process_group()


def on_ranks(world: int, function: Callable[..., Any], backend: str = "gloo") -> list[Any]:
    """What ``function()`` returned on each rank. It must be importable, and return something picklable without tensors."""
    # Importing torch takes seconds. A server that has done so, and nothing else yet, forks the ranks; with CUDA they start anew.
    context = mp.get_context("spawn" if backend == "nccl" else "forkserver")
    if backend != "nccl":
        context.set_forkserver_preload(["torch.distributed"])
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        members = [
            context.Process(target=_enter, args=(rank, world, store, backend, function, queue)) for rank in range(world)
        ]
        for member in members:
            member.start()
        found = {rank: (value, error) for rank, value, error in (queue.get(timeout=300) for _ in members)}
        for member in members:
            member.join(timeout=60)
    for rank in range(world):
        assert found[rank][1] is None, f"rank {rank}: {found[rank][1]}"
    return [found[rank][0] for rank in range(world)]
