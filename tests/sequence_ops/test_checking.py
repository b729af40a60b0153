"""``samebits check attention``: what passes, and that each check can fail, along each of its axes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import typer
from torch import Tensor
from typer.testing import CliRunner

from samebits import dispatch, verify
from samebits.cli.check import check as command
from samebits.sequence_ops.attention import api, choice, golden, reference, subject
from samebits.verify import UsageError
from samebits.verify.report import Report

SMALL = {"D": 64, "S_k": 12, "H": 2, "H_kv": 1}
CHECKS = ("forward_accuracy", "forward_invariance", "gradient_accuracy", "gradient_invariance", "reference_bits")
Fault = Callable[..., Tensor]


def exact(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention in FP64, rounded once: accurate, and in practice invariant."""
    documents = None
    if cu_seqlens is not None:
        bounds = [cu.tolist() for cu in (cu_seqlens, cu_seqlens if cu_seqlens_k is None else cu_seqlens_k)]
        parts = [
            golden.forward(q[:, a:b], k[:, c:d], v[:, c:d], causal, q.shape[-1] ** -0.5)
            for (a, b), (c, d) in zip(*map(pairwise, bounds), strict=True)
        ]
        out, lse = torch.cat([o for o, _ in parts], 1), torch.cat([s for _, s in parts], 2)
    else:
        out, lse = golden.forward(q, k, v, causal, q.shape[-1] ** -0.5, documents)
    return out.to(q.dtype), lse.float()


def look(candidate: object = None, rows: int = 4, sizes: dict[str, int] = SMALL, **options: object) -> Report:
    return verify.check("attention", against=candidate, device="cpu", rows=rows, sizes=sizes, **options)  # type: ignore[arg-type]


def failing(report: Report) -> set[str]:
    return {c.name for c in report.checks if c.status not in ("pass", "n/a")}


def broken(report: Report, name: str) -> set[str]:
    return {failure.axis for failure in report.check(name).failures}


@pytest.mark.parametrize("contract", ["cudnn", "fa2"])
def test_ours_passes(contract: str) -> None:
    report = look(contract=contract)
    assert report.status() == dict.fromkeys(CHECKS[:4], "pass") | {"reference_bits": "n/a"}, report.checks
    assert report.options["backend"] == "reference"
    assert report.options["contract"] == contract
    assert report.options["kinds"] == ["full, D=64, 2 heads over 1", "causal, D=64, 2 heads over 1"]
    for axis in ("repeat", "queries", "heads", "batch", "documents", "autograd"):
        assert axis in report.check("gradient_invariance").summary
    assert {kind.head_dim for kind in subject.kinds({})} == {64, 128}
    assert {kind.causal for kind in subject.kinds({"D": 128})} == {False, True}


def test_somebody_elses_passes_and_may_have_other_bits() -> None:
    report = look(exact)
    assert report.status() == dict.fromkeys(CHECKS[:4], "pass") | {"reference_bits": "n/a"}, report.checks
    assert "lse" in report.check("forward_accuracy").summary
    claimed = look(exact, contract="cudnn", only=["reference"])
    assert failing(claimed) == {"reference_bits"}


def test_ours_has_the_bits_that_it_claims() -> None:
    def ours(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return api.attention(q, k, v, causal=causal, contract="fa2")[0]

    assert look(ours, contract="fa2", only=["reference"], rows=5).status()["reference_bits"] == "pass"
    other = look(ours, contract="cudnn", only=["reference"], rows=5, sizes=SMALL | {"S_k": 150})
    assert failing(other) == {"reference_bits"}


def scaled(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
    return exact(q * 1.06, k, v, **options)[0]  # type: ignore[arg-type]


def doubled_gradient(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
    out = exact(q, k, v, **options)[0]  # type: ignore[arg-type]
    return 2 * out - out.detach()


def wrong_lse(q: Tensor, k: Tensor, v: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    out, lse = exact(q, k, v, **options)  # type: ignore[arg-type]
    return out, lse * 1.00001


@pytest.mark.parametrize(
    ("candidate", "expected"),
    [
        (scaled, {"forward_accuracy", "gradient_accuracy"}),
        (doubled_gradient, {"gradient_accuracy"}),
        (wrong_lse, {"forward_accuracy"}),
    ],
)
def test_what_is_not_accurate_fails(candidate: Fault, expected: set[str]) -> None:
    assert failing(look(candidate)) == expected


_turn = itertools.count()
LEANINGS = {
    "repeat": lambda q, options: next(_turn) % 2,
    "queries": lambda q, options: q.shape[1] < 4,
    "heads": lambda q, options: q.shape[2] == 1,
    "batch": lambda q, options: q.shape[0] == 1 and "cu_seqlens" not in options,
    "documents": lambda q, options: "cu_seqlens" in options,
}


@pytest.mark.parametrize("axis", LEANINGS)
def test_what_depends_on_its_surroundings_fails_along_that_axis(axis: str) -> None:
    """H5: by less than the rounding of BF16, so accuracy does not see it."""

    def leaning(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        return exact(q, k, v, **options)[0] * (1.0078125 if LEANINGS[axis](q, options) else 1.0)  # type: ignore[arg-type]

    report = look(leaning, forward_only=axis != "batch")
    if axis == "repeat":  # it also hits others, as its turns fall
        assert "repeat" in broken(report, "forward_invariance")
        return
    names = {"forward_invariance"} | ({"gradient_invariance"} if axis == "batch" else set())
    assert failing(report) == names, report.checks
    assert all(broken(report, name) == {axis} for name in names)


def test_other_documents_may_not_be_read() -> None:
    """It honours the bounds of the queries only: each document sees the keys of all."""

    def reading(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, cu_seqlens: object = None) -> Tensor:
        return exact(q, k, v, causal)[0]

    report = look(reading, forward_only=True)
    assert failing(report) == set()
    assert any("takes no cu_seqlens_k" in note for note in report.check("forward_invariance").notes)
    found = look(
        lambda q, k, v, causal=False, cu_seqlens=None, cu_seqlens_k=None: exact(q, k, v, causal)[0], forward_only=True
    )
    assert broken(found, "forward_invariance") == {"documents"}


def test_what_takes_no_mask_is_asked_for_the_rest() -> None:
    report = look(lambda q, k, v: exact(q, k, v)[0])
    assert report.passed
    assert any("causal, D=64, 2 heads over 1: left out, it takes no causal" in n for n in report.checks[1].notes)

    def broken_at(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.shape[1] == 1:
            raise RuntimeError("not for one query")
        return exact(q, k, v)[0]

    failure = look(broken_at).check("forward_invariance").failures[0]
    assert failure.what == "raised RuntimeError: not for one query"
    assert look(lambda q, k, v: exact(q, k, v)[0].detach()).status()["gradient_accuracy"] == "not run"


def test_every_launch_plan_and_autograd_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    right, explicit = reference.forward, api.attention_backward

    def by_plan(*arguments: object) -> tuple[Tensor, Tensor]:
        out, lse = right(*arguments)  # type: ignore[arg-type]
        return out * (1.0 + 0.0078125 * dispatch.forced_plan()), lse

    monkeypatch.setattr(choice, "plans", lambda *arguments: (0, 1))
    report = look(only=["plan"], rows=3)
    assert "over plan 4" in report.check("forward_invariance").summary
    monkeypatch.setattr(reference, "forward", by_plan)
    report = look(only=["plan"], rows=3)
    assert broken(report, "forward_invariance") == broken(report, "gradient_invariance") == {"plan"}
    monkeypatch.undo()
    monkeypatch.setattr(
        api, "attention_backward", lambda *a, **o: tuple(-g for g in explicit(*a, **o) if g is not None)
    )
    report = look(only=["autograd", "accuracy"], rows=3)
    assert failing(report) == {"gradient_accuracy", "gradient_invariance"}
    assert broken(report, "gradient_invariance") == {"autograd"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"contract": "nonsense"}, "no contract named"),
        ({"backend": "nonsense"}, "no backend named"),
        ({"backend": "cuda"}, "needs a CUDA tensor"),
        ({"sizes": {"T": 3}}, "no axis 'T'"),
        ({"sizes": {"D": 32}}, "64 and 128"),
        ({"sizes": {"H": 3, "H_kv": 2}}, "multiple of H_kv"),
        ({"sizes": {"S_k": 0}}, "at least 1"),
        ({"only": ["padding"]}, "choose from repeat, queries"),
        ({"dtype": torch.float32}, "bfloat16 or float16"),
        ({"shapes": ["T,4"]}, "declares its inputs"),
        ({"candidate": exact, "backend": "reference"}, "chooses among ours"),
    ],
)
def test_wrong_use_is_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        look(**options)  # type: ignore[arg-type]


def test_the_command(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(command)
    app.callback()(lambda: None)
    stored = tmp_path / "report.json"
    sizes = [word for axis, size in SMALL.items() for word in ("--size", f"{axis}={size}")]
    line = ["check", "attention", *sizes, "--rows", "2", "--only", "queries", "--device", "cpu", "--contract", "all"]
    done = CliRunner().invoke(app, [*line, "--json", str(stored)])
    assert done.exit_code == 0, done.output
    assert [report["options"]["contract"] for report in json.loads(stored.read_text())] == ["cudnn", "fa2"]
    place = f"{Path(__file__)}:scaled"
    line = ["check", "attention", "--against", place, *sizes, "--rows", "2", "--forward-only", "--device", "cpu"]
    done = CliRunner().invoke(app, line)
    assert done.exit_code == 1, done.output
    reproduce = next(part for part in done.output.splitlines() if "reproduce:" in part)
    assert "--only accuracy --forward-only" in reproduce
    assert CliRunner().invoke(app, [*line, "--only", "nonsense"]).exit_code == 2
