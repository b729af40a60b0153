"""The measuring loop with a stand-in for torch.cuda: its order, its fallbacks and what it keeps. No time is judged here."""

from __future__ import annotations

import contextlib

import pytest
import torch

from samebits.bench import empty, timing
from samebits.bench.timing import CudaMachine, Failure, Sample
from samebits.bench.work import LeftOut, Work, device_copy
from samebits.runtime import nvrtc


class Recorder:
    """Every call that touches the device, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.capturing = False
        self.uncapturable: set[str] = set()


@pytest.fixture
def device(monkeypatch):
    seen = Recorder()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            seen.log.append("event")

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, other: Event) -> float:
            return 0.005

    class Graph:
        name = ""

        def replay(self) -> None:
            seen.log.append(f"replay {self.name}")

    @contextlib.contextmanager
    def graph(captured, pool, stream):
        assert pool == "pool" and stream == "stream"
        seen.capturing, before = True, len(seen.log)
        try:
            yield
        finally:
            seen.capturing = False
        captured.name = seen.log[-1].split()[-1] if len(seen.log) > before else "?"

    for name, value in {
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": graph,
        "stream": lambda stream: contextlib.nullcontext(),
        "graph_pool_handle": lambda: "pool",
        "synchronize": lambda *args: None,
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda: None,
        "max_memory_allocated": lambda: 700,
        "memory_allocated": lambda: 500,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return seen


@pytest.fixture
def machine(device):
    made = object.__new__(CudaMachine)
    made.device, made.budget_s, made._stream = torch.device("cpu"), 0.0, "stream"

    class Flush:
        def fill_(self, value: int) -> None:
            device.log.append("flush")

    made._flush = Flush()
    return made


def _work(device, name: str, keep: bool = False) -> Work:
    def run():
        if device.capturing and name in device.uncapturable:
            raise RuntimeError("operation not permitted when stream is capturing")
        device.log.append(f"run {name}")
        return (torch.ones(2),)

    return Work(name, lambda: run, keep)


def test_interleaved_with_a_flush_before_each(device, machine):
    found = machine.measure([_work(device, "ours", keep=True), _work(device, "theirs")])
    order = device.log[device.log.index("flush") :]
    ours, theirs = (["flush", "event", f"replay {name}", "event"] for name in ("ours", "theirs"))
    rounds = timing.WARM_ROUNDS + timing.LEAST_ROUNDS
    turns = [ours + theirs if count % 2 == 0 else theirs + ours for count in range(rounds)]
    assert order == [word for turn in turns for word in turn]
    ours, theirs = found["ours"], found["theirs"]
    assert isinstance(ours, Sample) and isinstance(theirs, Sample)
    assert ours.rounds == timing.LEAST_ROUNDS and ours.us == pytest.approx(5.0)
    assert len(ours.outputs) == 1 and theirs.outputs == ()
    assert ours.extra_bytes == 200 and ours.method == "graph" and ours.host_us > 0


def test_more_rounds_while_there_is_time(device, machine):
    machine.budget_s = 60.0
    found = machine.measure([_work(device, "ours")])["ours"]
    assert isinstance(found, Sample) and found.rounds == timing.MOST_ROUNDS - timing.WARM_ROUNDS


def test_what_cannot_be_captured_is_timed_eagerly_and_says_so(device, machine):
    device.uncapturable.add("ours")
    found = machine.measure([_work(device, "ours", keep=True), _work(device, "theirs")])
    assert found["ours"].method == "events" and found["theirs"].method == "graph"
    assert len(found["ours"].outputs) == 1
    assert device.log[-8:-4] == ["flush", "event", "run ours", "event"]


def test_one_failure_does_not_stop_the_others(device, machine):
    def prepare_oom():
        raise torch.OutOfMemoryError("tried to allocate")

    def prepare_left_out():
        raise LeftOut("no time")

    def prepare_broken():
        raise KeyError("planted")

    works = [
        Work("big", prepare_oom),
        Work("late", prepare_left_out),
        Work("odd", prepare_broken),
        _work(device, "ours"),
    ]
    found = machine.measure(works)
    assert list(found) == ["big", "late", "odd", "ours"]
    assert [f.reason for f in found.values() if isinstance(f, Failure)] == [
        "out of memory",
        "no time",
        "KeyError: 'planted'",
    ]
    assert isinstance(found["ours"], Sample)


def test_a_floor_that_cannot_be_measured_is_an_error():
    with pytest.raises(RuntimeError, match="own floor could not be measured: no compiler"):
        timing._sample(Failure("no compiler"))


def test_copy_moves_the_bytes_it_claims():
    (target,) = device_copy("copy", torch.device("cpu"), 1000).prepare()()
    assert 2 * target.numel() * target.element_size() == 1000
    assert target.unique().numel() > 1  # random, not zeros


def test_empty_kernel_compiles():
    code = nvrtc.compile_kernel(empty.EMPTY, "sm_90a").cubin
    assert code.startswith(b"\x7fELF") and b"empty" in code
