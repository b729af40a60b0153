"""``samebits demo``: the main job from end to end on a CPU. Checks, audit, two real models, and the report."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from samebits.cli import output

if TYPE_CHECKING:
    from samebits.audit.listing import Job, Unlisted
    from samebits.audit.lock import Comparison
    from samebits.audit.run import Report, Result
    from samebits.catalogue import Declared
    from samebits.models.minimax_h3.record import Replay

ARCHES = ("sm_90",)
"""The demo has minutes: one build of every kernel for one architecture. ``samebits audit`` compiles all builds for all."""
SHOWN_FINDINGS = 12
SMALL_ROW, SMALL_AXIS = 256, 64
SMALL_SEQUENCE = {"S_q": 9, "S_k": 70}
SHOWN_TO_FAIL = "torch.mm"
"""A library operator whose rows depend on the batch: what a check looks like when it has something to say."""
RESULTS = Path("benchmarks") / "results"
"""Committed times of the GPU program, in a checkout; folders below it are of other machines and are not read."""
REPLAY_WIDTH, REPLAY_PAGE, BLOCK_PAGE = 64, "minimax-h3.html", "minimax-h3-block.html"
_WORDS = {True: "[green]ok[/green]    ", False: "[red]FAIL[/red]  ", None: "[yellow]note[/yellow]  "}


@dataclass
class _Run:
    out: Path
    console: Console
    lines: list[tuple[bool | None, str]] = field(default_factory=list)
    """(passed, what) for the summary; None: worth saying, not judged by this run."""
    started: float = field(default_factory=time.perf_counter)

    def part(self, title: str) -> None:
        self.console.rule(f"{title}  \\[{time.perf_counter() - self.started:.0f} s]")

    def say(self, passed: bool | None, what: str) -> None:
        self.lines.append((passed, what))

    def write(self, name: str, content: Any) -> None:
        (self.out / name).write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")


def demo(
    out: Annotated[Path, typer.Option(help="Folder of index.html and the JSON behind it.")] = Path("report"),
) -> None:
    """Check every operator, audit a build of every kernel, run a DeepSeek-V4 layer and a MiniMax-H3 chain beside the originals.

    No GPU needed; a few minutes on two CPU cores. Exit code 1 if anything that should pass does not.
    """
    from samebits.report.load import Recorded
    from samebits.report.write import write

    out.mkdir(parents=True, exist_ok=True)
    run = _Run(out, output.console())
    checks, example = _checks(run)
    audit = _audit(run)
    models = tuple(_models(run))
    _replay(run)
    _block(run)
    _patched(run)
    _invariance(run)
    times, source = _recorded_speed(run)
    recorded = Recorded(tuple(checks), example, audit, models, bench=times, bench_note=source)
    page = write(recorded, out)

    run.part("summary")
    for passed, what in run.lines:
        run.console.print(_WORDS[passed] + escape(what))
    run.console.print(f"report: {page}  ({time.perf_counter() - run.started:.0f} s)", highlight=False)
    if any(passed is False for passed, _ in run.lines):
        raise typer.Exit(1)


def _checks(run: _Run) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Every operator and contract by its reference; and, apart, the library operator that does not hold."""
    from samebits import catalogue, verify
    from samebits.verify.report import show

    run.part("checks: accuracy and batch invariance, forward and backward")
    found = []
    with _progress("checking") as advance:
        todo = [(name, contract.name) for name in catalogue.names() for contract in catalogue.declared(name).contracts]
        for done, (name, contract) in enumerate(todo):
            advance(done, len(todo) + 1, f"{name}, {contract}")
            sizes = _sizes(catalogue.declared(name))
            found.append(verify.check(name, contract=contract, backend="reference", device="cpu", sizes=sizes))
        advance(len(todo), len(todo) + 1, SHOWN_TO_FAIL)
        example = verify.check(SHOWN_TO_FAIL, device="cpu")
    for report in found:
        show(report, run.console)
        failed = ", ".join(check.name for check in report.checks if check.status in ("fail", "not run"))
        what = f"{report.candidate}, contract {report.options['contract']}"
        run.say(report.passed, f"{what}: {failed}" if failed else f"{what}: all checks pass")
    run.console.print(f"\n[bold]And {SHOWN_TO_FAIL}, which promises nothing of the kind:[/bold]")
    show(example, run.console)
    varies = example.check("forward_invariance").status == "fail"
    said = (
        "its rows depend on the batch, as shown above"
        if varies
        else "did not vary on this machine, which proves nothing"
    )
    run.say(None, f"{SHOWN_TO_FAIL} for comparison: {said}")
    ours, theirs = [report.to_json() for report in found], example.to_json()
    run.write("check.json", ours)
    run.write("check-example.json", theirs)
    return ours, theirs


def _sizes(spec: Declared) -> dict[str, int]:
    """Small ones: at the tuned sizes, which ``samebits check`` takes, the references need a CPU for many minutes."""
    from samebits.contract import OpSpec

    if not isinstance(spec, OpSpec):
        return SMALL_SEQUENCE
    most = SMALL_ROW if len(spec.tuned) == 1 else SMALL_AXIS
    return spec.fitted({axis: min(sizes[0], most) for axis, sizes in spec.tuned})


def _audit(run: _Run) -> dict[str, Any]:
    """One build of every kernel against its contracts, and all builds against the committed lock."""
    from samebits.audit import listing, sample
    from samebits.audit import run as auditing

    run.part("audit: the machine code of every kernel, for a GPU that need not be here")
    listed = listing.everything()
    jobs = [one for one in listed if isinstance(one, listing.Job)]
    failed = [one for one in listed if isinstance(one, listing.Unlisted)]
    with _progress("compiling") as advance:
        result = auditing.audit_work(sample.choose(jobs, ARCHES), failed, advance)
    run.console.print(
        f"a sample: one of the builds of each kernel, {len(result.reports)} of {len(jobs)}, for {', '.join(ARCHES)} alone; "
        "samebits audit compiles all of them for all architectures"
    )
    _show_audit(run, result)
    bad = sum(not report.clean for report in result.reports)
    what = f"one build of each of {len(result.reports)} kernels for {', '.join(ARCHES)}"
    run.say(result.clean, f"audit: {what}, {bad} with findings")
    content = result.to_json()
    comparison = _lock(run, result, listed)
    if comparison is not None:
        content["lock"] = comparison.to_json()
    run.write("audit.json", content)
    return content


def _show_audit(run: _Run, result: Result) -> None:
    """A line per operator, backend and architecture; ``samebits audit`` prints every kernel."""
    groups: dict[tuple[str, str, str], list[Report]] = {}
    for report in result.reports:
        groups.setdefault((report.op, report.backend, report.arch), []).append(report)
    right = ("kernels", "clean", "most registers")
    table = output.table("", "operator", "backend", "architecture", *right, right=right)
    for (op, backend, arch), reports in groups.items():
        most = max((report.resources.registers for report in reports if report.resources), default=0)
        clean = sum(report.clean for report in reports)
        table.add_row(op, backend, arch, str(len(reports)), str(clean), str(most))
    run.console.print(table)
    findings = [(report, finding) for report in result.reports for finding in report.findings]
    for report, finding in findings[:SHOWN_FINDINGS]:
        run.console.print(f"[red]{finding.rule}[/red] in {escape(report.key)} {escape(finding.note)}", soft_wrap=True)
    if len(findings) > SHOWN_FINDINGS:
        run.console.print(f"and {len(findings) - SHOWN_FINDINGS} more findings: samebits audit")


def _lock(run: _Run, result: Result, listed: Sequence[Job | Unlisted]) -> Comparison | None:
    """Against the committed record, which other compilers cannot be held to. None in an installed package.

    The sample by its code, all other builds, for every audited architecture, by what would be compiled.
    """
    from samebits import environment
    from samebits.audit import lock
    from samebits.audit.compile import ARCHES as ALL_ARCHES
    from samebits.cli.audit import LOCK

    root = environment.checkout()
    if root is None:
        return None
    try:
        inputs = lock.check_inputs(root / LOCK, listed, ALL_ARCHES)
        code = lock.compare(root / LOCK, result, None, ARCHES, sample=True)
    except ValueError as error:
        run.say(False, f"audit lock: {error}")
        return None
    lines = tuple(dict.fromkeys((*inputs.lines, *code.lines)))
    comparison = lock.Comparison(code.status if inputs.status == "same" else inputs.status, lines)
    said = {
        "same": "the sample compiles to what is recorded, and all other builds have the recorded sources and options",
        "changed": f"{len(lines)} differences from the record, the first: {lines[0] if lines else ''}",
        "compiler": "not comparable, other compilers than the record's",
    }[comparison.status]
    run.say(comparison.status != "changed", f"audit lock: {said}")
    return comparison


def _models(run: _Run) -> list[dict[str, Any]]:
    """A small model on prompts and on a decode batch, and one layer of the official width, all call sites replaced."""
    from samebits.models.deepseek_v4 import LayerComparison, compare_layer, subject
    from samebits.models.deepseek_v4.show import show

    run.part("DeepSeek-V4 of transformers, with our operators at every call site and without")
    wide = {**subject.SMALL, "hidden_size": 4096}
    jobs: tuple[tuple[str, Callable[[], LayerComparison]], ...] = (
        ("2 prompts of 32, published", lambda: compare_layer("published")),
        ("16 sequences of 1, fast", lambda: compare_layer("fast", batch=16, sequence=1, rows=4)),
        ("hidden_size 4096, published", lambda: compare_layer("published", batch=1, sequence=8, config=wide, rows=1)),
    )
    found = []
    with _progress("comparing") as advance:
        for done, (what, job) in enumerate(jobs):
            advance(done, len(jobs), what)
            found.append(job())
    for comparison in found:
        show(comparison, run.console)
        first = comparison.first
        said = f"differs first at {first}" if first else "no boundary differs"
        broken = ", ".join(check.name for check in comparison.checks if not check.passed)
        run.say(comparison.passed, f"{comparison.title}: {f'broken: {broken}' if broken else said}")
    content = [comparison.to_json() for comparison in found]
    run.write("model.json", content)
    return content


def _replay(run: _Run) -> None:
    """The conditioning of MiniMax-H3 beside the installed diffusers, at a reduced width, forward and backward."""
    from samebits.models.minimax_h3 import candidate, geometry, replay, weights

    run.part("MiniMax-H3 of diffusers: the conditioning chain, stage by stage")
    drawn = weights.synthetic(0, geometry.reduced(REPLAY_WIDTH))
    with _progress("replaying") as advance:
        result = replay.replay(
            drawn,
            timesteps=[1, 3],
            seq_lens=[3, 257],
            candidate=candidate.Candidate({}, "reference", {}),
            against=None,
            layout="block",
            seed=0,
            with_backward=True,
            progress=advance,
        )
    _replayed(run, result, "replay.json", REPLAY_PAGE)


def _block(run: _Run) -> None:
    """Block 0 of MiniMax-H3 beside the real block, node by node, with planted faults."""
    from samebits.models.minimax_h3 import geometry, weights
    from samebits.models.minimax_h3.block_replay import OURS, replay_block

    run.part("MiniMax-H3 of diffusers: the seventeen nodes of a block, forward and backward")
    drawn = weights.synthetic(0, geometry.reduced(REPLAY_WIDTH), block=True)
    result = replay_block(drawn, layouts=["mini"], candidate=OURS(backend="reference"), with_backward=True)
    _replayed(run, result, "block.json", BLOCK_PAGE)


def _replayed(run: _Run, result: Replay, name: str, shown: str) -> None:
    from samebits.report.pages import tables_page
    from samebits.report.replays import page, summary
    from samebits.report.terminal import rich_table

    content = result.to_json()
    for table in reversed(summary(content)):
        run.console.print(rich_table(table))
    run.write(name, content)
    (run.out / shown).write_text(tables_page(page(content)))
    run.console.print(f"the whole replay: {run.out / shown}", highlight=False)
    kept = sum(check.passed is True for check in result.checks)
    said = f"{kept} of {len(result.checks)} claims hold" if result.passed else "a claim is broken, see above"
    run.say(result.passed, f"MiniMax-H3 {result.stage} beside {result.peer}: {said}")


def _patched(run: _Run) -> None:
    """A small MiniMax-H3 of diffusers, whole, with our operators at every call site and without."""
    from samebits.models.minimax_h3.compare import compare_model
    from samebits.models.minimax_h3.subject import subject

    run.part("MiniMax-H3 of diffusers, a small model: with our operators at every call site and without")
    found = compare_model(subject(batch=2))
    for check in found.checks:
        run.console.print(f"{_WORDS[check.passed]}{check.name}  {escape(check.detail)}", highlight=False)
    run.write("minimax_h3_model.json", found.to_json())
    run.console.print(
        f"{found.sites} call sites, {len(found.operators)} operators; {found.equal} of {found.elements} outputs have the class's "
        f"own bits, the others are at most {found.distance:.2g} of its largest away",
        highlight=False,
    )
    said = f"{found.sites} call sites patched; a sequence has the same bits alone and in a batch"
    broken = ", ".join(check.name for check in found.checks if not check.passed)
    run.say(found.passed, f"MiniMax-H3 of {found.release}: {f'broken: {broken}' if broken else said}")


def _invariance(run: _Run) -> None:
    """Somebody else's model: which module gives a row other bits when the batch around it changes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from samebits.verify.invariance import invariance, show

    run.part("a Llama of transformers, of four layers: the first module whose rows depend on the batch")
    sizes = {"hidden_size": 96, "intermediate_size": 224, "num_hidden_layers": 4, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, num_key_value_heads=2, **sizes)).eval()
    tokens = torch.randint(128, (6, 7))
    found = invariance(model, {"input_ids": tokens, "use_cache": False}, sequence_axis=1)
    for line in show.lines(found):
        run.console.print(escape(line), highlight=False, soft_wrap=True)
    run.write("invariance.json", found.to_json())
    varies = [finding for finding in found.findings if finding.status == "fail"]
    said = (
        f"rows depend on the batch in {len(varies)} of {len(found.findings)} changes"
        if varies
        else "no row varied here"
    )
    run.say(None, f"Llama for comparison: {said}")


def _recorded_speed(run: _Run) -> tuple[tuple[dict[str, Any], ...] | None, str]:
    """The committed times of a checkout and where they come from; none in an installed package."""
    from samebits import environment
    from samebits.bench import results, targets

    root = environment.checkout()
    files = sorted((root / RESULTS).glob("*.jsonl")) if root is not None else []
    if root is None or not files:
        return None, ""
    try:
        lines = results.read(files)
    except (OSError, ValueError) as error:
        run.say(False, f"recorded speed: {error}")
        return None, ""
    verdicts, unheard = targets.judge(lines)
    met = sum(verdict.met is True for verdict in verdicts)
    measured = [line for line in lines if "skipped" not in line]
    commits: dict[str, dict[str, None]] = {}
    for line in measured:  # a commit may have words behind it that say what was not committed yet
        commits.setdefault(line["gpu"], {})[re.split(r"[ ,]", line["commit"])[0][:12]] = None
    stamps = (f"{gpu} at commit {', '.join(known)}" for gpu, known in commits.items())
    run.say(None, f"speed, recorded on {'; '.join(stamps)}: {met} of {len(verdicts) + len(unheard)} targets met")
    shown = ", ".join(f"{path.relative_to(root)}{_committed(root, path)}" for path in files)
    return tuple(lines), f"Recorded elsewhere and read from {shown}. This run measured no time."


def _committed(root: Path, path: Path) -> str:
    """The day on which a file was committed, or nothing where git cannot say."""
    words = ["git", "-C", str(root), "log", "-1", "--format=%cs", "--", str(path)]
    try:
        found = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
    return f" (committed {found})" if found else ""


@contextmanager
def _progress(title: str) -> Iterator[Callable[[int, int, str], None]]:
    """A bar where a person watches; nothing in a log."""
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=f"{title}: {what}")


if __name__ == "__main__":
    typer.run(demo)
