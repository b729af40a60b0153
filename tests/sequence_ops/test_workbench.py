"""What the workbench's commands take from ``attention``: list, explain, audit, goldens, exercise, trace."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import samebits
from samebits import catalogue, cli, observers
from samebits.audit import listing
from samebits.audit.compile import ARCHES
from samebits.audit.limits import STRICT
from samebits.audit.listing import Job
from samebits.sequence_ops.attention import cases, choice, exercise, subject
from samebits.sequence_ops.attention.spec import SPEC
from samebits.verify import goldens

CPU = torch.device("cpu")
LOCK = Path(__file__).parents[1] / "golden" / "audit.lock.json"


def call(*words: str) -> str:
    done = CliRunner().invoke(cli.build(words), list(words))
    assert done.exit_code == 0, done.output
    return done.output


def given(kind: subject.Kind = subject.KINDS[1], lengths: tuple[int, int, int] = (1, 5, 9)) -> subject.Inputs:
    return subject.draw(kind, lengths, torch.bfloat16, 0, CPU)


# --- declarations -----------------------------------------------------------------------------------------------------


def test_the_catalogue_has_rows_and_sequences() -> None:
    assert set(catalogue.names()) > {"attention", "linear"}
    assert catalogue.declared("attention") is SPEC
    assert catalogue.declared("linear").name == "linear"
    assert catalogue.has("attention", "golden")
    assert not catalogue.has("attention", "nonsense")
    with pytest.raises(ValueError, match=r"no operator named 'nobody'; known: .*attention.*linear"):
        catalogue.declared("nobody")


def test_the_declaration_is_that_of_the_torch_operators() -> None:
    for backward in (False, True):
        schema = getattr(torch.ops.samebits, f"attention{'_backward' if backward else ''}").default._schema
        tensors = [a.name for a in schema.arguments if "Tensor" in str(a.type)]
        taken, returned = catalogue.tensors("attention", backward)
        assert list(taken) == tensors
        assert list(returned) == [r.name for r in schema.returns]
    for contract in SPEC.contracts:
        spoken = SPEC.forward.names() | SPEC.backward.names()
        assert {r.result for r in contract.reductions} <= spoken
        assert {point.partition(":")[0] for point in contract.rounding} <= spoken


def test_list_and_explain() -> None:
    entries = [e for e in json.loads(call("list", "--json")) if e["operator"] == "attention"]
    assert [(e["contract"], e["default"]) for e in entries] == [("cudnn", True), ("fa2", False)]
    for backend in ("cuda", "triton", "reference"):
        for backward in ((), ("--backward",)):
            shown = call("explain", "attention", "--backend", backend, "--rows", "300", *backward)
            assert f"backend  {backend}  (asked for)" in shown
            assert ("grad_k over queries" in shown) == bool(backward)
            assert ("out over keys" in shown) != bool(backward)
    assert "up to 64 queries" in call("explain", "attention", "--rows", "3", "--backward")
    facts = json.loads(call("explain", "attention", "--rows", "9", "--size", "S_k=70", "--causal", "--json"))
    assert facts["shape"] == {"T": 9, "B": 1, "S_q": 9, "S_k": 70, "H": 56, "H_kv": 56, "D": 128}
    assert facts["backend"] == "cuda"
    assert {r["result"] for r in facts["contract"]["reductions"]} == {"s", "l", "out"}
    for words, message in (
        (("attention", "--size", "T=3"), "has no axis 'T'"),
        (("attention", "--size", "D=32"), "expected 64 or 128"),
        (("linear", "--causal"), "operator of rows"),
    ):
        done = CliRunner().invoke(cli.build(["explain"]), ["explain", *words])
        assert done.exit_code == 2 and message in done.output


def test_explain_of_tensors() -> None:
    one = given()
    found = samebits.explain("attention", one.q, one.k, one.v, causal=True)
    assert found.choice.backend == "reference"
    assert dict(found.call.sizes)["S_k"] == 9
    out, lse = samebits.attention(one.q, one.k, one.v)
    backward = samebits.explain("attention", one.grad_out, one.q, one.k, one.v, out, lse, backward=True)
    assert backward.call.wanted == ("grad_q", "grad_k", "grad_v")
    with pytest.raises(TypeError, match="expected 3 tensors"):
        samebits.explain("attention", one.q)
    with pytest.raises(samebits.UnsupportedError, match="needs a CUDA tensor"):
        samebits.explain("attention", one.q, one.k, one.v, backend="triton")


# --- machine code -----------------------------------------------------------------------------------------------------


def test_every_kernel_is_listed_where_it_is_launched() -> None:
    """Also under every plan that a call can take; what the lock says of them is tests/audit's."""
    from samebits.sequence_ops.attention import contracts, cuda, cuda_backward

    jobs = [Job("attention", b, STRICT) for name in ("cuda", "triton") for b in catalogue.builds("attention", name)]
    assert {job.build.owner for job in jobs} == {"attention"}
    assert len({(job.build.backend, job.build.label) for job in jobs}) == len(jobs)
    assert {(job.build.backend, job.build.entry) for job in jobs} == {
        *(("cuda", name) for name in ("attention_forward", "attention_grad_keys", "attention_grad_queries")),
        *(("triton", name) for name in ("_forward", "_delta", "_keys", "_queries")),
    }
    assert {arch for job, arch in listing.work(jobs, ARCHES) if job.build.backend == "cuda"} == {"sm_90"}
    assert {arch for job, arch in listing.work(jobs, ARCHES) if job.build.backend == "triton"} == set(ARCHES)
    listed = {job.build.kernel for job in jobs}
    for recipe, kind in itertools.product(contracts.RECIPES.values(), cuda.KINDS):
        for queries in (3, 65, 10_000):
            for plan in cuda.plans(recipe, *kind[:2], queries, 7):
                assert cuda._launch(recipe, plan, *kind, (1, 1)).kernel in listed
    for plan, kind in itertools.product(
        (cuda_backward.SMALL, cuda_backward.LARGE), ((*kind, (1, 1)) for kind in cuda.KINDS)
    ):
        assert cuda_backward._launch("attention_grad_keys", plan.by_key, *kind).kernel in listed
        assert cuda_backward._launch("attention_grad_queries", plan.by_query, *kind).kernel in listed


def test_the_tensor_cores_are_at_work() -> None:
    """In the code that the lock records: wgmma on Hopper, in all kernels that multiply matrices."""
    recorded = json.loads(LOCK.read_text())["kernels"]
    ours = {key: entry["opcodes"] for key, entry in recorded.items() if key.startswith("attention/")}
    assert len([key for key in ours if "/cuda/" in key]) == 136
    for key, opcodes in ours.items():
        if "_delta" not in key:
            assert ("GMMA" if "sm_90" in key else "MMA") in opcodes, key


# --- records of a GPU -------------------------------------------------------------------------------------------------


def test_digests_of_the_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    small = tuple(case for case in cases.CASES if case.name in ("blind_queries", "documents"))
    monkeypatch.setattr(cases, "CASES", small)
    monkeypatch.setattr(cases, "PORTABLE", ("out", "lse", "grad_q", "grad_k", "grad_v"))
    found = goldens.compute("cpu", "reference", ["attention"])
    assert len(found) == 2 * 2 * 5
    assert found == goldens.compute("cpu", "reference", ["attention"])
    assert "attention/fa2/backward/documents/grad_k" in found
    right = cases.inputs_of

    def other_upstream(case: cases.Case, device: torch.device) -> subject.Inputs:
        one = right(case, device)
        return replace(one, grad_out=-one.grad_out)

    monkeypatch.setattr(cases, "inputs_of", other_upstream)
    changed = {
        line.split(":")[0] for line in goldens.differences(found, goldens.compute("cpu", "reference", ["attention"]))
    }
    assert changed == {key for key in found if "/backward/" in key}
    monkeypatch.setattr(cases, "PORTABLE", ())
    assert goldens.compute("cpu", "reference", ["attention"]) == {}, "another tensor core may add otherwise"
    assert len({case.name for case in cases.CASES}) == len(cases.CASES)


def test_exercise_takes_every_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    variants = exercise.VARIANTS[:1]
    lengths = exercise.LENGTHS[2:]
    monkeypatch.setattr(exercise, "LENGTHS", lengths)
    calls = len(lengths) + 2  # packed, and strided
    assert exercise.exercise(CPU, ("reference",), variants) == 2 * calls
    monkeypatch.setattr(
        choice, "plans", lambda backend, problem, recipe, backward, *more: (0, 1, 2) if backward else (0, 1)
    )
    assert exercise.exercise(CPU, ("reference",), variants) == 5 * len(lengths) + 2 * 2
    for options in ((0, 2), (1, 2)):  # the contract and the mask, each with each head_dim
        assert len({tuple(variant[i] for i in options) for variant in exercise.VARIANTS}) == 4
    assert {variant[3] for variant in exercise.VARIANTS} == {"bfloat16", "float16"}
    packed = [i for i, _ in exercise._inputs(subject.KINDS[0], torch.float16, CPU) if i.packing]
    assert [subject.Ours("fa2", name).takes(packed[0]) is None for name in ("cuda", "triton")] == [True, True]


# --- trace ------------------------------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return samebits.attention(q, k, v, causal=True, contract="fa2")[0]


def test_calls_are_events_of_a_trace() -> None:
    one = given()
    leaves = [t.requires_grad_() for t in (one.q, one.k, one.v)]
    layer = Layer()
    with samebits.trace(layer) as recording:
        layer(*leaves).float().square().sum().backward()
    forward, backward = (e for e in recording.trace.events if e.kind == "operator")
    assert (forward.path, forward.phase, forward.cls, forward.note) == (
        "samebits::attention", "forward", "reference", "contract fa2",
    )  # fmt: skip
    assert [r.where for r in forward.inputs] == ["q", "k", "v"]
    assert [r.where for r in forward.outputs] == ["out", "lse"]
    assert (backward.path, backward.phase) == ("samebits::attention_backward", "backward")
    assert [r.where for r in backward.outputs] == ["grad_q", "grad_k", "grad_v"]
    assert all(r.digest for r in (*forward.inputs, *forward.outputs, *backward.outputs))
    assert not observers.OBSERVERS
