"""Fixtures of the audit's tests."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from audit.planted import EXACT, nvrtc_build

from samebits.audit import sass


@pytest.fixture(scope="session", autouse=True)
def _each_cubin_is_disassembled_once() -> Iterator[None]:
    """The same planted code is read by many tests, and the disassembler takes longer to start than to read it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sass, "disassemble", functools.cache(sass.disassemble))
        yield


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
