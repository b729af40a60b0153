"""The versions of the compilers that decide the machine code of our kernels."""

from __future__ import annotations

from samebits.runtime import nvrtc


def compilers() -> dict[str, str]:
    """The exact release where a package carries the compiler, e.g. ``{"nvrtc": "13.0.88", "triton": "3.6.0"}``."""
    from importlib import metadata

    versions = {"nvrtc": nvrtc.version()}
    for key, packages in {"nvrtc": ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"), "triton": ("triton",)}.items():
        for package in packages:
            try:
                exact = metadata.version(package)
            except metadata.PackageNotFoundError:
                continue
            if key != "nvrtc" or exact.startswith(versions["nvrtc"]):
                versions[key] = exact
    return versions
