"""Hooks on the modules of a model, and taking every one of them off again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from samebits.verify.trace.gradients import Gradients
from samebits.verify.trace.kernels import Ranges
from samebits.verify.trace.names import Named, is_compiled_in_place, is_managed, is_passed_over, named_modules
from samebits.verify.trace.nested import leaves
from samebits.verify.trace.parameters import Parameters, own_tensors
from samebits.verify.trace.recorder import Call, Recorder


def _only_looks(hook: Callable[..., None]) -> Callable[..., None]:
    """Changes neither what a module takes nor what it returns; see :func:`samebits.models.hooks.show`."""
    hook.samebits_only_looks = True  # type: ignore[attr-defined]
    return hook


def _is_torch_alone(module: nn.Module) -> bool:
    """Nothing but torch's own code ran in this call, and that counts what it writes to what it returns: a module of torch.nn as it
    is there, without members, and without hooks but ours."""
    return (
        not module._modules
        and type(module).__module__.startswith("torch.nn.modules.")
        and len(module._forward_hooks) == 1
        and len(module._forward_pre_hooks) == 1
        and "forward" not in vars(module)
        and not torch_module._has_any_global_hook()
    )


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
        wanted = [outermost, *(named for named in others if self._wants(named))]
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

    def _wants(self, named: Named) -> bool:
        options = self._recorder.options
        asked = options.passed_over or named.path in options.modules
        return options.wants(named.path) and (asked or not is_passed_over(named.module))

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

    @_only_looks
    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recorder = self._recorder
        if torch.compiler.is_compiling() or recorder.closed:
            return  # inside compiled code: opaque
        if self._ranges.wanted:
            with self._ranges.own():
                call = self._begun(module, args, kwargs)
            self._ranges.enter(call.event)
        else:
            call = self._begun(module, args, kwargs)
        recorder.stack.append(call)

    def _begun(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        at = id(module)
        named, owners = self._named[at], self._roots.get(at)
        recorder = self._recorder
        options = recorder.options
        if options.parameters and (owners or module._parameters or module._buffers or named.opaque):
            self._parameters.look(owners or (named,), named, self._managed)
        event = recorder.event("module", recorder.phase(), named.path, named.cls)
        call = Call(module, event, sys.exc_info()[1])
        given = leaves(("args", args), ("kwargs", kwargs))
        event.inputs = recorder.records(event, given.tensors, keep=bool(options.tensors) and options.keeps(named.path))
        event.values, event.opaque = given.values, given.opaque
        if named.opaque:
            event.note = "compiled: what happens inside is not recorded"
        if options.gradients and torch.is_grad_enabled():
            self._gradients.before(call, given.tensors)
        return call

    @_only_looks
    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling() or self._recorder.closed:
            return
        stack = self._recorder.stack
        if not (stack and stack[-1].module is module):
            if not any(call.module is module for call in stack):
                return  # it began before the trace was attached
            while stack[-1].module is not module:
                self._ranges.leave(stack.pop().event)  # ended by an exception that ran no hooks
        call = stack.pop()
        if self._ranges.wanted:
            self._ranges.leave(call.event)
            with self._ranges.own():
                self._ended(call, output)
        else:
            self._ended(call, output)

    def _ended(self, call: Call, output: Any) -> None:
        recorder, event = self._recorder, call.event
        options = recorder.options
        error = sys.exc_info()[1]
        if output is None and error is not None and error is not call.error:
            self._stopped(event, error)
        else:
            given = leaves(("output", output))
            keep = bool(options.tensors) and options.keeps(event.path)
            # What was read before the call cannot stand for what it returns: it may have been written meanwhile, uncounted.
            after = -1 if _is_torch_alone(call.module) else event.start
            event.outputs = recorder.records(event, given.tensors, keep=keep, after=after)
            if given.values:
                event.values = {**event.values, **given.values}
            if given.opaque:
                event.opaque = [*event.opaque, *given.opaque]
            if options.gradients and torch.is_grad_enabled():
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
