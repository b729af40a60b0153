"""Subjects that are anybody's callable: found by name, fed by a known signature, by its own file, or by shapes."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from samebits.verify import inputs
from samebits.verify.subject import (
    GARBAGE_ROWS,
    Batch,
    NotRun,
    Pool,
    Subject,
    UsageError,
    everything,
    first_line,
    gradients,
    leaf,
)
from samebits.verify.tolerance import Tolerance, tolerance

INPUT_HOOK = "samebits_inputs"


# --- finding it -------------------------------------------------------------------------------------------------------


def resolve(target: str) -> tuple[Callable[..., Any], ModuleType]:
    """``path/file.py:function``, ``module:callable`` or a dotted name; with the module that holds it."""
    place, colon, name = target.rpartition(":")
    try:
        if colon and place.endswith(".py"):
            module = _load_file(Path(place))
        elif colon:
            module = importlib.import_module(place)
        else:
            module, name = _split_dotted(target)
    except ImportError as error:
        raise UsageError(f"cannot import {target!r}: {first_line(error)}") from error
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise UsageError(f"{target!r}: there is no {part!r} in it")
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(f"{target!r} is a {type(found).__name__}, not a callable")
    return found, module


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"no file {path}")
    name = f"samebits_candidate_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _split_dotted(target: str) -> tuple[ModuleType, str]:
    parts = target.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:cut])
        try:
            return importlib.import_module(name), ".".join(parts[cut:])
        except ModuleNotFoundError as error:
            # Only "there is no such module" means: try one level up. An error inside the user's module is theirs to see.
            if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
                raise
    raise UsageError(
        f"{target!r} is neither an operator nor importable; write module:callable, path/file.py:function or a dotted name"
    )


# --- feeding it -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """One tensor argument. The axis ``T`` (first, if present) is the batch; others are sizes or names with a default."""

    name: str
    axes: tuple[str | int, ...]
    sample: str = "normal"

    @property
    def rows(self) -> bool:
        return bool(self.axes) and self.axes[0] == "T"


@dataclass(frozen=True)
class Signature:
    shapes: tuple[Shape, ...]
    sizes: Mapping[str, int]
    call: Callable[..., Any] = lambda function, *tensors: function(*tensors)


_X = Shape("x", ("T", "D"))
_WEIGHT = Shape("weight", ("D",), "weight")
_BIAS = Shape("bias", ("D",))
_HEADS = ("T", "H", "S", "E")
_MM = Signature((Shape("input", ("T", "K")), Shape("mat2", ("K", "N"))), {"K": 1024, "N": 256})


def _over_last(function: Callable[..., Any], x: Tensor) -> Any:
    return function(x, dim=-1)


KNOWN: dict[str, Signature] = {
    "torch.mm": _MM,
    "torch.matmul": _MM,
    "torch.addmm": Signature((Shape("bias", ("N",)), *_MM.shapes), _MM.sizes),
    "torch.nn.functional.linear": Signature(
        (Shape("input", ("T", "K")), Shape("weight", ("N", "K")), Shape("bias", ("N",))), _MM.sizes
    ),
    "torch.nn.functional.rms_norm": Signature(
        (_X, _WEIGHT), {"D": 4096}, lambda f, x, weight: f(x, (x.shape[-1],), weight, 1e-6)
    ),
    "torch.nn.functional.layer_norm": Signature(
        (_X, _WEIGHT, _BIAS), {"D": 4096}, lambda f, x, weight, bias: f(x, (x.shape[-1],), weight, bias, 1e-6)
    ),
    "torch.nn.functional.softmax": Signature((_X,), {"D": 4096}, _over_last),
    "torch.nn.functional.log_softmax": Signature((_X,), {"D": 4096}, _over_last),
    "torch.softmax": Signature((_X,), {"D": 4096}, _over_last),
    "torch.logsumexp": Signature((_X,), {"D": 4096}, _over_last),
    "torch.sum": Signature((_X,), {"D": 4096}, _over_last),
    "torch.mean": Signature((_X,), {"D": 4096}, _over_last),
    "torch.nn.functional.silu": Signature((_X,), {"D": 4096}),
    "torch.nn.functional.gelu": Signature((_X,), {"D": 4096}),
    "torch.nn.functional.scaled_dot_product_attention": Signature(
        (Shape("query", _HEADS), Shape("key", _HEADS), Shape("value", _HEADS)), {"H": 2, "S": 64, "E": 64}
    ),
}


def canonical_name(function: Callable[..., Any]) -> str | None:
    """The entry of :data:`KNOWN` for this function, however it was imported."""
    for name in KNOWN:
        module, _, attribute = name.rpartition(".")
        if getattr(importlib.import_module(module), attribute, None) is function:
            return name
    return None


def parse_shapes(texts: Sequence[str]) -> tuple[Shape, ...]:
    """``T,64`` and ``64,64`` as argument shapes, in order."""
    shapes = []
    for index, text in enumerate(texts):
        axes = tuple("T" if part.strip() == "T" else part.strip() for part in text.split(","))
        if any(part != "T" and not (isinstance(part, str) and part.isdecimal()) for part in axes) or "T" in axes[1:]:
            raise UsageError(
                f"shape {text!r}: write sizes separated by commas, with T first where the tensor has rows, e.g. T,64"
            )
        shapes.append(Shape(f"arg{index}", tuple(part if part == "T" else int(part) for part in axes)))
    return tuple(shapes)


@dataclass(frozen=True)
class Argument:
    """One positional argument: rows to recompose, a tensor all rows share, or a constant."""

    name: str
    pool: Pool | None = None
    shared: Tensor | None = None
    constant: Any = None


class CallableSubject(Subject):
    """A callable whose tensors have the batch as their first axis."""

    def __init__(
        self,
        function: Callable[..., Any],
        title: str,
        arguments: Sequence[Argument],
        rows: int,
        seed: int,
        device: torch.device,
        call: Callable[..., Any] | None = None,
        judge: Callable[..., Any] | None = None,
        judge_title: str = "",
    ) -> None:
        self.function, self.title, self.arguments = function, title, tuple(arguments)
        self.rows, self.seed, self.device = rows, seed, device
        self.canonical_nans = device.type == "cpu"
        self._call_form = call or (lambda f, *tensors: f(*tensors))
        self._judge = judge or function
        self.judge_note = (
            f"{judge_title} on FP64 inputs"
            if judge
            else f"{title} itself on FP64 inputs (no golden exists; --against names one)"
        )
        if not any(argument.pool for argument in self.arguments):
            raise UsageError(f"{title}: no argument has rows; mark the batch axis with T, e.g. --shape T,64")
        self._outputs = self._find_outputs()
        self._upstream = {
            name: Pool(inputs.row_tensor(f"{title}/grad_{name}", everything(rows), shape, dtype, seed).to(device))
            for name, (dtype, shape) in self._outputs.items()
            if dtype.is_floating_point
        }

    def _find_outputs(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Results whose first axis follows the number of rows."""
        many, few = range(self.rows), range(max(self.rows - 1, 1))
        try:
            with torch.no_grad():
                large = self._run(self._plain(many))
        except Exception as error:
            raise UsageError(
                f"{self.title} does not accept the inputs: {type(error).__name__}: {first_line(error)}"
            ) from error
        try:
            with torch.no_grad():
                small = self._run(self._plain(few))
        except Exception:  # a batch size it refuses: the invariance check will say so
            small = {}
        found = {
            name: (value.dtype, tuple(value.shape[1:]))
            for name, value in large.items()
            if value.shape[:1] == (len(many),) and (name not in small or small[name].shape[:1] == (len(few),))
        }
        if not found:
            shapes = ", ".join(str(tuple(v.shape)) for v in large.values())
            raise UsageError(f"{self.title}: no result has the {self.rows} rows as its first axis (shapes: {shapes})")
        return found

    def _plain(self, ids: Sequence[int]) -> Batch:
        return Batch(
            ids=tuple(ids),
            rows={a.name: a.pool.take(ids) for a in self.arguments if a.pool is not None},
            shared={a.name: a.shared for a in self.arguments if a.shared is not None},
            upstream={},
        )

    def batch(self, ids: Sequence[int]) -> Batch:
        plain = self._plain(ids)
        return Batch(
            plain.ids, plain.rows, plain.shared, {name: pool.take(ids) for name, pool in self._upstream.items()}
        )

    def _run(self, batch: Batch, function: Callable[..., Any] | None = None) -> dict[str, Tensor]:
        known = batch.rows | batch.shared
        values = [known.get(a.name, a.constant) for a in self.arguments]
        results = self._call_form(function or self.function, *values)
        listed = list(results) if isinstance(results, (tuple, list)) else [results]
        return {
            f"out{index}" if len(listed) > 1 else "out": v for index, v in enumerate(listed) if isinstance(v, Tensor)
        }

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        with torch.no_grad():
            return self._run(batch)

    def backward(self, batch: Batch) -> dict[str, Tensor]:
        return self._gradients(batch, self.function)

    def _gradients(self, batch: Batch, function: Callable[..., Any]) -> dict[str, Tensor]:
        leaves = {name: leaf(value) for name, value in (batch.rows | batch.shared).items()}
        if not any(value.requires_grad for value in leaves.values()):
            raise NotRun("no argument is a floating-point tensor")
        tracked = Batch(
            batch.ids, {n: leaves[n] for n in batch.rows}, {n: leaves[n] for n in batch.shared}, batch.upstream
        )
        try:
            results = self._run(tracked, function)
        except (RuntimeError, NotImplementedError) as error:
            raise NotRun(f"the forward with gradients raised {type(error).__name__}: {first_line(error)}") from error
        return gradients(results, leaves, batch.upstream)

    def is_row(self, name: str, gradient: bool) -> bool:
        if gradient:
            return any(a.name == name and a.pool is not None for a in self.arguments)
        return name in self._outputs

    def golden(self, batch: Batch, gradient: bool) -> dict[str, Tensor]:
        wide = batch.to(torch.float64)
        try:
            if gradient:
                return self._gradients(wide, self._judge)
            with torch.no_grad():
                return self._run(wide, self._judge)
        except NotRun:
            raise
        except Exception as error:
            raise NotRun(f"{self.judge_note} raised {type(error).__name__}: {first_line(error)}") from error

    def tolerance(self, name: str, dtype: torch.dtype, gradient: bool) -> Tolerance:
        """As a reduction: what a foreign callable sums over is not known, so the longest axis of its inputs bounds it."""
        tensors = [t for a in self.arguments for t in (a.pool.tensor[0] if a.pool else None, a.shared) if t is not None]
        return tolerance("reduction", dtype, gradient, max([1, *(size for t in tensors for size in t.shape)]))


def drawn_arguments(
    shapes: Sequence[Shape],
    sizes: Mapping[str, int],
    title: str,
    rows: int,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
) -> list[Argument]:
    arguments = []
    for shape in shapes:
        stream = f"{title}/{shape.name}"
        dims = tuple(axis if isinstance(axis, int) else sizes[axis] for axis in shape.axes if axis != "T")
        if shape.rows:
            values = inputs.row_tensor(stream, everything(rows), dims, dtype, seed, shape.sample)
            for row in range(rows, rows + GARBAGE_ROWS):
                kind = "nan" if row % 3 == 1 else "wide"
                values[row] = inputs.row_tensor(f"garbage/{stream}", [2 * row], dims, dtype, seed, shape.sample, kind)[
                    0
                ]
            arguments.append(Argument(shape.name, pool=Pool(values.to(device))))
        else:
            shared = inputs.parameter_tensor(stream, dims, dtype, seed, shape.sample)
            arguments.append(Argument(shape.name, shared=shared.to(device)))
    return arguments


def hooked_arguments(
    hook: Callable[..., Any], rows: int, seed: int, device: torch.device, dtype: torch.dtype
) -> tuple[list[Argument], Callable[..., Any] | None]:
    """From ``samebits_inputs(rows, seed, device, dtype) -> (args, row_args)``, with how to call if that is not by position.

    ``args`` is a tuple and ``row_args`` the indices of the arguments batched by rows; or ``args`` is a dict of keyword
    arguments and ``row_args`` are names. A batched tensor has ``rows`` as its first axis.
    """
    count = everything(rows).stop
    made = hook(count, seed, device, dtype)
    if not (isinstance(made, tuple) and len(made) == 2):
        raise UsageError(f"{INPUT_HOOK} must return (args, row_args), it returned {type(made).__name__}")
    values, row_args = made
    by_name = isinstance(values, Mapping)
    keyed: dict[Any, Any] = dict(values) if by_name else dict(enumerate(values))
    missing = [key for key in row_args if key not in keyed]
    if missing:
        raise UsageError(
            f"{INPUT_HOOK}: row_args has {missing[0]!r}, which is no argument; there are {', '.join(map(repr, keyed))}"
        )
    arguments = []
    for key, value in keyed.items():
        name = str(key) if by_name else f"arg{key}"
        if key in row_args:
            if not isinstance(value, Tensor) or value.shape[:1] != (count,):
                raise UsageError(
                    f"{INPUT_HOOK}: argument {key!r} is marked as rows but is no tensor with {count} rows as its first axis"
                )
            arguments.append(Argument(name, pool=Pool(value)))
        elif isinstance(value, Tensor):
            arguments.append(Argument(name, shared=value))
        else:
            arguments.append(Argument(name, constant=value))

    def by_keyword(function: Callable[..., Any], *given: Any) -> Any:
        return function(**dict(zip(keyed, given, strict=True)))

    return arguments, by_keyword if by_name else None


@contextlib.contextmanager
def importable_from_here() -> Iterator[None]:
    """``module:callable`` may live in the working directory, as with ``python -m``."""
    sys.path.insert(0, "")
    try:
        yield
    finally:
        sys.path.remove("")
