"""Fixtures of the audit's tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from audit.planted import EXACT, nvrtc_build


@pytest.fixture
def plant(tmp_path: Path) -> Callable[..., Path]:
    """``plant(source, "90a", ptx=True, cubin=True)``: a folder with the build in it."""

    def build(
        source: str, arch: str = "90a", options: tuple[str, ...] = EXACT, ptx: bool = True, cubin: bool = True
    ) -> Path:
        if ptx:
            (tmp_path / "planted.ptx").write_bytes(nvrtc_build(source, f"compute_{arch}", options))
        if cubin:
            (tmp_path / "planted.cubin").write_bytes(nvrtc_build(source, f"sm_{arch}", options))
        return tmp_path

    return build
