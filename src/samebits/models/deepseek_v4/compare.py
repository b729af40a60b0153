"""One decoder layer of the real class beside itself with our operators in it: what differs, where first, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from samebits.models.deepseek_v4 import known, subject
from samebits.models.deepseek_v4.causes import Causes, of_collapse, of_norm
from samebits.models.deepseek_v4.record import boundaries
from samebits.models.deepseek_v4.replace import SITES, Replacement, replaced
from samebits.models.deepseek_v4.rows import RowCheck, check_rows
from samebits.models.deepseek_v4.subject import Subject, norms_cast_to_input
from samebits.models.difference import Difference, difference

TOLERANCE = (5e-2, 2e-2)
"""(atol, rtol) of an isolated BF16 boundary: a reduction in BF16, as the operator checks take it."""


@dataclass(frozen=True)
class Check:
    """Something that must hold whatever the machine; everything else in a comparison is a measurement."""

    name: str
    passed: bool
    detail: str = ""


@dataclass(frozen=True)
class Finding:
    """What a run of the class showed, said as it was seen."""

    question: str
    answer: str


@dataclass(frozen=True)
class LayerComparison:
    """The unpatched module is ``theirs``, the one with our operators is ``ours``."""

    title: str
    transformers: str
    torch: str
    device: str
    contracts: dict[str, str]
    chained: tuple[Difference, ...]
    """Every boundary in the order of the run; what differs at one is passed on to the next."""
    isolated: tuple[Difference, ...]
    """Each replaced module on the inputs of the unpatched run, so that a difference is its own."""
    causes: tuple[Causes, ...]
    rows: tuple[RowCheck, ...]
    split: tuple[Difference, ...]
    """Where the layer first differs between one sequence alone and the batch: ours, theirs. Empty if it was not asked."""
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
    contracts: Mapping[str, str] | None = None,
    *,
    batch: int = 2,
    sequence: int = 160,
    backend: str | None = None,
    device: str = "cpu",
    seed: int = 0,
    rows: int = 32,
) -> LayerComparison:
    """A whole ``DeepseekV4DecoderLayer`` at a small size, with and without our collapse and norms, boundary by boundary.

    Args:
        contracts: operator name to contract name; published ones where not named.
        batch, sequence: positions of the run; from 128 the attention compressor takes part.
        backend: backend of our operators, None takes the first that accepts.
        device: where both run.
        rows: how many rows are run alone for the row checks.

    Raises:
        ModuleNotFoundError, RuntimeError: transformers is missing, or has a forward we do not know.
    """
    return compare(subject.decoder_layer(batch, sequence, seed), contracts, backend=backend, device=device, rows=rows)


def compare_hyper_connection(
    contracts: Mapping[str, str] | None = None,
    *,
    hidden_size: int = 4096,
    rows: int = 32,
    backend: str | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> LayerComparison:
    """Both hyper-connections and norms at an official width; as :func:`compare_layer` otherwise."""
    subject_ = subject.hyper_connection_part(hidden_size, rows, seed)
    return compare(subject_, contracts, backend=backend, device=device, rows=rows)


def compare(
    given: Subject,
    contracts: Mapping[str, str] | None = None,
    *,
    backend: str | None = None,
    device: str = "cpu",
    rows: int = 32,
) -> LayerComparison:
    """As :func:`compare_layer`, of a subject given by hand."""
    given = given.to(torch.device(device))
    findings = _findings(given, contracts, backend)
    with norms_cast_to_input(given.module):
        theirs = boundaries(given.module, given)
        with replaced(given.module, contracts, backend=backend) as state:
            ours = boundaries(given.module, given)
            chained_calls = dict(state.calls)
        again = boundaries(given.module, given)
        isolated, causes, close = _isolated(given.module, theirs, state)
        row_checks = check_rows(given.module, given.streams, state.contracts, backend, rows)
        split = _split(given, state) if given.per_sequence and given.streams.shape[0] > 1 else ()
    chained = _differences(ours, theirs)
    restored = [d.name for d in _differences(again, theirs) if not d.same]
    missed = [name for site in SITES for name in site if chained_calls.get(name) != 1]
    touched = [d.name for d in isolated if not d.same and d.name.endswith((".post", ".comb"))]
    varying = [
        f"{c.module}.{c.boundary} given {c.given}: {c.varying} rows" for c in row_checks if c.must_hold and c.varying
    ]
    checks = (
        Check("every replaced module ran once", not missed, ", ".join(missed)),
        Check("the unpatched bits are back after the patch", not restored, ", ".join(restored)),
        Check("post and comb keep their bits", not touched, ", ".join(touched)),
        Check("each replaced module alone is within the BF16 tolerance of the class", not close, ", ".join(close)),
        Check("our operators give a row the same bits alone as in the batch", not varying, "; ".join(varying)),
    )
    return LayerComparison(
        title=given.title,
        transformers=known.transformers_version(),
        torch=torch.__version__,
        device=device,
        contracts=state.contracts,
        chained=chained,
        isolated=isolated,
        causes=causes,
        rows=row_checks,
        split=split,
        findings=findings,
        checks=checks,
    )


def _differences(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> tuple[Difference, ...]:
    return tuple(difference(name, ours[name], tensor) for name, tensor in theirs.items() if name in ours)


def _isolated(
    module: nn.Module, theirs: Mapping[str, Tensor], state: Replacement
) -> tuple[tuple[Difference, ...], tuple[Causes, ...], list[str]]:
    """Each replaced module on the unpatched run's inputs: differences, their causes, and what is out of tolerance."""
    differences: list[Difference] = []
    causes: list[Causes] = []
    far: list[str] = []
    pre: dict[str, Tensor] = {}
    with torch.no_grad(), replaced(module, state.contracts, backend=state.backend, on_collapse=pre.__setitem__):
        for collapse, norm in SITES:
            streams, x = theirs[f"{collapse}.streams"], theirs[f"{collapse}.collapsed"]
            ours = module.get_submodule(collapse)(streams)
            for part, tensor in zip(("post", "comb", "collapsed"), ours, strict=True):
                differences.append(difference(f"{collapse}.{part}", tensor, theirs[f"{collapse}.{part}"]))
            member = module.get_submodule(norm)
            y = member(x)
            differences.append(difference(norm, y, theirs[norm]))
            causes.append(of_collapse(f"{collapse}.collapsed", pre[collapse], streams, ours[2], x))
            contract = state.contracts["rmsnorm_residual"]
            causes.append(of_norm(norm, x, member, contract, y, theirs[norm]))
            for name, mine, expected in ((f"{collapse}.collapsed", ours[2], x), (norm, y, theirs[norm])):
                if not torch.allclose(mine.float(), expected.float(), atol=TOLERANCE[0], rtol=TOLERANCE[1]):
                    far.append(name)
    return tuple(differences), tuple(causes), far


def _split(given: Subject, state: Replacement) -> tuple[Difference, ...]:
    """The first boundary at which sequence 0 alone differs from sequence 0 of the batch, for ours and for theirs."""
    found = []
    alone = given.sequence(0)
    for who, patched in (("ours", True), ("theirs", False)):
        if patched:
            with replaced(given.module, state.contracts, backend=state.backend):
                whole, part = boundaries(given.module, given), boundaries(given.module, alone)
        else:
            whole, part = boundaries(given.module, given), boundaries(given.module, alone)
        batch = given.streams.shape[0]
        same = (
            difference(f"{who}: {name}", tensor, whole[name][:1])
            for name, tensor in part.items()
            if name in whole and tensor.dim() and whole[name].shape[0] == batch and tensor.shape[0] == 1
        )
        found.append(next((d for d in same if not d.same), Difference(f"{who}: every boundary", (), "", 0, 0)))
    return tuple(found)


def _findings(given: Subject, contracts: Mapping[str, str] | None, backend: str | None) -> tuple[Finding, ...]:
    """Two questions about dtypes that only a run answers."""
    name = SITES[0][1]
    output: Tensor = given.module.get_submodule(name)(given.streams[:, :, 0])
    answer = str(output.dtype).removeprefix("torch.")
    findings = [Finding("What does a norm with FP32 weight return for a BF16 input?", answer)]
    if given.per_sequence:
        findings.append(Finding("Does the BF16 layer run as loaded?", _outcome(given)))
        with replaced(given.module, contracts, backend=backend):
            findings.append(Finding("Does it with our two layer norms?", _outcome(given)))
    return tuple(findings)


def _outcome(given: Subject) -> str:
    names: list[str] = []
    handles = [
        member.register_forward_pre_hook(lambda _, args, name=name: names.append(name))
        for name, member in given.module.named_modules()
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
