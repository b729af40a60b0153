"""``samebits compare attention``: every peer on the same inputs; the report has the form of every other operator's.

The words of that form mean here: ``all_rows``, single queries with all keys; ``full_vs_sub_batches``, heads, batch entries and
documents by themselves; ``batch_size_sweep``, other numbers of queries, and their order reversed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samebits.bench.case import DIRECTIONS, Case
from samebits.bench.timing import Machine, Sample
from samebits.bench.work import Work
from samebits.compare import accuracy, entries, latency
from samebits.compare.bitwise import Equality, Tally
from samebits.compare.contestant import Found
from samebits.compare.invariance import Verdict
from samebits.compare.request import Request, declared_in
from samebits.compare.run import OURS_FAILED, report
from samebits.compare.scale import Scale
from samebits.sequence_ops.attention import golden, measure
from samebits.sequence_ops.attention.checking import Variation, variations
from samebits.sequence_ops.attention.peers import DETERMINISTIC, PEERS, Attention, unavailable
from samebits.sequence_ops.attention.spec import SPEC
from samebits.sequence_ops.attention.subject import Candidate, Inputs, Kind, Ours, Theirs, draw
from samebits.sequence_ops.attention.targets import SHAPE
from samebits.verify.tolerance import of_largest

SEEDS = (3, 4)
SCALES = {
    ("cuda", False): Scale(alone=(64, 264, 925), full=925, sweep=65, judged=264, timed=(1, 64, 925, 3160), seeds=SEEDS),
    ("cuda", True): Scale(alone=(64, 264), full=264, sweep=65, judged=264, timed=(1, 925), seeds=(3,), seconds=0.2),
    ("cpu", False): Scale(alone=(9, 40), full=40, sweep=17, judged=40, timed=(1, 40), seeds=SEEDS, seconds=0.2),
    ("cpu", True): Scale(alone=(5, 9), full=9, sweep=7, judged=9, timed=(5,), seeds=(3,), repeats=2, seconds=0.02),
}
"""Queries, and as many keys. ``alone``: where rows are followed and compared with ours; ``judged``: where the error is taken."""
_CPU_SHAPE = {"H": 2, "D": 64}


def scale(device: str, quick: bool) -> Scale:
    return SCALES[device, quick]


def sizes(given: Mapping[str, int], device: str) -> dict[str, int]:
    """H, H_kv and D. ValueError: another axis, or what is not accepted."""
    known = dict(SHAPE) if device == "cuda" else dict(_CPU_SHAPE)
    for axis in given:
        if axis not in (*known, "H_kv"):
            raise ValueError(f"--size {axis}: {SPEC.name} can be sized along H, H_kv and D; rows are its length")
    chosen = known | dict(given)
    chosen.setdefault("H_kv", chosen["H"])
    if chosen["D"] not in (64, 128) or chosen["H_kv"] < 1 or chosen["H"] < 1 or chosen["H"] % chosen["H_kv"]:
        raise ValueError(f"sizes {chosen}: D must be 64 or 128, H a multiple of H_kv")
    return {axis: chosen[axis] for axis in ("H", "H_kv", "D")}


def backend(contract: str, asked: str | None, device: torch.device, shape: Mapping[str, int]) -> str:
    """What runs by default where none is asked for. UnsupportedError: the asked one cannot."""
    given = draw(_kind(shape), (1, 65, 65), torch.bfloat16, 0, device)
    return Ours(contract, asked).decision(given, False)[0]


def run(request: Request, begin: Callable[[str], None] = lambda name: None) -> dict[str, Any]:
    """The report, plain data for ``json.dumps``. ``begin`` hears the name of each contestant when its turn comes."""
    device = torch.device(request.device)
    if device.index is not None:
        torch.cuda.set_device(device)
    machine = latency.machine_for(device, request.scale.seconds) if request.latency else None
    others = _others(request)
    ours = Ours(request.contract, request.backend, entries.OURS)
    begin(entries.OURS)
    bench = _Bench(request, device, ours)
    mine = entries.guarded(entries.head(entries.OURS, None), lambda entry: bench.judge(entry, ours))
    found, present = [mine], []
    for name, function in others.items():
        entry = entries.head(name, None) | {"peer": name}
        absent = unavailable(name, device.type) if request.peers_file is None else None
        if absent is not None or mine["status"] != "compared":
            status, reason = ("unavailable", absent) if absent is not None else ("left out", OURS_FAILED)
            found.append(entry | {"status": status, "reason": reason, "process": None})
            continue
        begin(name)
        theirs = Deterministic(function, name) if name == DETERMINISTIC else Theirs(function, name)
        found.append(entries.guarded(entry, lambda entry: bench.compare(entry, theirs)))  # noqa: B023
        present += [name] if found[-1]["status"] == "compared" else []
    if machine is not None and mine["status"] == "compared":
        begin("times")
        for name, timed in bench.times({name: others[name] for name in present}, machine).items():
            next(e for e in found if e["name"] == name)["latency"] = timed
    return report(request, found)


class Deterministic(Theirs):
    """Its backward under ``torch.use_deterministic_algorithms``."""

    def backward(self, given: Inputs) -> dict[str, Tensor]:
        return measure.deterministically(lambda: super(Deterministic, self).backward(given))


def _others(request: Request) -> dict[str, Attention]:
    if request.peers_file is None:
        return {**PEERS}
    return {peer.name: _first(peer.run) for peer in declared_in(Path(request.peers_file))}


def _first(function: Callable[..., Any]) -> Attention:
    def out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = function(q, k, v)
        first: Tensor = found if isinstance(found, Tensor) else found[0]
        return first

    return out


def _kind(shape: Mapping[str, int]) -> Kind:
    return Kind(False, shape["D"], shape["H"], shape["H_kv"])


class _Bench:
    """The inputs, and ours on them."""

    def __init__(self, request: Request, device: torch.device, ours: Ours) -> None:
        self.request, self.device, self.ours = request, device, ours
        self._known: dict[int, Found] = {}

    def given(self, length: int, seed: int) -> Inputs:
        return draw(_kind(self.request.sizes), (2, length, length), torch.bfloat16, seed, self.device)

    def judge(self, entry: dict[str, Any], contestant: Candidate) -> None:
        """Invariance and error."""
        scale = self.request.scale
        verdict = Verdict(Tally(), Tally(), Tally(), Tally(), Tally())
        for seed in scale.seeds:
            for length in scale.alone:
                _follow(verdict, contestant, self.given(length, seed), scale.repeats)
        entry["invariance"] = verdict.to_json()
        given = self.given(scale.judged, scale.seeds[0])
        values = _run(contestant, given).values
        exact = _golden(given)
        errors = {n: accuracy.error_of(t, exact[n], of_largest(exact[n], t.dtype)) for n, t in values.items()}
        entry["accuracy"] = accuracy.to_json(errors)

    def compare(self, entry: dict[str, Any], contestant: Candidate) -> None:
        equality = Equality()
        for length in dict.fromkeys((1, *self.request.scale.alone)):
            given = self.given(length, self.request.scale.seeds[0])
            if length not in self._known:
                self._known[length] = _run(self.ours, given)
            equality.compare(length, self._known[length], _run(contestant, given))
        entry["equality"] = equality.to_json()
        self.judge(entry, contestant)

    def times(self, others: Mapping[str, Attention], machine: Machine) -> dict[str, list[dict[str, Any]]]:
        """By contestant; all of a measurement run in the same rounds."""
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in (entries.OURS, *others)}
        shape = self.request.sizes
        for length in self.request.scale.timed:
            for direction in DIRECTIONS:
                case = Case(SPEC.name, direction, length, tuple(shape.items()))
                given = measure.drawn(case, self.device)
                works = {entries.OURS: measure.ours_of(case, given, self.ours)}
                works |= {name: measure.peer_of(case, given, name, function) for name, function in others.items()}
                for name, entry in _timed(works, machine).items():
                    found[name].append({"direction": direction, "rows": length, **entry})
                machine.release()
        return found


def _timed(works: Mapping[str, Work], machine: Machine) -> dict[str, dict[str, Any]]:
    samples = machine.measure(list(works.values()))
    mine = samples[works[entries.OURS].name]
    order = [made.name for made in works.values() if isinstance(samples[made.name], Sample)]
    return {name: latency.entry(samples[made.name], mine, order, machine.device) for name, made in works.items()}


def _run(contestant: Candidate, given: Inputs) -> Found:
    """``out`` and the gradients behind it; lse is compared by nobody, since few give it."""
    values = {"out": contestant.forward(given)["out"]}
    return Found(values | {f"grad_{name}": grad for name, grad in contestant.backward(given).items()})


def _golden(given: Inputs) -> dict[str, Tensor]:
    scale = given.kind.head_dim**-0.5
    out, _ = golden.forward(given.q, given.k, given.v, False, scale)
    grads = golden.backward(given.q, given.k, given.v, given.grad_out, False, scale)
    return {"out": out, **{f"grad_{name}": grad for name, grad in zip("qkv", grads, strict=True)}}


def _follow(verdict: Verdict, contestant: Candidate, given: Inputs, repeats: int) -> None:
    base = _run(contestant, given).values
    length = given.q.shape[1]
    for count in range(2, repeats + 1):
        _compare(
            verdict.rows_repeat, f"run 1 against run {count}, {length} queries", base, _run(contestant, given).values
        )
    for variation in (v for v in variations(given) if v.axis != "repeat"):
        if contestant.takes(variation.given) is not None:
            continue
        here = _part(_run(contestant, variation.given).values, variation, whole=False)
        label = f"{variation.axis}, {variation.label}, {length} queries"
        _compare(_tally(verdict, variation), label, _part(base, variation, whole=True), here)


def _part(values: Mapping[str, Tensor], variation: Variation, whole: bool) -> dict[str, Tensor]:
    place = variation.whole if whole else variation.here
    found = {name: place.of(name.removeprefix("grad_"), value) for name, value in values.items()}
    return {name: value for name, value in found.items() if value is not None}


def _tally(verdict: Verdict, variation: Variation) -> Tally:
    if variation.axis != "queries":
        return verdict.full_vs_sub_batches
    return verdict.all_rows if variation.given.q.shape[1] == 1 else verdict.batch_size_sweep


def _compare(tally: Tally, label: str, expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    for name, value in expected.items():
        if name in found:
            tally.compare(label, name, value, found[name])
        else:
            tally.fail(f"{name}, {label}: only one of the two has it")
