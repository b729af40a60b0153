"""Each planted fault makes exactly its rule fail; clean code, IEEE division and square root included, passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from audit import planted
from audit.planted_triton import flushing_root, scale_add

from samebits import registry
from samebits.audit import run
from samebits.audit.build import Build
from samebits.audit.compile import ARCHES
from samebits.audit.limits import STRICT, Limits, of_allowed, of_contracts
from samebits.contract import Contract
from samebits.runtime import triton_build
from samebits.runtime.nvrtc import CudaKernel

Plant = Callable[..., Path]
FAST = ("--use_fast_math",)


def broken(path: Path, limits: Limits = STRICT) -> set[tuple[str, str]]:
    result = run.audit_path(path, limits)
    assert len(result.reports) == 1
    return {(finding.rule, finding.verdict) for finding in result.reports[0].findings}


def sources(kind: str) -> dict[str, bool]:
    return {"ptx": kind != "sass", "cubin": kind != "ptx"}


@pytest.mark.parametrize("arch", ["80", "90a", "100"])
@pytest.mark.parametrize("kind", ["ptx", "sass", "both"])
def test_clean_code_passes(plant: Plant, arch: str, kind: str) -> None:
    assert broken(plant(planted.CLEAN, arch, **sources(kind))) == set()


@pytest.mark.parametrize(
    ("source", "options", "rule"),
    [
        (planted.FMA, planted.EXACT, "contraction"),
        (planted.PLAIN, ("--fmad=true",), "contraction"),
        (planted.FLUSH, ("--fmad=false", "--ftz=true"), "ftz"),
        (planted.RSQRT, planted.EXACT, "approximate"),
        (planted.QUICK, planted.EXACT, "approximate"),
        (planted.ATOMIC, planted.EXACT, "float-atomic"),
        (planted.LOCAL, planted.EXACT, "local-memory"),
        (planted.TENSOR, planted.EXACT, "tensor-core"),
    ],
    ids=lambda value: value if isinstance(value, str) and "\n" not in value and len(value) < 20 else "",
)
@pytest.mark.parametrize("kind", ["ptx", "sass", "both"])
def test_a_planted_fault_breaks_exactly_its_rule(
    plant: Plant, source: str, options: tuple[str, ...], rule: str, kind: str
) -> None:
    found = broken(plant(source, "90a", options, **sources(kind)))
    # In machine code alone a fused multiply-add may have been asked for, so that verdict is weaker.
    assert found == {(rule, "suspect" if (rule, kind) == ("contraction", "sass") else "fail")}


@pytest.mark.parametrize("kind", ["ptx", "sass", "both"])
def test_fast_math_is_seen_as_flushing_and_approximation(plant: Plant, kind: str) -> None:
    found = {rule for rule, _ in broken(plant(planted.CLEAN, "90a", FAST, **sources(kind)))}
    assert {"ftz", "approximate"} <= found <= {"ftz", "approximate", "contraction"}


def test_operations_left_to_the_assembler_are_contraction_even_where_it_did_not_fuse(
    plant: Plant, tmp_path: Path
) -> None:
    text = planted.nvrtc_build(planted.PLAIN, "compute_90a", planted.EXACT).replace(b".rn.f32", b".f32")
    (tmp_path / "loose.ptx").write_bytes(text)
    assert broken(tmp_path) == {("contraction", "fail")}


def test_one_unrounded_addition_alone_cannot_be_fused(plant: Plant) -> None:
    assert broken(plant(planted.FLUSH, options=("--fmad=true",))) == set()


def test_the_assembler_fusing_what_its_input_keeps_apart_is_found(plant: Plant) -> None:
    """ptxas does this to packed operations on sm_100; where a later one does not, there is nothing to find."""
    folder = plant(planted.PACKED, "100")
    fused = any(opcode == "FFMA2" for opcode, _ in run.audit_path(folder, STRICT).reports[0].opcodes)
    assert broken(folder) == ({("contraction", "fail")} if fused else set())


def test_a_cubin_beside_ptx_that_did_not_fuse_is_judged_too(tmp_path: Path) -> None:
    """The same kernel name, but another build of it."""
    (tmp_path / "planted.ptx").write_bytes(planted.nvrtc_build(planted.PLAIN, "compute_90a", planted.EXACT))
    (tmp_path / "planted.cubin").write_bytes(planted.nvrtc_build(planted.PLAIN, "sm_90a", ("--fmad=true",)))
    assert broken(tmp_path) == {("contraction", "fail")}


def test_an_fma_after_a_division_is_not_taken_for_the_division(plant: Plant) -> None:
    source = 'extern "C" __global__ void k(float* a) { a[0] = __fmaf_rn(a[1] / a[2], a[3], a[4]); }'
    (report,) = run.audit_path(plant(source, ptx=False), STRICT).reports
    assert [(f.rule, f.count) for f in report.findings] == [("contraction", 1)]


def test_integer_atomics_are_fine(plant: Plant) -> None:
    assert broken(plant(planted.COUNTER)) == set()


@pytest.mark.parametrize(
    ("source", "allowed"),
    [
        (planted.FMA, "fma"),
        (planted.RSQRT, "rsqrt.approx.f32"),
        (planted.ATOMIC, "float-atomic"),
        (planted.LOCAL, "local-memory"),
        (planted.TENSOR, "tensor-core"),
    ],
    ids=["fma", "rsqrt", "atomic", "local", "tensor"],
)
@pytest.mark.parametrize("kind", ["ptx", "sass", "both"])
def test_allowing_it_silences_it(plant: Plant, source: str, allowed: str, kind: str) -> None:
    assert broken(plant(source, **sources(kind)), of_allowed([allowed])) == set()


def test_allowing_an_instruction_does_not_allow_its_flushing_form(plant: Plant) -> None:
    folder = plant(planted.RSQRT, options=("--fmad=false", "--ftz=true"), cubin=False)
    assert broken(folder, of_allowed(["rsqrt.approx.f32"])) == {("ftz", "fail")}
    assert broken(folder, of_allowed(["rsqrt.approx.ftz.f32"])) == set()


@pytest.mark.parametrize("name", ["speed", "rsqrt", "rsqrt.approx", "unreadable", "add.rn.f32", ""])
def test_an_unknown_allowance_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="cannot allow"):
        of_allowed([name])


def contract(**changes: object) -> Contract:
    given = {"name": "c", "summary": "", "exactness": "device", "reductions": (), "rounding": ()} | changes
    return Contract(**given)  # type: ignore[arg-type]


def test_limits_are_what_every_contract_allows() -> None:
    loose = contract(fma="explicit", approximate=("rsqrt.approx.f32", "ex2.approx.f32"), exactness="kchain")
    tight = contract(approximate=("rsqrt.approx.f32",))
    assert of_contracts([loose, tight]) == Limits(approximate=frozenset({"rsqrt.approx.f32"}))
    assert of_contracts([loose]).off == {"tensor-core"}
    with pytest.raises(ValueError, match="no contract"):
        of_contracts([])


def triton_build_of(function: object) -> Build:
    signature = (("x", "*bf16"), ("y", "*fp32"), ("n", "i32"), ("BLOCK", "constexpr"))
    return Build(triton_build.TritonKernel(function, signature, (("BLOCK", 256),)), ("c",))


def test_a_triton_kernel_with_fusion_on_fails_and_with_it_off_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    job = run.Job("planted", triton_build_of(scale_add), STRICT)
    clean = run.audit_jobs([job], ["sm_80", "sm_90"])
    assert clean.clean and [report.arch for report in clean.reports] == ["sm_80", "sm_90"]

    run.compiling.compile_build.cache_clear()
    monkeypatch.setitem(triton_build.OPTIONS, "enable_fp_fusion", True)
    fused = run.audit_jobs([job], ["sm_90"])
    run.compiling.compile_build.cache_clear()
    assert {finding.rule for finding in fused.reports[0].findings} == {"contraction"}


def test_the_flushing_root_of_triton_is_told_apart_from_the_exact_one() -> None:
    limits = of_contracts([contract(approximate=("rsqrt.approx.f32",))])
    (report,) = run.audit_jobs([run.Job("planted", triton_build_of(flushing_root), limits)], ["sm_90"]).reports
    assert {finding.rule for finding in report.findings} == {"ftz"}


def test_the_default_architectures() -> None:
    assert ARCHES == ("sm_80", "sm_90", "sm_100")


def test_processes_report_what_threads_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA and a Triton kernel of ours, and a compilation that fails; in the order in which they were given."""
    jobs = [next(j for j in hc_split_sinkhorn() if j.build.backend == backend) for backend in ("cuda", "triton")]
    lost = run.Job("h_aggregate", Build(CudaKernel("h_aggregate", "no_such_file"), ("c",)), STRICT)
    work = [(job, "sm_90") for job in (jobs[0], lost, jobs[1])]
    threads = run.audit_work(work)
    monkeypatch.setattr(run, "PROCESSES_FROM", 1)
    monkeypatch.setattr(run, "WORKERS", 2)
    monkeypatch.setattr(run, "_in_threads", None)
    assert run.audit_work(work) == threads
    assert [report.verdict for report in threads.reports] == ["clean", "error", "clean"]


def hc_split_sinkhorn() -> list[run.Job]:
    op = registry.operator("hc_split_sinkhorn")
    builds = [build for backend in ("cuda", "triton") for build in op.backend(backend).builds()]
    return [run.Job(op.name, b, of_contracts(op.spec.contract(c) for c in b.contracts)) for b in builds]
