"""Allocator, compiler, graphs, streams, devices (kind G of the hostile inputs)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from samebits import dispatch
from samebits.verify.conformance.base import Base, Target, assert_all_same
from samebits.verify.layouts import LAYOUTS, poisoned
from samebits.verify.operators import OperatorSubject
from samebits.verify.subject import gradients, leaf


class Machinery(Base):
    # --- memory that is not ours ----------------------------------------------------------------------------------

    def test_results_are_fully_written(self, target: Target, contract: str, backward: bool) -> None:
        # A5, B3: torch fills fresh memory with NaN here, so an element that nobody wrote is seen.
        subject = self.subject(target, contract)
        cases = [self.inputs(subject, subject.batch(range(n)), backward) for n in (1, 9, 33)]
        expected = [self.run(subject, tensors, backward) for tensors in cases]
        if target.device == "cuda":
            for size in (2**10, 2**14, 2**18, 2**22):
                torch.full((size,), float("nan"), device=target.device)  # freed at once, and handed out again
        fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
        try:
            for tensors, results in zip(cases, expected, strict=True):
                assert_all_same(results, self.run(subject, tensors, backward), "on poisoned memory")
        finally:
            torch.use_deterministic_algorithms(False)
            torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]

    def test_cold_and_warm_calls_agree(self, target: Target, contract: str, backward: bool) -> None:
        # H18: what a call remembers for the next one (decisions, loaded kernels) shows in no bit.
        subject = self.subject(target, contract)
        tensors = self.inputs(subject, subject.batch(range(9)), backward)
        self.operator._decisions.clear()
        cold = self.run(subject, tensors, backward)
        for _ in range(3):
            assert_all_same(cold, self.run(subject, tensors, backward), "a warm call")

    # --- torch's own machinery (G) --------------------------------------------------------------------------------

    def _op_arguments(self, subject: OperatorSubject, tensors: Sequence[Tensor], backward: bool) -> tuple[Any, ...]:
        rest: list[Any] = [*tensors, *subject.scalars.values(), subject.contract, subject.backend]
        return (*rest, "float32", [True] * len(self.spec.backward.results)) if backward else tuple(rest)

    def test_opcheck(self, target: Target, backward: bool) -> None:
        # G1: schema, fake kernel, autograd registration; also with a transposed input.
        subject = self.subject(target, width=24)  # registers the operator, whose api nothing may have touched yet
        op = getattr(torch.ops.samebits, f"{self.op}_backward" if backward else self.op).default
        for lay in (None, LAYOUTS["rows_innermost"]):
            tensors = self.inputs(subject, subject.batch(range(4)), backward)
            views = [t if lay is None else (lay(t) if lay(t) is not None else t) for t in tensors]
            if not backward:
                views = [leaf(v) for v in views if v is not None]
            with dispatch.policy("silent"):
                torch.library.opcheck(op, self._op_arguments(subject, [v for v in views if v is not None], backward))

    def test_compiled_without_graph_breaks(self, target: Target, contract: str) -> None:
        # G3, F: one graph, symbolic T, then another T and T = 1; results and gradients bit for bit.
        subject = self.subject(target, contract, width=24)
        names = [r.name for r in self.public()]
        given = [arg for arg in self.spec.forward.inputs if not arg.derived]
        public = self.public_function()
        contract, backend = subject.contract, subject.backend

        def step(*tensors: Tensor) -> tuple[Tensor, ...]:
            results = public(*tensors, contract=contract, backend=backend)
            return (results,) if isinstance(results, Tensor) else tuple(results)

        torch._dynamo.reset()
        engine = "inductor" if target.device == "cuda" else "aot_eager"
        compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=engine)
        for count in (40, 8, 3, 1):
            batch = subject.batch(range(count))
            eager, traced = self.leaves(subject, batch), self.leaves(subject, batch)
            outputs = []
            for function, leaves in ((step, eager), (compiled, traced)):
                values = dict(zip(names, function(*(leaves[a.name] for a in given)), strict=True))
                upstream = {n: batch.upstream[n].to(values[n].dtype) for n in names}
                outputs.append((values, gradients(values, leaves, upstream)))
            assert_all_same(outputs[0][0], outputs[1][0], f"compiled, {count} rows")
            assert_all_same(outputs[0][1], outputs[1][1], f"gradients compiled, {count} rows")

    @pytest.mark.gpu
    def test_cuda_graph(self, target: Target, contract: str, backward: bool) -> None:
        # G4, G5: capture (which a host sync would break), then replay on new data.
        for width, count in ((self.width, 1), (self.width, 33), (4096, 128)):
            subject = self.subject(target, contract, width, rows=256)
            static = [t.clone() for t in self.inputs(subject, subject.batch(range(count)), backward)]
            torch.cuda.synchronize()
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                self.run(subject, static, backward)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                results = self.run(subject, static, backward)
            for start in (128, 64, 0):
                fresh = self.inputs(subject, subject.batch(range(start, start + count)), backward)
                for old, new in zip(static, fresh, strict=True):
                    old.copy_(new)
                graph.replay()
                torch.cuda.synchronize()
                assert_all_same(self.run(subject, fresh, backward), results, f"replay with rows from {start}")

    @pytest.mark.gpu
    def test_no_host_synchronisation(self, target: Target, backward: bool) -> None:
        # G5
        subject = self.subject(target)
        tensors = self.inputs(subject, subject.batch(range(33)), backward)
        self.run(subject, tensors, backward)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            self.run(subject, tensors, backward)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    @pytest.mark.gpu
    def test_runs_on_the_current_stream(self, target: Target, backward: bool) -> None:
        # G6, H13: a slow producer, our operator and a consumer on a side stream, a hundred times.
        subject = self.subject(target, rows=128)
        sources = self.inputs(subject, subject.batch(range(128)), backward)
        expected = self.run(subject, sources, backward)
        busy = torch.zeros(2**24, device=target.device)
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        for _ in range(100):
            with torch.cuda.stream(stream):
                late = [poisoned(s, tuple(s.shape)) for s in sources]
                busy.add_(1.0)
                for slot, source in zip(late, sources, strict=True):
                    slot.copy_(source)
                results = self.run(subject, late, backward)
                consumed = {name: value.clone() for name, value in results.items()}
            stream.synchronize()
            assert_all_same(expected, consumed, "on a side stream")

    @pytest.mark.gpu
    @pytest.mark.multi_gpu
    def test_runs_on_the_device_of_its_inputs(self, target: Target, backward: bool) -> None:
        # G8: tensors on cuda:1 while cuda:0 is current.
        first = self.subject(target)
        second = self.subject(Target(target.backend, "cuda:1"))
        expected = self.run(first, self.inputs(first, first.batch(range(33)), backward), backward)
        with torch.cuda.device(0):
            got = self.run(second, self.inputs(second, second.batch(range(33)), backward), backward)
            assert torch.cuda.current_device() == 0
        assert_all_same(expected, {name: value.to("cuda:0") for name, value in got.items()}, "on cuda:1")
