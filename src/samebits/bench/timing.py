"""How a time is taken on the GPU.

Each piece of work is captured once as a CUDA graph. One round replays every graph once, in turn, every other round in
reverse, so that candidate and peers see the same clocks, temperature and neighbours; before each replay a buffer larger
than L2 is written, outside the timed region. That leaves L2 cold and full of dirty lines, whose write-back pays for the
dirty lines that the replay itself leaves behind: the time is that of memory, not of a cache. A time is the median over
rounds.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from samebits.bench import empty
from samebits.bench.work import LeftOut, Run, Work, device_copy

LEAST_ROUNDS = 15
MOST_ROUNDS = 43
WARM_ROUNDS = 2
HOST_CALLS = 20
HOST_SECONDS = 0.1
COPY_BYTES = 4 << 30
FLUSH_BYTES = 512 << 20
"""Also long enough to write that the host has queued the replay before the device gets to it."""
FLOOR = "empty kernel"


T = TypeVar("T")


def in_turn(count: int, items: Sequence[T]) -> list[T]:
    """The order of one round: as given, or in reverse in every other round."""
    return list(items) if count % 2 == 0 else list(reversed(items))


@dataclass(frozen=True)
class Sample:
    """Times of one piece of work in microseconds."""

    us: float
    us_min: float
    us_max: float
    rounds: int
    method: str
    """``graph``, or ``events`` where the work could not be captured and its eager launches are part of the time."""
    host_us: float
    """Host time of one eager call."""
    extra_bytes: int
    """Peak memory of one call above its inputs and its results."""
    outputs: tuple[Tensor, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Failure:
    """Why a piece of work has no time."""

    reason: str


class Machine(Protocol):
    """What the sweep asks of the machine. Tests put a machine without a GPU in its place."""

    device: torch.device
    copy_gbps: float
    launch_floor_us: float

    def measure(self, works: Sequence[Work]) -> dict[str, Sample | Failure]: ...

    def free_bytes(self) -> int: ...

    def release(self) -> None: ...


class CudaMachine:
    """The current CUDA device. Copy bandwidth and launch floor are measured on construction, by the same method."""

    def __init__(self, budget_s: float = 1.0) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.budget_s = budget_s
        self._stream = torch.cuda.Stream()
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size
        self._flush = torch.empty(max(4 * cache, FLUSH_BYTES) // 4, dtype=torch.int32, device=self.device)
        first = self.measure([device_copy("copy", self.device, COPY_BYTES), Work(FLOOR, empty.prepare)])
        copy, floor = _sample(first["copy"]), _sample(first[FLOOR])
        self.copy_gbps = COPY_BYTES / copy.us * 1e-3
        self.launch_floor_us = floor.us
        self.release()

    def free_bytes(self) -> int:
        self.release()
        return int(torch.cuda.mem_get_info(self.device)[0])

    def release(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()

    def measure(self, works: Sequence[Work]) -> dict[str, Sample | Failure]:
        """Times of all of them, interleaved. One that fails does not stop the others."""
        found: dict[str, Sample | Failure] = {}
        ready: list[_Replay] = []
        torch.cuda.synchronize()  # the inputs were drawn on another stream
        pool = torch.cuda.graph_pool_handle()
        for work in works:
            try:
                ready.append(_capture(work, self._stream, pool))
            except Exception as error:
                found[work.name] = Failure(_reason(error))
                torch.cuda.synchronize()
                self.release()
        times = self._rounds(ready)
        for replay in ready:
            sorted_times = times[replay.name]
            found[replay.name] = Sample(
                us=statistics.median(sorted_times),
                us_min=min(sorted_times),
                us_max=max(sorted_times),
                rounds=len(sorted_times),
                method="graph" if replay.graph is not None else "events",
                host_us=replay.host_us,
                extra_bytes=replay.extra_bytes,
                outputs=replay.outputs,
            )
        return {work.name: found[work.name] for work in works}

    def _rounds(self, ready: Sequence[_Replay]) -> dict[str, list[float]]:
        times: dict[str, list[float]] = {replay.name: [] for replay in ready}
        started = time.monotonic()
        with torch.cuda.stream(self._stream):
            for count in range(MOST_ROUNDS):
                for replay in in_turn(count, ready):
                    us = self._once(replay)
                    if count >= WARM_ROUNDS:
                        times[replay.name].append(us)
                if count >= WARM_ROUNDS + LEAST_ROUNDS - 1 and time.monotonic() - started > self.budget_s:
                    break
        return times

    def _once(self, replay: _Replay) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.fill_(1)
        begin.record()
        replay.run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end) * 1e3)


@dataclass
class _Replay:
    name: str
    graph: Any
    eager: Run
    host_us: float
    extra_bytes: int
    outputs: tuple[Tensor, ...]

    def run(self) -> None:
        if self.graph is not None:
            self.graph.replay()
        else:
            self.eager()


def _capture(work: Work, stream: torch.cuda.Stream, pool: Any) -> _Replay:
    """Warm up, then capture. Graphs of one measurement share a pool: what nobody holds is used again by the next one."""
    with torch.cuda.stream(stream):
        run = work.prepare()
        for _ in range(2):
            run()
        torch.cuda.synchronize()
        host_us = _host_time(run)
        extra = _extra_bytes(run)
        captured = torch.cuda.CUDAGraph()
        graph: torch.cuda.CUDAGraph | None = captured
        outputs: tuple[Tensor, ...] = ()
        try:
            with torch.cuda.graph(captured, pool=pool, stream=stream):
                outputs = tuple(run())
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            torch.cuda.synchronize()
            graph, outputs = None, tuple(run()) if work.keep else ()
    return _Replay(work.name, graph, run, host_us, extra, outputs if work.keep else ())


def _host_time(run: Run) -> float:
    """The median of single eager calls into an idle queue, so that a full queue cannot be mistaken for host work."""
    spent = []
    begun = time.perf_counter()
    for _ in range(HOST_CALLS):
        started = time.perf_counter()
        run()
        spent.append((time.perf_counter() - started) * 1e6)
        torch.cuda.synchronize()
        if time.perf_counter() - begun > HOST_SECONDS:
            break
    return statistics.median(spent)


def _extra_bytes(run: Run) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = run()
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    del held
    return int(extra)


def _sample(found: Sample | Failure) -> Sample:
    if isinstance(found, Failure):
        raise RuntimeError(f"the machine's own floor could not be measured: {found.reason}")
    return found


def _reason(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    if isinstance(error, LeftOut):
        return str(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
