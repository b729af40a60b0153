"""Hooks on the modules of a model, and taking every one of them off again."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from samebits.verify.trace.gradients import Gradients
from samebits.verify.trace.kernels import Ranges
from samebits.verify.trace.names import Named, is_compiled_in_place, is_managed, named_modules
from samebits.verify.trace.nested import leaves
from samebits.verify.trace.parameters import Parameters, own_tensors
from samebits.verify.trace.recorder import Call, Recorder


class Attached:
    """The hooks of one recording on any number of models."""

    def __init__(self, recorder: Recorder, ranges: Ranges) -> None:
        self._recorder = recorder
        self._ranges = ranges
        self._parameters = Parameters(recorder)
        self._gradients = Gradients(recorder)
        self._handles: list[Any] = []
        self._patched: list[tuple[nn.Module, Any]] = []
        self._named: dict[int, Named] = {}
        self._roots: dict[int, list[Named]] = {}
        """For each outermost module the modules whose parameters are looked at when it is called."""
        self._managed = False
        self._watched: set[int] = set()

    def knows(self, module: nn.Module) -> bool:
        return id(module) in self._named

    def attach(self, root: nn.Module, prefix: str = "") -> list[Named]:
        """Hook the modules of a model that the options want; all modules with their names are returned."""
        modules = list(named_modules(root, prefix))
        outermost, *others = modules
        filtered = bool(self._recorder.options.modules)
        wanted = [outermost, *(named for named in others if self._recorder.options.wants(named.path))]
        # With a filter, the parameters of what it lets through; otherwise all, those of modules that never run too.
        owners = (wanted[1:] or wanted) if filtered else modules
        self._roots[id(outermost.module)] = owners
        self._managed = self._managed or any(is_managed(named.module) for named in modules)
        if self._managed:
            self._recorder.read_everything()
        for named in wanted:
            if not self.knows(named.module):  # two models may share one
                self._named[id(named.module)] = named
                self._hook(named)
        if self._recorder.options.gradients:
            self._watch_parameters(owners)
        return modules

    def detach(self) -> None:
        """Take off everything, whatever happened in between."""
        for module, original in self._patched:
            module._compiled_call_impl = original
        for handle in self._handles:
            handle.remove()
        self._gradients.remove()
        self._patched.clear()
        self._handles.clear()

    # --- hooks --------------------------------------------------------------------------------------------------------

    def _hook(self, named: Named) -> None:
        module = named.module
        if is_compiled_in_place(module):
            self._patch_compiled(named)
            return
        self._handles.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
        self._handles.append(module.register_forward_hook(self._after, with_kwargs=True, always_call=True))

    def _patch_compiled(self, named: Named) -> None:
        """``module.compile()`` compiles the hooks with the module; what it calls in its own place can be watched instead."""
        module = named.module
        compiled = module._compiled_call_impl
        assert compiled is not None

        def watched(*args: Any, **kwargs: Any) -> Any:
            self._before(module, args, kwargs)
            result = None
            try:
                result = compiled(*args, **kwargs)
            finally:
                self._after(module, args, kwargs, result)
            return result

        self._patched.append((module, compiled))
        module._compiled_call_impl = watched

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or self._recorder.closed:
            return  # inside compiled code: opaque
        named = self._named[id(module)]
        recorder, stack = self._recorder, self._recorder.stack
        if recorder.options.parameters:
            with self._ranges.own():
                self._parameters.look(self._roots.get(id(module), [named]), named, self._managed)
        event = recorder.event("module", recorder.phase(), named.path, named.cls)
        call = Call(module, event, sys.exc_info()[1])
        with self._ranges.own():
            given = leaves(("args", args), ("kwargs", kwargs))
            keep = recorder.options.keeps(named.path)
            event.inputs = [recorder.record(event, where, tensor, keep=keep) for where, tensor in given.tensors]
            event.values, event.opaque = given.values, given.opaque
            if named.opaque:
                event.note = "compiled: what happens inside is not recorded"
            if recorder.options.gradients:
                self._gradients.before(call, given.tensors)
        stack.append(call)
        self._ranges.enter(event)

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling() or self._recorder.closed:
            return
        recorder, stack = self._recorder, self._recorder.stack
        if not (stack and stack[-1].module is module) and not any(call.module is module for call in stack):
            return  # it began before the trace was attached
        while stack[-1].module is not module:
            self._ranges.leave(stack.pop().event)  # ended by an exception that ran no hooks
        call = stack.pop()
        event = call.event
        self._ranges.leave(event)
        error = sys.exc_info()[1]
        if output is None and error is not None and error is not call.error:
            self._stopped(event, error)
        else:
            with self._ranges.own():
                given = leaves(("output", output))
                keep = recorder.options.keeps(event.path)
                # What was read before the call cannot stand for what it returns: it may have been written meanwhile.
                event.outputs = [
                    recorder.record(event, where, tensor, keep=keep, after=event.start)
                    for where, tensor in given.tensors
                ]
                event.values.update(given.values)
                event.opaque.extend(given.opaque)
            if recorder.options.gradients:
                self._gradients.after(call, given.tensors)
        recorder.emit(event)

    def _stopped(self, event: Any, error: BaseException) -> None:
        recorder = self._recorder
        if type(error).__name__ == "_StopRecomputationError":
            event.note = "recomputation stopped inside: the backward needed nothing behind it"
            return
        event.note = f"ended by {type(error).__name__}"
        if recorder.failed is None or recorder.failed[0] is not error:
            recorder.failed = (error, event.path)

    def _watch_parameters(self, modules: list[Named]) -> None:
        for named in modules:
            for name, tensor in own_tensors(named):
                if id(tensor) in self._watched or not (tensor.requires_grad and tensor.is_leaf):
                    continue
                self._watched.add(id(tensor))
                self._gradients.parameter(name, tensor)
