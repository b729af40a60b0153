"""Running what a command line names: a script, or a callable that makes a model."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from samebits.verify.callables import importable_from_here, resolve
from samebits.verify.subject import UsageError
from samebits.verify.trace.nested import leaves


def is_script(target: str) -> bool:
    """``train.py`` is run as a program; with a colon, ``train.py:make``, its callable is called."""
    return ":" not in target and target.endswith(".py")


def run_script(path: Path, arguments: Sequence[str]) -> None:
    """As ``python path arguments`` would. A script that leaves with exit code 0 has ended well; any other is its own error."""
    before, folder = sys.argv, str(path.resolve().parent)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, folder)
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
    finally:
        sys.argv = before
        sys.path.remove(folder)


def make(target: str, arguments: Sequence[str] = ()) -> tuple[nn.Module, Any]:
    """What ``module:callable`` or ``file.py:callable`` returns: a model with its inputs, or with a function that runs it.

    Raises UsageError if it returns anything else.
    """
    with importable_from_here():
        function, _ = resolve(target)
        made = function(*arguments)
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        kind = type(made).__name__
        raise UsageError(f"{target} must return (model, inputs) or (model, function), it returned {kind}")
    return made


def runner(model: nn.Module, inputs: Any, backward: bool = False) -> Callable[[], None]:
    """How to run a model once: a mapping is keyword arguments, a tuple or list positional ones, a tensor the only one, and a
    function is called in place of the model. ``backward``: from the sum of the floating-point outputs."""

    def run() -> None:
        output = inputs() if callable(inputs) else call(model, inputs)
        if not backward:
            return
        made = [t for _, t in leaves(("output", output)).tensors if t.requires_grad]
        if not made:
            raise UsageError("--backward: no output of the model requires a gradient")
        total = sum((t.double().sum() for t in made[1:]), made[0].double().sum())
        total.backward()

    return run


def call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    if isinstance(inputs, Tensor):
        return model(inputs)
    raise UsageError(f"inputs are a tensor, a tuple, a mapping or a function, not {type(inputs).__name__}")
