"""What the GPU program needs of pytest: ``--proven FILE`` leaves out test functions, ``--record FILE`` tells each result at once.

A line of the record is the outcome of one test, or ``{"expected": {function: cases}, "where": ...}`` from a worker that collected.
So a run that is stopped half-way has still proven the functions all of whose cases passed. Workers take turns with the GPUs.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from samebits import environment


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--proven", type=Path, help="JSON list of test functions to leave out")
    parser.addoption("--record", type=Path, help="append results to this file, line by line")


def function_of(nodeid: str) -> str:
    """``tests/ops/test_x.py::TestX::test_y[a-b]`` without its parameters."""
    return nodeid.partition("[")[0]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    place = config.getoption("--proven")
    if place is not None:
        proven = set(json.loads(place.read_text()))
        left_out = [item for item in items if function_of(item.nodeid) in proven]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if function_of(item.nodeid) not in proven]
    first = getattr(config, "workerinput", {"workerid": "gw0"})["workerid"] == "gw0"
    if first and config.getoption("--record") is not None:
        here = environment.collect()
        where = {"commit": here.commit, "gpu": here.gpu, "torch": here.torch}
        _append(config, {"expected": dict(Counter(function_of(item.nodeid) for item in items)), "where": where})


class Recorder:
    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            why = "" if report.passed else str(report.longrepr)[-2000:]
            line = {"test": report.nodeid, "outcome": report.outcome, "when": report.when, "seconds": report.duration}
            _append(self.config, line | {"why": why})


def pytest_configure(config: pytest.Config) -> None:
    """Workers of xdist hand their reports to the process that started them; only that one writes results."""
    if hasattr(config, "workerinput"):
        order = devices_of(config.workerinput["workerid"], os.environ.get("CUDA_VISIBLE_DEVICES"))
        if order is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = order
    if config.getoption("--record", None) is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(config))


def devices_of(worker: str, visible: str | None, count: int | None = None) -> str | None:
    """The visible GPUs in the order of ``gw3``: all of them, another one first. None where there is no choice."""
    if visible is None:
        if count is None:
            import torch

            count = torch.cuda.device_count()  # asks NVML, so that CUDA has not read the variable yet
        visible = ",".join(map(str, range(count)))
    every = visible.split(",")
    first = int(worker.removeprefix("gw")) % len(every)
    return ",".join(every[first:] + every[:first]) if len(every) > 1 else None


def _append(config: pytest.Config, line: dict[str, Any]) -> None:
    place = config.getoption("--record")
    if place is not None:
        with place.open("a") as stream:
            stream.write(json.dumps(line) + "\n")
