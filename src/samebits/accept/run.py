"""Acceptance of a provider: every case, every boundary in both directions, every row alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from samebits.accept import golden
from samebits.accept.cases import Case, chosen
from samebits.accept.examine import CaseResult, examine
from samebits.accept.load import load
from samebits.accept.provider import Provider
from samebits.accept.reference import ReferenceProvider
from samebits.accept.report import Report
from samebits.accept.trace import Trace
from samebits.verify.report import environment
from samebits.verify.subject import UsageError, first_line

MODELS = ("deepseek-v4",)
Progress = Callable[[int, int, str], None]


def accept(
    model: str = "deepseek-v4",
    provider: str | Provider | None = None,
    device: str | torch.device | None = None,
    cases: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> Report:
    """Hold a provider of a layer's operators to the bytes of the oracle, on the same device.

    Args:
        model: ``"deepseek-v4"``, its hyper-connection block.
        provider: ``"cuda"``, ``"triton"``, ``"operators"``, ``"reference"``, ``"stub"``, ``"module:Class"``,
            ``"path/file.py:Class"`` or an object; by default the best of ours that runs here.
        device: by default the GPU if there is one.
        cases: names of the cases to run, by default all of ``samebits.accept.cases.CASES``.
        progress: called with (done, total, what) before each case.

    Raises:
        UsageError (a ValueError): no such model, provider, device or case, or the provider does not run on the device.
    """
    if model not in MODELS:
        raise UsageError(f"no model named {model!r}; choose one of {', '.join(MODELS)}")
    place = _device(device)
    try:
        todo = chosen(cases)
    except ValueError as error:
        raise UsageError(str(error)) from error
    candidate = load(provider, place)
    declared = candidate.capabilities()
    if place.type not in declared["devices"]:
        raise UsageError(f"provider {candidate.name} runs on {', '.join(declared['devices'])}, not on {place.type}")
    forms = _forms(candidate)
    found: list[CaseResult] = []
    traces: dict[str, Trace] = {}
    with torch.no_grad():
        for done, case in enumerate(todo):
            if progress is not None:
                progress(done, len(todo), case.name)
            traces[case.name], results = _case(case, forms, place)
            found += results
    return Report(
        model=model,
        provider=candidate.name,
        capabilities=dict(declared),
        provenance=dict(candidate.provenance()),
        device=str(place),
        environment=environment(place),
        cases=tuple(found),
        golden=golden.judge(traces, place),
        oracle=traces,
    )


def _case(case: Case, forms: Iterable[Provider], device: torch.device) -> tuple[Trace, list[CaseResult]]:
    workload = case.workload(device)
    oracle = workload.run(ReferenceProvider())
    if case.operators is not None:  # single operators have one form
        forms = list(forms)[:1]
    return oracle, [examine(case, form, workload, oracle) for form in forms]


def _forms(provider: Any) -> tuple[Provider, ...]:
    """A provider that can run a block in several ways is held to the bytes in each of them."""
    made = provider.forms() if hasattr(provider, "forms") else (provider,)
    if not made:
        raise UsageError(f"provider {provider.name} offers no form")
    return tuple(made)


def _device(asked: str | torch.device | None) -> torch.device:
    available = torch.cuda.is_available()
    if asked is None:
        asked = "cuda" if available else "cpu"
    try:
        device = torch.device(asked)
    except RuntimeError as error:
        raise UsageError(f"no device {asked!r}: {first_line(error)}") from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device {asked!r}: acceptance runs on cpu or cuda")
    if device.type == "cuda" and not available:
        raise UsageError("device 'cuda': torch finds no CUDA device here")
    # Tensors name their device with an index, and boundaries are compared with them.
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device
