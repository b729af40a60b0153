"""A provider by its name, by ``module:Class``, or by ``path/file.py:Class``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

import torch

from samebits.accept.operators import OperatorProvider
from samebits.accept.provider import CAPABILITIES, METHODS, PROVENANCE, Provider
from samebits.accept.reference import ReferenceProvider
from samebits.accept.stub import StubProvider
from samebits.runtime import device as devices
from samebits.verify.callables import importable_from_here, resolve
from samebits.verify.subject import UsageError, first_line

BUILT_IN: dict[str, Callable[[], Any]] = {
    "cuda": lambda: OperatorProvider("cuda"),
    "triton": lambda: OperatorProvider("triton"),
    "operators": lambda: OperatorProvider("reference", "operators"),
    "reference": ReferenceProvider,
    "stub": StubProvider,
}
"""``operators`` is our torch operators with their reference backend: everything but the kernels, on any machine."""


def load(target: str | Provider | None, device: torch.device) -> Provider:
    """The provider. None takes the first of CUDA, Triton and the operators' reference that this machine can run.

    Raises UsageError where there is none of that name, or where what is there is no provider.
    """
    if target is None:
        target = default(device)
    if not isinstance(target, str):
        return _checked(target, type(target).__name__)
    if target in BUILT_IN:
        why = devices.missing(target) if target in ("cuda", "triton") else None
        if why is not None:
            raise UsageError(f"provider {target}: {why}")
        return _checked(BUILT_IN[target](), target)
    if ":" not in target:
        raise UsageError(
            f"no provider named {target!r}; choose one of {', '.join(BUILT_IN)}, or name yours as module:Class"
        )
    with importable_from_here():
        found, _ = resolve(target)
        try:
            made = found()
        except Exception as error:
            raise UsageError(f"{target} could not be made: {type(error).__name__}: {first_line(error)}") from error
    return _checked(made, target)


def default(device: torch.device) -> str:
    names = ("cuda", "triton") if device.type == "cuda" else ()
    return next((name for name in names if devices.missing(name) is None), "operators")


def _checked(made: Any, title: str) -> Provider:
    lacking = [name for name in ("name", "numeric_profile") if not isinstance(getattr(made, name, None), str)]
    lacking += [f"{name}()" for name in METHODS if not callable(getattr(made, name, None))]
    if inspect.isclass(made) or lacking:
        what = f"it has no {', '.join(lacking)}" if lacking else "it is a class, not an object"
        raise UsageError(f"{title} is no provider: {what}")
    for method, keys in (("capabilities", CAPABILITIES), ("provenance", PROVENANCE)):
        try:
            said = getattr(made, method)()
        except Exception as error:
            raise UsageError(
                f"{title} is no provider: {method}() raised {type(error).__name__}: {first_line(error)}"
            ) from error
        absent = [key for key in keys if key not in said]
        if absent:
            raise UsageError(f"{title} is no provider: {method}() does not say {', '.join(absent)}")
    return cast("Provider", made)
