"""Run a case on the emulator and compare with the reference, bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samebits import registry
from samebits.dispatch import Call
from samebits.emulate.cases import Case, inputs
from samebits.emulate.elementary import Elementary
from samebits.emulate.launch import Emulator, KernelFault, emulated
from samebits.exact.compare import first_difference
from samebits.operator import Prepared
from samebits.runtime.device import H200


@dataclass(frozen=True)
class Finding:
    case: Case
    what: str

    def __str__(self) -> str:
        return f"{self.case}: {self.what}"


class Subject:
    """A call with its tensors, checked and prepared as the operator itself does, for the H200 that is not here."""

    def __init__(self, call: Call, tensors: Sequence[Tensor | None]) -> None:
        self.op = registry.operator(call.op)
        self.scalars = {s.name: s.default for s in self.op.spec.scalars}
        mask = [r.name in call.wanted for r in self.op.spec.backward.results] if call.backward else None
        values = list(self.scalars.values())
        self.ready: Prepared = self.op.prepare(
            call.backward, tensors, values, call.contract, "reference", call.grad_dtype, mask, call.out_dtype
        )
        self.inputs = self.ready.inputs
        self.call = dataclasses.replace(self.ready.call, device=H200)

    def plans(self) -> tuple[Any, ...]:
        return tuple(self.op.backend("cuda").plans(self.call))

    def reference(self) -> dict[str, Tensor]:
        results = self._results()
        with Elementary():
            self.op.backend("reference").run(
                self.ready.call, self.ready.choice.plan, self.inputs, results, self.scalars
            )
        return results

    def emulated(self, plan: Any, emulator: Emulator) -> dict[str, Tensor]:
        """Raises :class:`KernelFault`."""
        module, results = self.op.backend("cuda"), self._results()
        with emulated(emulator):
            module.run(self.call, plan, self.inputs, results, self.scalars)
        return results

    def _results(self) -> dict[str, Tensor]:
        """Memory for the wanted results, every byte 255: NaN where they are numbers."""
        made = {}
        for output in self.ready.decision.outputs:
            if output.wanted:
                name = output.declared.name
                made[name] = torch.empty(output.shape, dtype=output.dtype)
                _bytes(made[name]).fill_(255)
        return made


def findings(
    case: Case, emulator: Emulator | None = None, layout: str = "", pattern: str = "normal"
) -> Iterator[Finding]:
    """What is wrong with a case; nothing where its bits are those of the reference with its threads in either order."""
    emulator = emulator or Emulator()
    subject = Subject(case.call, inputs(case.call, layout, pattern))
    before = {name: _bytes(tensor).clone() for name, tensor in subject.inputs.items()}
    expected = subject.reference()
    plans = subject.plans()
    plan = plans[case.plan % len(plans)]  # another layout may have fewer of them
    for descending in (False, True):
        emulator.descending = descending
        order = "descending threads: " if descending else ""
        try:
            results = subject.emulated(plan, emulator)
        except KernelFault as fault:
            yield Finding(case, f"{order}{fault}")
            continue
        steps = "; ".join(str(step) for step in plan)
        for name, value in expected.items():
            difference = first_difference(value, results[name], payloads=False)
            if difference is not None:
                yield Finding(case, f"{order}{name}, reference against emulated {steps}: {difference}")
        for name, tensor in subject.inputs.items():
            if not torch.equal(_bytes(tensor), before[name]):
                yield Finding(case, f"{order}{steps}: input {name} was written to")


def _bytes(tensor: Tensor) -> Tensor:
    """All bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
