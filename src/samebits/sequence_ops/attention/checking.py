"""``samebits check attention``: what becomes of a query's row when the queries, heads, batch and documents around it change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from samebits import dispatch
from samebits.checks import dtype_name
from samebits.sequence_ops.attention import golden
from samebits.sequence_ops.attention.contracts import DTYPES as ACCEPTED
from samebits.sequence_ops.attention.spec import SPEC
from samebits.sequence_ops.attention.subject import MORE_KEYS, Candidate, Inputs, Ours, Theirs, draw, kinds
from samebits.verify.questions import Comparisons, Examined, Judged, Questions, results_of
from samebits.verify.report import CheckResult
from samebits.verify.setup import Setup
from samebits.verify.subject import NotRun, UsageError, first_line
from samebits.verify.tolerance import of_largest

AXES = ("repeat", "queries", "heads", "batch", "documents", "plan", "autograd")
FEW = (1, 7, 17, 64, 65)
"""Numbers of queries beside the whole."""


def examined(
    setup: Setup, function: Callable[..., Any] | None, title: str, only: tuple[str, ...], forward_only: bool
) -> Examined:
    """``function``: somebody's attention to judge in place of ours. UsageError: it cannot be set up as asked."""
    sizes = dict(setup.sizes or {})
    dtype = setup.dtype or torch.bfloat16
    if dtype_name(dtype) not in ACCEPTED:
        raise UsageError(f"{SPEC.name} takes {' or '.join(ACCEPTED)}, not {dtype_name(dtype)}")
    chosen = kinds(sizes)
    queries = sizes.get("S_q", setup.rows)
    lengths = (sizes.get("B", 2), queries, sizes.get("S_k", queries + MORE_KEYS))
    if min(lengths) < 1:
        raise UsageError(f"{SPEC.name}: B, S_q and S_k must be at least 1 for a check, not {lengths}")
    ours = Ours(SPEC.contract(setup.contract).name, setup.backend)
    given = tuple(draw(kind, lengths, dtype, setup.seed, setup.device) for kind in chosen)
    backend = ours.decision(given[0], False)[0]
    candidate: Candidate = ours if function is None else Theirs(function, title)
    claimed = ours if function is None or setup.contract is not None else None
    questions = SequenceQuestions(candidate, claimed, given, only, forward_only, setup.command())
    options = {
        "contract": ours.contract,
        "backend": backend,
        "dtype": dtype_name(dtype),
        "sizes": dict(zip(("B", "S_q", "S_k"), lengths, strict=True)),
        "kinds": [kind.title for kind in chosen],
    }
    note = "sequence_ops/attention/golden.py (FP64)"
    return Examined(candidate.title if function is None else f"{title} as {SPEC.name}", note, options, questions)


# --- what is varied ---------------------------------------------------------------------------------------------------


def _all() -> slice:
    return slice(None)


@dataclass(frozen=True)
class Place:
    """Part of the results of a call."""

    batch: slice = field(default_factory=_all)
    queries: slice | Tensor = field(default_factory=_all)
    heads: slice = field(default_factory=_all)
    keys: slice | None = field(default_factory=_all)
    """None: the gradients of keys and values are sums over queries that are not here, so nothing is said of them."""
    kv_heads: slice = field(default_factory=_all)

    def of(self, name: str, tensor: Tensor) -> Tensor | None:
        if name == "lse":
            return tensor[self.batch][:, self.heads][:, :, self.queries]
        if name in ("out", "q"):
            return tensor[self.batch][:, self.queries][:, :, self.heads]
        return None if self.keys is None else tensor[self.batch][:, self.keys][:, :, self.kv_heads]


@dataclass(frozen=True)
class Variation:
    """Other inputs, part of whose results must be a part of those of the whole."""

    axis: str
    label: str
    given: Inputs
    whole: Place = field(default_factory=Place)
    here: Place = field(default_factory=Place)


def variations(given: Inputs) -> Iterator[Variation]:
    for run in (2, 3):
        yield Variation("repeat", f"run {run} vs run 1", given)
    yield from _queries(given)
    yield from _heads(given)
    yield from _batches(given)
    yield from _documents(given)


def _queries(given: Inputs) -> Iterator[Variation]:
    """The last ones see what they saw; a single one may go with the keys that it sees, as in a decode step."""
    count, keys = given.q.shape[1], given.k.shape[1]
    for few in (n for n in FEW if n < count):
        at = slice(count - few, count)
        yield Variation(
            "queries", f"the last {few} of {count}", _rows(given, at), Place(queries=at, keys=None), NO_KEYS
        )
    some = sorted({0, 1, count // 2, count - 1} & set(range(count)))
    if not given.kind.causal:
        for i in some:
            at = slice(i, i + 1)
            yield Variation("queries", f"query {i} alone", _rows(given, at), Place(queries=at, keys=None), NO_KEYS)
        back = torch.arange(count - 1, -1, -1, device=given.q.device)
        yield Variation("queries", "in reverse order", _rows(given, back), Place(queries=back, keys=None), NO_KEYS)
        return
    for i in some:
        seen = keys - count + i + 1
        if seen > 0:
            at = slice(i, i + 1)
            step = replace(_rows(given, at), k=given.k[:, :seen], v=given.v[:, :seen])
            yield Variation("queries", f"query {i} with the keys it sees", step, Place(queries=at, keys=None), NO_KEYS)


NO_KEYS = Place(keys=None)


def _rows(given: Inputs, at: slice | Tensor) -> Inputs:
    return replace(given, q=given.q[:, at], grad_out=given.grad_out[:, at])


def _heads(given: Inputs) -> Iterator[Variation]:
    kind = given.kind
    group = kind.heads // kind.kv_heads
    for head in sorted({0, kind.kv_heads - 1}) if kind.kv_heads > 1 else ():
        heads, own = slice(head * group, (head + 1) * group), slice(head, head + 1)
        yield Variation(
            "heads", f"key head {head} alone", _of_heads(given, heads, own), Place(heads=heads, kv_heads=own)
        )
    if group > 1:
        last, own = slice(kind.heads - 1, kind.heads), slice(kind.kv_heads - 1, kind.kv_heads)
        one = _of_heads(given, last, own)
        yield Variation("heads", "one query head of its group", one, Place(heads=last, keys=None), NO_KEYS)


def _of_heads(given: Inputs, heads: slice, own: slice) -> Inputs:
    q, grad_out = given.q[:, :, heads], given.grad_out[:, :, heads]
    kind = replace(given.kind, heads=q.shape[2], kv_heads=len(range(*own.indices(given.k.shape[2]))))
    return replace(given, kind=kind, q=q, k=given.k[:, :, own], v=given.v[:, :, own], grad_out=grad_out)


def _batches(given: Inputs) -> Iterator[Variation]:
    count = given.q.shape[0]
    for entry in range(count) if count > 1 else ():
        at = slice(entry, entry + 1)
        yield Variation("batch", f"entry {entry} of {count} alone", _each(given, lambda t: t[at]), Place(batch=at))  # noqa: B023
    behind = _each(given, lambda t: torch.cat([_wild(t[:1]), t]))
    yield Variation(
        "batch", f"behind an entry of wild values vs {count} entries", behind, here=Place(batch=slice(1, None))
    )


def _documents(given: Inputs) -> Iterator[Variation]:
    """The first sequence, packed between others that hold wild values, and an empty one; in front of them; and alone."""
    queries, keys, device = given.q.shape[1], given.k.shape[1], given.q.device
    first = _each(given, lambda t: t[:1])
    for label, before in (
        ("behind two", ((5, 3), (0, 2))),
        ("in front", ()),
        ("behind one that sees no key", ((4, 0),)),
    ):
        lengths = (*before, (queries, keys), (3, 6))
        start_q, start_k = (sum(pair[i] for pair in before) for i in (0, 1))
        ends = torch.tensor([(0, 0), *lengths]).cumsum(0)
        packing = {name: ends[:, i].contiguous().to(device) for i, name in enumerate(("cu_seqlens", "cu_seqlens_k"))}
        packed = replace(
            given,
            q=_among(first.q, start_q, 3),
            grad_out=_among(first.grad_out, start_q, 3),
            k=_among(first.k, start_k, 6),
            v=_among(first.v, start_k, 6),
            packing=packing,
        )
        own = Place(queries=slice(start_q, start_q + queries), keys=slice(start_k, start_k + keys))
        yield Variation("documents", f"{label} vs a batch", packed, Place(batch=slice(0, 1)), own)


def _among(tensor: Tensor, before: int, behind: int) -> Tensor:
    """(1, S, H, D) between positions with wild values, some of them no numbers."""
    wild = _wild(tensor[:, :1]).expand(-1, before + behind, -1, -1)
    return torch.cat([wild[:, :before], tensor, wild[:, before:]], 1)


def _wild(tensor: Tensor) -> Tensor:
    wild = tensor * 100
    wild[..., 0] = torch.nan
    return wild


def _each(given: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    q, k, v, grad_out = (change(tensor) for tensor in (given.q, given.k, given.v, given.grad_out))
    return replace(given, q=q, k=k, v=v, grad_out=grad_out)


# --- the answers ------------------------------------------------------------------------------------------------------


class SequenceQuestions(Questions):
    """``claimed``: the contract whose bits the candidate gives, or None."""

    def __init__(
        self,
        candidate: Candidate,
        claimed: Ours | None,
        given: tuple[Inputs, ...],
        only: tuple[str, ...],
        forward_only: bool,
        command: list[str],
    ) -> None:
        super().__init__(AXES, only, forward_only, command)
        self.candidate, self.claimed = candidate, claimed
        self.left_out = [f"{g.kind.title}: left out, {why}" for g in given if (why := candidate.takes(g))]
        self.given = tuple(g for g in given if candidate.takes(g) is None)

    def _run(self, gradient: bool) -> Callable[[Inputs], dict[str, Tensor]]:
        return self.candidate.backward if gradient else self.candidate.forward

    def accuracy(self, gradient: bool) -> CheckResult:
        found = Judged(self.reproduce(gradient)("accuracy"))
        for given in self._some():
            values = results_of(lambda: self._run(gradient)(given))  # noqa: B023
            exact = _golden(given, gradient)
            if not gradient and "lse" not in values:
                del exact["lse"]  # somebody's function may keep it to itself
            limits = {name: of_largest(exact[name], t.dtype) for name, t in values.items() if name in exact}
            found.judge(values, exact, limits.__getitem__, given.kind.title)
        return found.result("gradient_accuracy" if gradient else "forward_accuracy")

    def _some(self) -> tuple[Inputs, ...]:
        if not self.given:
            raise NotRun(f"nothing can be asked: {'; '.join(self.left_out)}")
        return self.given

    def _comparisons(self, gradient: bool) -> Comparisons:
        return Comparisons(self._some()[0].q.is_cuda, self.reproduce(gradient))

    def invariance(self, gradient: bool) -> CheckResult:
        found = self._comparisons(gradient)
        left_out = dict.fromkeys(self.left_out)
        for given in self._some():
            base = results_of(lambda: self._run(gradient)(given))  # noqa: B023
            for variation in (v for v in variations(given) if v.axis in self.axes):
                why = self.candidate.takes(variation.given)
                if why is None:
                    self._compare(found, variation, base, gradient)
                else:
                    left_out[f"{variation.axis}: left out, {why}"] = None
            if isinstance(self.candidate, Ours):
                if "plan" in self.axes:
                    self._plans(found, self.candidate, given, gradient)
                if gradient and "autograd" in self.axes:
                    implicit = self.candidate.autograd(given)
                    label = f"{given.kind.title}: autograd vs the explicit backward"
                    for name, value in base.items():
                        found.compare("autograd", label, name, implicit[name], value)
        return found.result("gradient_invariance" if gradient else "forward_invariance", list(left_out))

    def _compare(self, found: Comparisons, variation: Variation, base: dict[str, Tensor], gradient: bool) -> None:
        label = f"{variation.given.kind.title}: {variation.label}"
        try:
            results = self._run(gradient)(variation.given)
            pairs = [(n, variation.here.of(n, results[n]), variation.whole.of(n, value)) for n, value in base.items()]
        except Exception as error:
            what = f"raised {type(error).__name__}: {first_line(error)}"
            found.broke(variation.axis, label, ", ".join(base), what, {})
            return
        for name, here, whole in pairs:
            if here is not None and whole is not None:
                found.compare(variation.axis, label, name, here, whole)

    def _plans(self, found: Comparisons, ours: Ours, given: Inputs, gradient: bool) -> None:
        for rows in sorted({1, given.q.shape[1]}):
            part = _rows(given, slice(given.q.shape[1] - rows, None))
            count = ours.decision(part, gradient)[1]
            first = self._run(gradient)(part) if count > 1 else {}
            for index in range(1, count):
                with dispatch.force_plan(index):
                    other = self._run(gradient)(part)
                label = f"{given.kind.title}: launch plan 0 vs {index} of {count} with {rows} queries"
                for name, value in first.items():
                    found.compare("plan", label, name, value, other[name])

    def reference_bits(self) -> CheckResult:
        name = "reference_bits"
        if self.claimed is None:
            return CheckResult(
                name, "n/a", f"the candidate claims no contract (--contract NAME with {SPEC.name} claims one)"
            )
        mine = isinstance(self.candidate, Ours)
        if mine and all(self.claimed.decision(given, False)[0] == "reference" for given in self._some()):
            return CheckResult(
                name, "n/a", "the candidate is the reference: it defines the bits, accuracy and golden digests judge it"
            )
        defines = Ours(self.claimed.contract, "reference")
        found = self._comparisons(True)
        for given in self._some():
            few = _rows(given, slice(-min(17, given.q.shape[1]), None))
            for gradient in (False,) if self.forward_only else (False, True):
                for part in (given, few):
                    self._against(found, defines, part, gradient)
        return found.result(name, self.left_out)

    def _against(self, found: Comparisons, defines: Ours, given: Inputs, gradient: bool) -> None:
        ours = results_of(lambda: self._run(gradient)(given))
        theirs = defines.backward(given) if gradient else defines.forward(given)
        what = "gradient" if gradient else "forward"
        label = f"{given.kind.title}: {what} of {given.q.shape[1]} queries, reference vs candidate"
        for name, value in theirs.items():
            if name in ours:
                found.compare("reference", label, name, value, ours[name])
            elif name != "lse":
                found.broke("reference", label, name, "the candidate gives none", {})


def _golden(given: Inputs, gradient: bool) -> dict[str, Tensor]:
    tensors, causal, scale = (given.q, given.k, given.v), given.kind.causal, given.kind.head_dim**-0.5
    if gradient:
        return dict(zip("qkv", golden.backward(*tensors, given.grad_out, causal, scale), strict=True))
    return dict(zip(("out", "lse"), golden.forward(*tensors, causal, scale), strict=True))
