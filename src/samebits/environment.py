"""Which machine and which software a result came from. Nothing heavy is imported until :func:`collect` is called."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ABSENT = "not installed"
COMMIT_VARIABLE = "SAMEBITS_COMMIT"
"""Names the commit where the code runs from a copy of a checkout that has no ``.git``."""


@dataclass(frozen=True)
class Environment:
    """Everything a bit or a microsecond may depend on. A part that is missing reads ``"not installed"``."""

    gpu: str
    arch: str
    driver: str
    torch: str
    cuda: str
    triton: str
    nvrtc: str
    cuda_core: str
    python: str
    cpu_capability: str
    commit: str

    def to_json(self) -> dict[str, str]:
        return dataclasses.asdict(self)


@functools.cache
def collect() -> Environment:
    """Ask the machine once per process. Never raises: an unreadable part is reported as absent."""
    return Environment(
        gpu=_guard(_gpu),
        arch=_guard(_arch),
        driver=_guard(_driver),
        torch=_version("torch"),
        cuda=_guard(_cuda),
        triton=_version("triton"),
        nvrtc=_guard(_nvrtc),
        cuda_core=_version("cuda-core"),
        python=platform.python_version(),
        cpu_capability=_guard(_cpu_capability),
        commit=_guard(_commit),
    )


def _guard(read: Callable[[], str]) -> str:
    try:
        return read() or ABSENT
    except Exception:  # a broken driver or half-installed package must not stop the report that would show it
        return ABSENT


def _version(distribution: str) -> str:
    return _guard(lambda: importlib.metadata.version(distribution))


def _gpu() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def _arch() -> str:
    import torch

    if not torch.cuda.is_available():
        return ""
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return (
            subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
            .stdout.split("\n")[0]
            .strip()
        )
    except (OSError, subprocess.SubprocessError):
        words = Path("/proc/driver/nvidia/version").read_text().split()
        return next(word for word in words if word[:1].isdigit() and "." in word)


def _cuda() -> str:
    import torch

    return torch.version.cuda or ""


def _nvrtc() -> str:
    from samebits.runtime import nvrtc

    return nvrtc.version()


def _cpu_capability() -> str:
    import torch

    return torch.backends.cpu.get_cpu_capability()


def checkout() -> Path | None:
    """The root of the samebits checkout this package runs from, or None where it was installed."""
    package = Path(__file__).resolve().parent
    root = package.parent.parent
    return root if package.parent.name == "src" and (root / "tests").is_dir() else None


def _commit() -> str:
    stated = os.environ.get(COMMIT_VARIABLE)
    if stated:
        return stated
    root = checkout()
    if root is not None and (root / ".git").exists():
        return _git(root, "rev-parse", "HEAD") + ("+dirty" if _git(root, "status", "--porcelain") else "")
    from samebits import __version__

    return f"{'copy of' if root is not None else 'installed'} {__version__}"


def _git(root: Path, *words: str) -> str:
    return subprocess.run(
        ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=20, check=True
    ).stdout.strip()
