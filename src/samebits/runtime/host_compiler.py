"""The system's C++ compiler: shared objects that are made at first use and kept."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

COMPILER = "g++"


class RefusedError(RuntimeError):
    """The compiler did not take the code; the message is its own."""


def find() -> str | None:
    return shutil.which(COMPILER)


def lacking(what: str) -> str:
    """What to say where it is not found: who needs it, and what to install."""
    return f"{what} {COMPILER} (tried: GCC 12), which is not installed"


@functools.cache
def version(path: str) -> str:
    """What the compiler says of itself, all lines."""
    return subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout


def digest(parts: Iterable[str]) -> str:
    """SHA-256 of texts in their order, in hex; where one ends and the next begins counts."""
    state = hashlib.sha256()
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part.encode())
    return state.hexdigest()


def shared_object(path: str, target: Path, files: Mapping[str, str], arguments: Sequence[str]) -> Path:
    """``target``, compiled from ``files`` by ``path *arguments`` unless it is there. It appears whole or not at all."""
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        for name, text in files.items():
            (Path(scratch) / name).write_text(text)
        command = [path, *arguments, "-o", "made.so"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=scratch)
        if done.returncode != 0:
            raise RefusedError(done.stderr)
        os.replace(Path(scratch) / "made.so", target)
    return target
