"""Time and memory beside ours: forward, backward alone with its graph prepared outside the timed call, and both together."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from samebits.bench import tensors, work
from samebits.bench.case import DIRECTIONS, Case
from samebits.bench.peers import Peer
from samebits.bench.timing import MOST_ROUNDS, WARM_ROUNDS, CudaMachine, Failure, Machine, Sample, in_turn
from samebits.bench.work import LeftOut, Run, Work
from samebits.operator import Operator


class HostMachine:
    """A machine without a GPU: the clock of the host around each call, the same turns. Memory is not measured."""

    device = torch.device("cpu")
    copy_gbps = float("nan")
    launch_floor_us = float("nan")

    def __init__(self, budget_s: float) -> None:
        self.budget_s = budget_s

    def free_bytes(self) -> int:
        raise NotImplementedError("the memory of a CPU is not accounted for")

    def release(self) -> None:
        pass

    def measure(self, works: Sequence[Work]) -> dict[str, Sample | Failure]:
        found: dict[str, Sample | Failure] = {}
        ready: list[tuple[str, Run]] = []
        for made in works:
            try:
                run = made.prepare()
                run()
                ready.append((made.name, run))
            except Exception as error:
                reason = str(error) if isinstance(error, LeftOut) else f"{type(error).__name__}: {error}"
                found[made.name] = Failure(reason)
        times: dict[str, list[float]] = {name: [] for name, _ in ready}
        started = time.monotonic()
        for count in range(MOST_ROUNDS):
            for name, run in in_turn(count, ready):
                begun = time.perf_counter()
                run()
                times[name].append((time.perf_counter() - begun) * 1e6)
            if count >= WARM_ROUNDS + 1 and time.monotonic() - started > self.budget_s:
                break
        for name, spent in times.items():
            kept = spent[WARM_ROUNDS:]
            us = statistics.median(kept)
            found[name] = Sample(us, min(kept), max(kept), len(kept), "host clock", us, 0)
        return {made.name: found[made.name] for made in works}


def machine_for(device: torch.device, budget_s: float) -> Machine:
    """The current device's; for a CPU its own clock."""
    return CudaMachine(budget_s) if device.type == "cuda" else HostMachine(budget_s)


def measure(
    op: Operator,
    contract: str,
    backend: str,
    sizes: Mapping[str, int],
    rows: Sequence[int],
    others: Sequence[Peer],
    machine: Machine,
) -> dict[str, list[dict[str, Any]]]:
    """Entries by name of the peer, one per number of rows and direction; ours stand under the empty name.

    All of a measurement run in the same rounds, so every entry has our time from the same rounds beside it.
    """
    found: dict[str, list[dict[str, Any]]] = {"": [], **{other.name: [] for other in others}}
    for count in rows:
        for direction in DIRECTIONS:
            axes = tuple((axis, sizes[axis]) for axis, _, _ in op.spec.size_limits)
            case = Case(op.name, direction, count, axes)
            able = [other for other in others if direction == "fwd" or other.leaves(op.spec)]
            try:
                entries = _case(op, case, contract, backend, able, machine)
            except Exception as error:  # the inputs alone may be too large; the other cases still count
                text = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
                entries = dict.fromkeys(("", *(other.name for other in able)), text)
            for name, entry in entries.items():
                found[name].append({"direction": direction, "rows": count, **entry})
            machine.release()
    return found


def _case(
    op: Operator, case: Case, contract: str, backend: str, others: Sequence[Peer], machine: Machine
) -> dict[str, dict[str, Any]]:
    given = work.Given(
        tensors.forward_inputs(op.spec, case, machine.device),
        tensors.upstream(op.spec, case, machine.device) if case.direction != "fwd" else {},
    )
    mine = work.candidate(op, case, given, contract, backend)
    works = [mine, *(work.peer(op, case, given, other) for other in others)]
    samples = machine.measure(works)
    order = [made.name for made in works if isinstance(samples[made.name], Sample)]
    names = ("", *(other.name for other in others))
    return {
        name: entry(samples[made.name], samples[mine.name], order, machine.device)
        for name, made in zip(names, works, strict=True)
    }


def entry(sample: Sample | Failure, mine: Sample | Failure, order: list[str], device: torch.device) -> dict[str, Any]:
    if isinstance(sample, Failure):
        return {"failed": sample.reason}
    measured = device.type == "cuda"
    found: dict[str, Any] = {
        "us": round(sample.us, 3),
        "us_min": round(sample.us_min, 3),
        "us_max": round(sample.us_max, 3),
        "host_us": round(sample.host_us, 2),
        "extra_bytes": sample.extra_bytes if measured else None,
        "rounds": sample.rounds,
        "method": sample.method,
        "order": [in_turn(0, order), in_turn(1, order)],
    }
    if isinstance(mine, Sample):
        found |= {
            "ours_us": round(mine.us, 3),
            "ratio": round(sample.us / mine.us, 4),
            "ours_extra_bytes": mine.extra_bytes if measured else None,
        }
    return found
