"""A real model beside itself with our operators in it: what differs, where first, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from samebits.models.deepseek_v4 import known, subject
from samebits.models.deepseek_v4.causes import Causes, explain
from samebits.models.deepseek_v4.patching import patch, patched, unpatch
from samebits.models.deepseek_v4.record import Record, record, short
from samebits.models.deepseek_v4.rows import RowCheck, check_rows
from samebits.models.deepseek_v4.sites import Options, Site, call_sites
from samebits.models.deepseek_v4.subject import Subject, norms_cast_to_input
from samebits.models.difference import Difference, difference
from samebits.models.sites import Patched

TOLERANCE = {torch.bfloat16: (5e-2, 2e-2), torch.float32: (1e-4, 1e-4)}
"""(atol, rtol) of a site alone, as the operator checks take them for a reduction."""


@dataclass(frozen=True)
class Check:
    """Something that must hold whatever the machine; everything else in a comparison is a measurement."""

    name: str
    passed: bool
    detail: str = ""


@dataclass(frozen=True)
class Finding:
    """What a run showed, said as it was seen."""

    question: str
    answer: str


@dataclass(frozen=True)
class LayerComparison:
    """The unpatched model is ``theirs``, the one with our operators is ``ours``."""

    title: str
    transformers: str
    torch: str
    device: str
    contracts: dict[str, str]
    sites: dict[str, int]
    """Call sites of the patched model, and how often one run passed each."""
    chained: tuple[Difference, ...]
    """Every boundary in the order of the run; what differs at one is passed on to the next."""
    isolated: tuple[Difference, ...]
    """Each site on the inputs of the unpatched run, so that a difference is its own."""
    causes: tuple[Causes, ...]
    rows: tuple[RowCheck, ...]
    split: tuple[Difference, ...]
    """Where the model first differs between one sequence alone and the batch: ours, theirs. Empty for a batch of one."""
    findings: tuple[Finding, ...]
    checks: tuple[Check, ...]

    @property
    def first(self) -> Difference | None:
        """The first boundary, in the order of the run, that differs."""
        return next((boundary for boundary in self.chained if not boundary.same), None)

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"first": asdict(self.first) if self.first else None, "passed": self.passed}


def compare_layer(
    contracts: str | Mapping[str, str] = "published",
    *,
    batch: int = 2,
    sequence: int = 32,
    config: Mapping[str, Any] = subject.SMALL,
    backend: str | None = None,
    device: str = "cpu",
    seed: int = 0,
    rows: int = 8,
) -> LayerComparison:
    """A ``DeepseekV4ForCausalLM`` of one layer, small by default, with and without our operators, boundary by boundary.

    Args:
        contracts: as of ``samebits.patch``.
        batch, sequence: positions of the run.
        config: of ``DeepseekV4Config``; ``subject.OFFICIAL`` is one layer of the official size (26 GB while it is built).
        backend: backend of our operators, None takes the first that accepts.
        device: where both run.
        rows: how many rows are run alone for the row checks.

    Raises:
        ModuleNotFoundError, RuntimeError: transformers is missing, or has a forward we do not know.
    """
    made = subject.causal_lm(batch, sequence, seed=seed, device=device, config=config)
    return compare(made, contracts, backend=backend, rows=rows)


def compare(
    given: Subject, contracts: str | Mapping[str, str] = "published", *, backend: str | None = None, rows: int = 8
) -> LayerComparison:
    """As :func:`compare_layer`, of a subject given by hand. Its model must not be patched, and is not afterwards."""
    model = given.model
    as_loaded = _outcome(given)
    with norms_cast_to_input(model):
        theirs = record(model, given)
    with _patched(given, contracts, backend):
        ours = record(model, given)
        found = patched(model)
        again = record(model, given)
        gradients = _gradients_repeat(given)
        options = Options(found.contracts, backend)
        sites = [site for site in call_sites(model) if all(name in theirs for name in site.inputs)]
        wired = _wired(sites, ours, options)
        split = [_split("ours", given, ours)] if len(given.ids) > 1 else []
    with norms_cast_to_input(model):
        restored = _differing(record(model, given), theirs)
        if len(given.ids) > 1:
            split.append(_split("theirs", given, theirs))
    isolated, causes, far = _isolated(sites, theirs, options)
    row_checks = tuple(check for site in sites for check in check_rows(site, site.rows(theirs), options, rows))
    varying = [f"{c.module}.{c.boundary}: {c.varying} rows" for c in row_checks if c.must_hold and c.varying]
    return LayerComparison(
        title=given.title,
        transformers=known.transformers_version(),
        torch=torch.__version__,
        device=_device(given.streams.device),
        contracts=found.contracts,
        sites=found.hits,
        chained=_differences(ours, theirs),
        isolated=isolated,
        causes=causes,
        rows=row_checks,
        split=tuple(split),
        findings=_findings(given, as_loaded, ours, again, gradients),
        checks=(
            Check("every call site that the class's run passes is ours, and ran once", *_once(found, sites)),
            Check("every site returns the bits of its operator", not wired, ", ".join(wired)),
            Check("a second run of the patched model has the same bits at every site", *_repeats(sites, ours, again)),
            Check("the unpatched bits are back after the patch", not restored, ", ".join(restored)),
            Check("each site alone is within the tolerance of the class", not far, ", ".join(far)),
            Check("our operators give a row the same bits in every batch", not varying, "; ".join(varying)),
        ),
    )


def _device(device: torch.device) -> str:
    return f"{device.type} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else device.type


@contextmanager
def _patched(given: Subject, contracts: str | Mapping[str, str], backend: str | None) -> Iterator[None]:
    patch(given.model, contracts, backend=backend)
    try:
        yield
    finally:
        unpatch(given.model)


def _once(found: Patched, sites: list[Site]) -> tuple[bool, str]:
    """``sites`` are those that the class passed; a norm of the compressor, say, waits for enough tokens."""
    expected = {site.name: 1 for site in sites}
    hits = {short(name): count for name, count in found.hits.items()}
    wrong = [
        f"{name} {hits.get(name, 0)} times"
        for name in {**expected, **hits}
        if hits.get(name, 0) != expected.get(name, 0)
    ]
    return not wrong, ", ".join(wrong)


def _differences(ours: Record, theirs: Record) -> tuple[Difference, ...]:
    pairs = ((name, tensor) for name, tensor in theirs.boundaries.items() if name in ours.boundaries)
    return tuple(difference(name, ours[name], tensor) for name, tensor in pairs)


def _differing(one: Record, other: Record) -> list[str]:
    return [found.name for found in _differences(one, other) if not found.same]


def _wired(sites: list[Site], ours: Record, options: Options) -> list[str]:
    """Boundaries of the patched run that are not what the operator returns for the inputs of that run."""
    wrong = []
    with torch.no_grad():
        for site in sites:
            for name, value in zip(site.outputs, site.ours(site.rows(ours), options), strict=True):
                if not difference(name, value.view(ours[name].shape), ours[name]).same:
                    wrong.append(name)
    return wrong


def _repeats(sites: list[Site], ours: Record, again: Record) -> tuple[bool, str]:
    """Where two runs part at all, the first place must not be a site: it got the same bits and returned others."""
    differing = _differing(ours, again)
    outputs = {name for site in sites for name in site.outputs}
    bad = bool(differing) and differing[0] in outputs
    return not bad, differing[0] if bad else ""


def _isolated(
    sites: list[Site], theirs: Record, options: Options
) -> tuple[tuple[Difference, ...], tuple[Causes, ...], list[str]]:
    """Each site on the unpatched run's inputs: differences, their causes, and what is out of tolerance."""
    differences: list[Difference] = []
    causes: list[Causes] = []
    far: list[str] = []
    with torch.no_grad():
        for site in sites:
            rows = site.rows(theirs)
            expected = []
            for name, value in zip(site.outputs, site.ours(rows, options), strict=True):
                their = theirs[name].to(value.dtype)
                expected.append(their.reshape(value.shape))
                differences.append(difference(name, value.view(their.shape), their))
                atol, rtol = TOLERANCE[value.dtype]
                if not torch.allclose(value.float(), expected[-1].float(), atol=atol, rtol=rtol):
                    far.append(name)
            causes += explain(site, rows, options, tuple(expected))
    return tuple(differences), tuple(causes), far


def _split(who: str, given: Subject, whole: Record) -> Difference:
    """The first boundary at which sequence 0 alone differs from sequence 0 of the batch, and what class returned it."""
    alone = record(given.model, given.sequence(0))
    batch = len(given.ids)
    for name, tensor in alone.boundaries.items():
        same_kind = name in whole and tensor.dim() and tensor.shape[0] == 1 and whole[name].shape[0] == batch
        if same_kind:
            found = difference(f"{who}: {name} ({alone.classes[name]})", tensor, whole[name][:1])
            if not found.same:
                return found
    return Difference(f"{who}: every boundary", (), "", 0, 0)


def _gradients_repeat(given: Subject) -> str:
    """Two backward passes of the patched model: whether the gradients of the parameters that our operators fold repeat."""
    model = given.model
    names = [
        f"{n}.{p}"
        for n, m in model.named_modules()
        if hasattr(m, "samebits_parameters")
        for p, _ in m.named_parameters()
    ]
    parameters = {name: model.get_parameter(name) for name in names}
    runs = []
    for _ in range(2):
        for parameter in parameters.values():
            parameter.requires_grad_(True)
        try:
            given().float().square().mean().backward()
            runs.append({name: p.grad for name, p in parameters.items()})
        except RuntimeError as error:  # of the class's own operations; ours have their tests
            return f"not seen, the backward pass failed: {error}"
        finally:
            for parameter in parameters.values():
                parameter.requires_grad_(False)
                parameter.grad = None
    both = [(name, one, runs[1][name]) for name, one in runs[0].items()]
    pairs = [(name, one, other) for name, one, other in both if one is not None and other is not None]
    differing = [name for name, one, other in pairs if not difference(name, one, other).same]
    if differing:
        return f"no: {len(differing)} of {len(pairs)} differ, such as {differing[0]}"
    silent = [name for name, one, other in both if one is None and other is None]
    return f"yes, all {len(pairs)}" + (f"; none reaches {', '.join(silent)}" if silent else "")


def _findings(given: Subject, as_loaded: str, ours: Record, again: Record, gradients: str) -> tuple[Finding, ...]:
    with torch.no_grad():
        dtype = given.model.get_submodule("model.norm")(given.streams[:, :, 0]).dtype
    apart = _differing(ours, again)
    repeats = (
        "yes, every boundary and the logits" if not apart else f"no: first at {apart[0]} ({ours.classes[apart[0]]})"
    )
    return (
        Finding(
            "What does a norm of the class with FP32 weight return for a BF16 input?", str(dtype).removeprefix("torch.")
        ),
        Finding("Does the BF16 model run unpatched?", as_loaded),
        Finding("Does a second run of the patched model have the same bits?", repeats),
        Finding("Do two backward passes give the same gradients of the replaced parameters?", gradients),
    )


def _outcome(given: Subject) -> str:
    names: list[str] = []
    handles = [
        member.register_forward_pre_hook(lambda _, args, name=name: names.append(name))
        for name, member in given.model.named_modules()
    ]
    try:
        with torch.no_grad():
            given()
    except RuntimeError as error:
        return f"no: {names[-1]}: {error}"
    finally:
        for handle in handles:
            handle.remove()
    return "yes"
