"""What a launch hands to the driver, read back as the driver reads it."""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runtime.no_gpu import STREAM, drive

from samebits.runtime import launch as launching
from samebits.runtime.launch import Launch, launch
from samebits.runtime.nvrtc import CudaKernel

PLAN = Launch(CudaKernel("any", "entry"), (3, 2), 128, shared=16)


class Driver:
    """Stands in for cuda.bindings.driver: keeps what each launch was told, the words of its row by value."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.words: list[list[int]] = []
        self.status = 0
        self.count = 0
        self.meanwhile: Any = None

    def cuLaunchKernel(self, *given: Any) -> tuple[int]:
        *settings, places, extra = given
        assert extra == 0
        if self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()
        addresses = (ctypes.c_void_p * self.count).from_address(places)
        self.launches.append(tuple(settings))
        self.words.append([ctypes.c_int64.from_address(address).value for address in addresses])
        return (self.status,)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    drive(monkeypatch, made)
    monkeypatch.setattr(launching, "_ready", {(id(PLAN), 0): launching._Ready(PLAN, "function", 3, 2, 128, 16)})
    return made


def by_value(word: int) -> Any:
    """An argument that is passed by the address of what it holds, as a tensor map is."""
    held = ctypes.c_int64(word)
    return SimpleNamespace(getPtr=lambda: ctypes.addressof(held), held=held)


def test_a_launch_is_told_its_grid_its_stream_and_every_argument(driver: Driver) -> None:
    tensor, parameter = torch.ones(4)[1:], torch.nn.Parameter(torch.ones(2))
    driver.count = 6
    launch(PLAN, tensor, 7, parameter, -1, True, ctypes.c_float(1.5))
    assert driver.launches == [("function", 3, 2, 1, 128, 1, 1, 16, STREAM)]
    *words, last = driver.words[0]
    assert words == [tensor.data_ptr(), 7, parameter.data_ptr(), -1, 1]
    assert last & 0xFFFFFFFF == 0x3FC00000


def test_a_row_that_held_an_address_holds_words_again(driver: Driver) -> None:
    driver.count = 2
    launch(PLAN, by_value(11), 12)
    launch(PLAN, 13, by_value(14))
    launch(PLAN, 15, 16)
    assert driver.words == [[11, 12], [13, 14], [15, 16]]


def test_a_launch_inside_a_launch_has_a_row_of_its_own(driver: Driver) -> None:
    """A signal handler or a finaliser may launch at any point."""
    driver.count = 2
    driver.meanwhile = lambda: launch(PLAN, 3, 4)
    launch(PLAN, 1, 2)
    assert driver.words == [[3, 4], [1, 2]]


def test_a_launch_that_the_driver_refuses_is_an_error_and_leaves_nothing_behind(driver: Driver) -> None:
    driver.count, driver.status = 2, 9
    with pytest.raises(RuntimeError, match=r"grid=\(3, 2\).* was refused: 9"):
        launch(PLAN, by_value(1), 2)
    driver.status = 0
    launch(PLAN, 5, 6)
    assert driver.words[-1] == [5, 6]


class Attributes:
    """The part of the driver that :func:`launching._allow` asks: a kernel with ``static`` bytes of shared memory."""

    CUfunction_attribute = SimpleNamespace(
        CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES="static", CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="most"
    )

    def __init__(self, static: int, status: int = 0) -> None:
        self.static, self.status = static, status
        self.told: list[int] = []

    def CUdevice(self, index: int) -> int:
        return index

    def cuKernelGetAttribute(self, what: str, kernel: Any, device: int) -> tuple[int, int]:
        assert what == "static"
        return (0, self.static)

    def cuKernelSetAttribute(self, what: str, value: int, kernel: Any, device: int) -> tuple[int]:
        assert what == "most"
        self.told.append(value)
        return (self.status,)


def allowed(monkeypatch: pytest.MonkeyPatch, driver: Attributes, *shared: int) -> list[int]:
    monkeypatch.setattr(launching, "_driver", lambda: driver)
    monkeypatch.setattr(launching, "_most_shared", {})
    monkeypatch.setattr(launching, "_allowed_under_capture", contextlib.nullcontext)
    for size in shared:
        launching._allow(Launch(PLAN.kernel, 1, 32, size), 0, "kernel")
    return driver.told


def test_static_shared_memory_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """48 KiB of dynamic memory beside any static one are more than a kernel has unasked."""
    assert allowed(monkeypatch, Attributes(static=0), 0, 1024, 48 * 1024) == []
    assert allowed(monkeypatch, Attributes(static=16), 48 * 1024) == [48 * 1024]


def test_a_plan_that_needs_less_takes_nothing_away(monkeypatch: pytest.MonkeyPatch) -> None:
    told = allowed(monkeypatch, Attributes(static=0), 64 * 1024, 60 * 1024, 1024, 64 * 1024, 100 * 1024)
    assert told == [64 * 1024, 100 * 1024]


def test_shared_memory_that_the_device_has_not_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="300000 bytes of shared memory were refused: 1"):
        allowed(monkeypatch, Attributes(static=0, status=1), 300_000)
