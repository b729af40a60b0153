"""``samebits.trace``: record what a model computes while a block of code runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from samebits import catalogue, environment, observers
from samebits.verify.trace import options as choices
from samebits.verify.trace.attach import Attached
from samebits.verify.trace.digest import PLAIN
from samebits.verify.trace.file import Trace, header
from samebits.verify.trace.keeping import Kept
from samebits.verify.trace.kernels import Ranges
from samebits.verify.trace.names import Named
from samebits.verify.trace.parameters import without_repetitions
from samebits.verify.trace.ranks import own_path, rank_and_world
from samebits.verify.trace.recorder import Recorder


class Tracing:
    """An open recording. ``trace`` is the result, from the end of the ``with`` block on."""

    trace: Trace

    def __init__(self, model: nn.Module | None, out: Path | None, options: choices.Options) -> None:
        self._model, self._out, self._options = model, out, options
        self._modules: list[Named] = []
        self._exits = contextlib.ExitStack()
        self._open = False
        self._places: dict[tuple[str, bool], tuple[str, tuple[str, ...], tuple[str, ...]]] = {}
        """By operator and direction: its path, names of what it takes and returns."""

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors that were read for digests so far."""
        return self._recorder.bytes_read

    def __enter__(self) -> Tracing:
        if self._open:
            raise RuntimeError("this trace is open already; call samebits.trace again for another one")
        kept = Kept(None if self._out is None else own_path(self._out))
        self._recorder = Recorder(self._options, kept)
        self._kept, self._ranges = kept, Ranges(self._options.kernels)
        self._attached = Attached(self._recorder, self._ranges)
        with contextlib.ExitStack() as exits:
            exits.callback(self._attached.detach)
            if self._model is not None:
                self._modules = self._attached.attach(self._model)
            else:
                exits.enter_context(_every_root(self._attach_root))
            observers.OBSERVERS.append(self._operator)
            exits.callback(observers.OBSERVERS.remove, self._operator)
            self._ranges.start()
            self._exits = exits.pop_all()
        self._open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._open = False
        self._recorder.closed = True
        self._exits.close()
        events = without_repetitions(self._recorder.finish())
        self._ranges.stop(events)
        rank, world = rank_and_world()
        self.trace = Trace(
            header(
                environment=environment.collect().to_json(),
                settings=_settings(),
                rank=rank,
                world_size=world,
                options=self._options.to_json(),
                modules={named.path: _described(named) for named in self._modules},
            ),
            events,
            None if error is None else self._stop(error),
            tensors=self._kept.tensors,
        )
        if self._out is not None:
            self._kept.flush()
            self.trace.tensors, self.trace.tensor_files = {}, self._kept.files
            self.trace.write(own_path(self._out))
        if error is None and self._recorder.error is not None:
            raise self._recorder.error

    def _stop(self, error: BaseException) -> dict[str, Any]:
        """The innermost module that the error left; the innermost open one where no hook saw it pass."""
        failed, stack = self._recorder.failed, self._recorder.stack
        path = failed[1] if failed is not None and failed[0] is error else stack[-1].event.path if stack else None
        message = " ".join(str(error).split())[:400]
        return {"path": path, "error": type(error).__name__, "message": message}

    def _attach_root(self, module: nn.Module) -> None:
        """A module that nobody announced was called from outside of all others: it is a model, the first one or a further one."""
        if self._recorder.stack or self._attached.knows(module):
            return
        taken = {named.path for named in self._modules}
        prefix = "" if not taken else _free(type(module).__name__, taken)
        self._modules += self._attached.attach(module, prefix)

    def _operator(
        self, operator: str, backward: bool, tensors: Sequence[Any], results: Sequence[Any], decision: Any
    ) -> None:
        """One of our operators ran; see :mod:`samebits.observers`."""
        if self._recorder.closed:
            return
        for result in results:
            if type(result) not in PLAIN and type(result).__name__ == "FakeTensor":
                return
        if self._ranges.wanted:
            with self._ranges.own():
                self._ran(operator, backward, tensors, results, decision)
        else:
            self._ran(operator, backward, tensors, results, decision)

    def _ran(
        self, operator: str, backward: bool, tensors: Sequence[Any], results: Sequence[Any], decision: Any
    ) -> None:
        recorder = self._recorder
        places = self._places.get((operator, backward))
        if places is None:
            path = f"samebits::{operator}{'_backward' if backward else ''}"
            places = self._places[operator, backward] = path, *catalogue.tensors(operator, backward)
        path, taken, returned = places
        event = recorder.event("operator", "backward" if backward else recorder.phase(), path)
        # Not inputs: where the contract differs, the operator is what made the difference.
        event.cls, event.note = decision.choice.backend, f"contract {decision.call.contract}"
        batch = recorder.batch()
        try:
            event.inputs = recorder.records(event, zip(taken, tensors, strict=True), batch=batch)
            event.outputs = recorder.records(event, zip(returned, results, strict=True), after=event.start, batch=batch)
        finally:
            batch.launch()
        recorder.emit(event)


def trace(
    model: nn.Module | None = None,
    out: str | Path | None = None,
    *,
    modules: str | Sequence[str] = (),
    tensors: bool | str | Sequence[str] = False,
    rows: bool | int = False,
    batch_axis: int = 0,
    gradients: bool = True,
    parameters: bool = True,
    kernels: bool = False,
    reuse: bool = True,
    passed_over: bool = False,
) -> Tracing:
    """Record digests of everything that the modules of ``model`` take and return, forward and backward, while a block runs.

    ``with samebits.trace(model, out="run.trace") as recording: step()`` writes the file and leaves the result in
    ``recording.trace``. It changes no bit of what runs. Without a model, every model that is called in the block is recorded.

    ``modules``: patterns of qualified names, e.g. ``"model.layers.0*"``; the outermost module is always recorded.
    ``tensors``: keep full tensors, of all modules or by pattern, in safetensors files beside the trace (slow: each is copied
    to the host at once). ``rows``: digests of rows too; True takes one axis, a number that many, from ``batch_axis`` on.
    ``gradients``, ``parameters``: leave them out with False. ``kernels``: names of what each call launched, by the profiler.
    ``reuse``: a tensor that was read is not read again until torch has counted a write to it; False reads at every call, which
    also shows writes that torch does not count. ``passed_over``: a model that samebits.patch has changed runs some modules as a
    part of another operation; True runs them by themselves as well, for the trace alone, so that it has what a trace of the
    unpatched model has.

    Raises TypeError for nn.DataParallel or what is no module, ValueError for options that cannot be, OSError where ``out`` cannot
    be written; all before the block runs.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"trace needs a torch.nn.Module or None, not {type(model).__name__}")
    path = None if out is None else Path(out)
    if path is not None and not path.parent.is_dir():
        raise FileNotFoundError(f"no folder {path.parent} to write {path.name} in")
    made = choices.make(modules, tensors, rows, batch_axis, gradients, parameters, kernels, reuse, passed_over)
    return Tracing(model, path, made)


@contextlib.contextmanager
def _every_root(attach: Callable[[nn.Module], None]) -> Iterator[None]:
    """``attach(module)`` in front of every call of a module; for runs whose models are not at hand before they start."""
    original = nn.Module.__call__

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            attach(self)
        return original(self, *args, **kwargs)

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]


def _free(name: str, taken: set[str]) -> str:
    """A first part of a path that no other model has."""
    used = {path.split(".")[0] for path in taken}
    return name if name not in used else next(f"{name}{i}" for i in range(2, len(used) + 3) if f"{name}{i}" not in used)


def _described(named: Named) -> str:
    """Class and settings as the module prints them, e.g. ``LayerNorm((64,), eps=1e-05)``."""
    try:
        return f"{named.cls}({named.module.extra_repr()})"
    except Exception:  # a module's own code; its description is not worth a run
        return named.cls


def _settings() -> dict[str, Any]:
    """Switches of torch that can change bits."""
    return {
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "num_threads": torch.get_num_threads(),
        "seed": torch.initial_seed(),
    }
