"""From recorded results to what the page shows: plain rows and verdicts, no HTML."""

from __future__ import annotations

from dataclasses import dataclass, field

from samebits.bench import targets
from samebits.environment import ABSENT
from samebits.report import audits, checks, models, speeds
from samebits.report.load import Recorded
from samebits.report.parts import Group, Table, Tile, good

COMMANDS = {
    "checks": "samebits check OPERATOR --json check.json",
    "audit": "samebits audit --json audit.json",
    "models": "make demo",
    "bench": "samebits bench OPERATOR --out OPERATOR.jsonl  (needs a GPU)",
}
_HARDWARE = ("gpu", "arch", "driver", "cuda")


@dataclass(frozen=True)
class Page:
    environment: dict[str, str]
    """Of the machine that writes the page."""
    tiles: tuple[Tile, ...]
    checks: tuple[Table, ...] = ()
    failure: tuple[Table, ...] = ()
    """Empty: no example of a failure was given."""
    failure_lead: str = ""
    audit: tuple[Table, ...] = ()
    overview: tuple[Table, ...] = ()
    models: tuple[Group, ...] = ()
    bench: tuple[Table, ...] = ()
    bench_note: str = ""
    """Where benchmark lines of another run come from."""
    times: tuple[Table, ...] = ()
    run: frozenset[str] = frozenset()
    """The sections that were run; every other one is shown as missing."""
    commands: dict[str, str] = field(default_factory=lambda: COMMANDS)


def page(recorded: Recorded, environment: dict[str, str]) -> Page:
    bench = recorded.bench or ()
    example = recorded.example
    return Page(
        environment={name: _shown(name, value) for name, value in environment.items()},
        tiles=(_check_tile(recorded), _audit_tile(recorded), _model_tile(recorded), _bench_tile(recorded)),
        checks=tuple(checks.tables(recorded.checks or ())),
        failure=checks.failing_example(example) if example else (),
        failure_lead=_failure_lead(example["candidate"], checks.varies(example)) if example else "",
        audit=tuple(audits.tables(recorded.audit)) if recorded.audit else (),
        overview=(models.overview(recorded.models),) if recorded.models else (),
        models=tuple(models.group(model) for model in recorded.models or ()),
        bench=(*speeds.measured_on(bench), *speeds.judged(bench)),
        bench_note=recorded.bench_note,
        times=tuple(speeds.times(bench)),
        run=frozenset(name for name in ("checks", "audit", "models", "bench") if getattr(recorded, name) is not None),
    )


def _shown(name: str, value: str) -> str:
    """Short forms: a missing GPU is not something to install, and 12 digits name a commit."""
    if name == "commit":
        commit, mark, state = value.partition("+")
        return commit[:12] + mark + state if len(commit) == 40 else value
    return "none" if name in _HARDWARE and value == ABSENT else value


def _failure_lead(candidate: str, varies: bool) -> str:
    promise = f"{candidate} never promised batch invariance, so nothing here counts as failed."
    if varies:
        return f"The same checks on a library operator whose rows depend on what else is in the batch. {promise}"
    return f"{promise} On this machine its bits did not vary, which proves nothing about others."


def _check_tile(recorded: Recorded) -> Tile:
    if recorded.checks is None:
        return Tile("Checks", "not run", COMMANDS["checks"], "none", "checks")
    passed = sum(bool(report["passed"]) for report in recorded.checks)
    total = len(recorded.checks)
    compared = sum(check["comparisons"] for report in recorded.checks for check in report["checks"])
    detail = f"candidates passed; {compared:,} comparisons"
    return Tile("Checks", f"{passed} of {total}", detail, good(passed == total), "checks")


def _audit_tile(recorded: Recorded) -> Tile:
    if recorded.audit is None:
        return Tile("Audit", "not run", COMMANDS["audit"], "none", "audit")
    reports = recorded.audit["reports"]
    findings = sum(len(report["findings"]) for report in reports)
    changed = (recorded.audit.get("lock") or {}).get("status") == "changed"
    arches = ", ".join(sorted({report["arch"] for report in reports if report["arch"]}))
    value = "differs from lock" if changed and not findings else f"{findings} findings"
    detail = f"{len(reports)} kernels for {arches}"
    return Tile("Audit", value, detail, good(bool(recorded.audit["clean"]) and not changed), "audit")


def _model_tile(recorded: Recorded) -> Tile:
    if recorded.models is None:
        return Tile("Model boundaries", "not run", COMMANDS["models"], "none", "models")
    failed = [check["name"] for model in recorded.models for check in model["checks"] if not check["passed"]]
    firsts = [model["first"]["name"] for model in recorded.models if model.get("first")]
    detail = f"first difference at {firsts[0]}" if firsts else "no boundary differs"
    value = f"{len(failed)} failed" if failed else "as expected"
    return Tile("Model boundaries", value, detail, good(not failed), "models")


def _bench_tile(recorded: Recorded) -> Tile:
    if recorded.bench is None:
        return Tile("Speed", "not run", COMMANDS["bench"], "none", "bench")
    verdicts, unheard = targets.judge(recorded.bench)
    met = sum(verdict.met is True for verdict in verdicts)
    measured = [line for line in recorded.bench if "skipped" not in line]
    checked = sum(line["bits_checked"] for line in measured)
    total = len(verdicts) + len(unheard)
    value = f"{met} of {total} targets" if total else f"{len(measured)} rows"
    detail = f"bits verified in {checked} of {len(measured)} rows"
    if recorded.bench_note:
        gpus = ", ".join(dict.fromkeys(line["gpu"] for line in measured))
        detail += f"; recorded on {gpus}, not by this run"
    return Tile("Speed", value, detail, good(met == total and checked == len(measured)), "bench")
