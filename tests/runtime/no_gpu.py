"""The launch path on a machine without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from samebits.runtime import launch as launching

STREAM = 77


def drive(monkeypatch: pytest.MonkeyPatch, driver: Any) -> None:
    """``driver`` hears what is launched, on GPU 0, which is current and bound, and on the stream with the handle ``STREAM``."""
    monkeypatch.setattr(launching, "current_device", lambda: 0)
    monkeypatch.setattr(launching, "_bind", lambda device: None)
    monkeypatch.setattr(launching, "_driver", lambda: driver)
    monkeypatch.setattr(launching, "_stream", lambda handle: handle)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, raising=False)
