"""The comparison: our operator, then every declared peer, then every mode of it in a process of its own."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from samebits import environment
from samebits.bench.peers import Peer
from samebits.compare import entries
from samebits.compare.process import in_mode, why_not
from samebits.compare.request import Request

KIND, SCHEMA = "samebits.compare", 1
OURS_FAILED = "our operator failed, so there is nothing to compare with"


def run(request: Request, begin: Callable[[str], None] = lambda name: None) -> dict[str, Any]:
    """The report, plain data for ``json.dumps``. ``begin`` hears the name of each contestant when its turn comes."""
    peers = request.peers()
    begin(entries.OURS)
    bench = entries.Bench(request)
    if request.latency:
        bench.prepare_times()
    mine = bench.our_entry()
    found = [mine]
    present: list[tuple[Peer, dict[str, Any]]] = []
    broken = None if mine["status"] == "compared" else ("left out", OURS_FAILED)
    for peer in peers:
        refusal = why_not(peer, request) or broken
        if refusal is not None:
            found.append(entries.not_compared(peer, None, *refusal))
            continue
        begin(peer.name)
        entry = bench.entry(peer)
        found.append(entry)
        if entry["status"] == "compared":
            present.append((peer, entry))
    if request.latency and broken is None:
        begin("times")
        times = bench.times([peer for peer, _ in present])
        mine["latency"] = times[""]
        for peer, entry in present:
            entry["latency"] = times[peer.name]
    mine["digests"] = bench.digests() if broken is None else None
    for peer, mode in [(one, mode) for one in peers for mode in one.modes]:
        if broken is not None:
            found.append(entries.not_compared(peer, mode, *broken))
            continue
        begin(f"{peer.name}, {mode.name}")
        found.append(in_mode(peer, mode, request, mine["digests"]))
    return report(request, found)


def report(request: Request, found: list[dict[str, Any]]) -> dict[str, Any]:
    """Of entries, ours first; plain data."""
    broken = failures(found)
    made = {
        "kind": KIND,
        "schema": SCHEMA,
        **{name: getattr(request, name) for name in ("op", "contract", "backend", "device", "sizes", "peers_file")},
        "scale": dataclasses.asdict(request.scale),
        "environment": environment.collect().to_json(),
        "passed": not broken,
        "failures": broken,
        "contestants": found,
    }
    plain: dict[str, Any] = _plain(made)
    return plain


def failures(found: list[dict[str, Any]]) -> list[str]:
    """Our broken promises, peers that raised, and a comparison without a peer. What a peer's verdicts are is no failure."""
    mine, others = found[0], found[1:]
    told = []
    if mine["status"] != "compared":
        told.append(f"{mine['name']} {mine['status']}: {mine['reason']}")
    else:
        verdict = mine["invariance"]
        if not verdict["batch_invariant"]:
            told.append(f"{mine['name']} is not batch-invariant: {verdict['first_failure']}")
        if not verdict["repeatable"]:
            told.append(f"{mine['name']} does not repeat: {verdict['first_failure']}")
        for name, error in mine["accuracy"].items():
            if not error["tolerance_used"] <= 1:
                told.append(
                    f"{mine['name']}: the error of {name} is {error['tolerance_used']:.3g} times what is allowed"
                )
        for entry in mine["latency"]:
            if "failed" in entry:
                told.append(f"{mine['name']}: {entry['direction']} of {entry['rows']} rows: {entry['failed']}")
    told += [f"{other['name']} failed: {other['reason']}" for other in others if other["status"] == "failed"]
    told += [f"{mine['name']} has other bits under {o['mode']}" for o in others if o.get("ours_keeps_bits") is False]
    if not any(other["status"] == "compared" for other in others):
        told.append("no peer could be compared")
    return list(dict.fromkeys(told))


def _plain(value: Any) -> Any:
    """JSON has no number for NaN and infinity."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
