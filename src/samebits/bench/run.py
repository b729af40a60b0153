"""The sweep: cases in, result lines out, one measurement per case with every candidate and peer interleaved."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from samebits.bench import bits, peers, results, tensors, work
from samebits.bench.case import Case, gradient_dtype, output_bytes, traffic, width
from samebits.bench.timing import Failure, Machine, Sample
from samebits.environment import Environment
from samebits.operator import Operator

MEMORY_SHARE = 0.9


@dataclass(frozen=True)
class Settings:
    contracts: tuple[str, ...]
    backends: tuple[str, ...]
    with_peers: bool = True
    compile_seconds: float = 600.0
    """Once torch.compile has taken this long, further compiled peers are left out, and the line says so."""
    seconds: float = float("inf")
    """No case is begun after this long."""


def run(
    op: Operator,
    cases: Sequence[Case],
    settings: Settings,
    machine: Machine,
    environment: Environment,
    begin: Callable[[Case], None] = lambda case: None,
) -> Iterator[dict[str, Any]]:
    """Result lines as they come, a ``skipped`` line for everything that could not be measured."""
    compiling = _Budget(settings.compile_seconds)
    started = time.monotonic()
    for case in cases:
        if time.monotonic() - started > settings.seconds:
            yield results.skipped(case, width(op.spec), f"no time was left after {settings.seconds:.0f} s")
            continue
        begin(case)
        needed, free = footprint(op, case, settings), machine.free_bytes() * MEMORY_SHARE
        if needed > free:
            yield results.skipped(
                case, width(op.spec), f"needs about {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free for it"
            )
            continue
        yield from _measure(op, case, settings, machine, environment, compiling)
        machine.release()


def footprint(op: Operator, case: Case, settings: Settings) -> int:
    """Bytes that the candidates hold at once. A peer that then finds too little memory is left out alone, with that reason."""
    candidates = len(settings.contracts) * len(settings.backends)
    return traffic(op.spec, case) + candidates * output_bytes(op.spec, case)


class _Budget:
    """Time that compiled peers may still take."""

    def __init__(self, seconds: float) -> None:
        self.left = seconds
        self.total = seconds

    def charge(self, made: work.Work) -> work.Work:
        def prepare() -> work.Run:
            if self.left <= 0:
                raise work.LeftOut(f"torch.compile had already taken {self.total:.0f} s in this run")
            started = time.monotonic()
            run = made.prepare()
            run()
            self.left -= time.monotonic() - started
            return run

        return work.Work(made.name, prepare, made.keep)


def _measure(
    op: Operator, case: Case, settings: Settings, machine: Machine, environment: Environment, compiling: _Budget
) -> Iterator[dict[str, Any]]:
    given = work.Given(
        tensors.forward_inputs(op.spec, case, machine.device),
        tensors.upstream(op.spec, case, machine.device) if case.direction != "fwd" else {},
    )
    pairs = [(c, b) for c in settings.contracts for b in settings.backends if op.spec.keeps(b, c)]
    works = {(c, b): work.candidate(op, case, given, c, b) for c, b in pairs}
    others = _peers(op, case, given, machine, compiling) if settings.with_peers else []
    found = machine.measure([*works.values(), *others])
    beside = {other.name: found[other.name] for other in others}
    for contract in settings.contracts:
        truth: bits.Expected | None = None
        for backend in (b for c, b in pairs if c == contract):
            sample = found[works[contract, backend].name]
            if isinstance(sample, Failure):
                yield results.skipped(case, width(op.spec), sample.reason, contract, backend)
                continue
            if truth is None:
                truth = bits.expected(op, case, given, contract, machine.free_bytes())
            yield _line(
                op,
                case,
                contract,
                backend,
                sample,
                beside,
                bits.compare(op, case, sample.outputs, truth),
                machine,
                environment,
                given,
            )


def _peers(op: Operator, case: Case, given: work.Given, machine: Machine, compiling: _Budget) -> list[work.Work]:
    """Autograd of a peer passes gradients in the model's dtypes, so the FP32 form is compared with the copy alone."""
    found = []
    if case.grads == "model":
        for other in peers.of(op.name):
            made = work.peer(op, case, given, other)
            found.append(compiling.charge(made) if other.compiled else made)
    return [*found, work.device_copy(peers.COPY, machine.device, traffic(op.spec, case))]


def _line(
    op: Operator,
    case: Case,
    contract: str,
    backend: str,
    sample: Sample,
    beside: dict[str, Sample | Failure],
    verdict: bits.Bits,
    machine: Machine,
    environment: Environment,
    given: work.Given,
) -> dict[str, Any]:
    plan = plan_text(op, case, contract, backend, given, sample)
    return results.measured(
        op.spec, case, contract, backend, sample, beside, (verdict.ok, verdict.scope), machine, environment, plan
    )


def plan_text(op: Operator, case: Case, contract: str, backend: str, given: work.Given, sample: Sample) -> str:
    """The launch plan of the timed direction; of the backward where both were timed."""
    scalars = list(work.default_scalars(op).values())
    if case.direction == "fwd":
        ready = op.prepare(False, list(given.inputs.values()), scalars, contract, backend)
    else:
        spec = op.spec
        forward = sample.outputs if case.direction == "fwd+bwd" else None
        saved = (
            forward[: len(spec.forward.results)]
            if forward is not None
            else op.forward(*given.inputs.values(), contract=contract, backend=backend)
        )
        dtype = gradient_dtype(spec, case)
        ready = op.prepare(True, work.backward_tensors(op, given, saved), scalars, contract, backend, dtype)
    plan = ready.choice.plan
    return "; then ".join(map(str, plan)) if isinstance(plan, tuple) else str(plan)
