"""What cannot be read is an error finding, never a pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from audit import planted

from samebits.audit import ptx, run, sass
from samebits.audit.build import Build
from samebits.audit.code import AuditError
from samebits.audit.compile import arch_name, capability
from samebits.audit.limits import STRICT
from samebits.runtime import nvrtc
from samebits.runtime.nvrtc import CudaKernel

Plant = Callable[..., Path]


def only_error(path: Path) -> str:
    (report,) = run.audit_path(path, STRICT).reports
    (finding,) = report.findings
    assert (finding.rule, finding.verdict, report.verdict) == ("unreadable", "error", "error")
    return finding.examples[0]


@pytest.mark.parametrize("content", [b"", b"junk", b"\x7fELF" + b"\0" * 200], ids=["empty", "junk", "cut"])
@pytest.mark.parametrize("name", ["x.cubin", "x.ptx"])
def test_broken_files_are_errors(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    assert only_error(tmp_path)


def test_cut_off_ptx_is_an_error(tmp_path: Path) -> None:
    text = planted.nvrtc_build(planted.CLEAN, "compute_90a", planted.EXACT)
    (tmp_path / "x.ptx").write_bytes(text[: len(text) // 2])
    assert "cut off" in only_error(tmp_path) or "without an end" in only_error(tmp_path)


def test_ptx_and_cubin_of_different_kernels_are_an_error(plant: Plant, tmp_path: Path) -> None:
    plant(planted.CLEAN, cubin=False)
    plant(planted.PLAIN, ptx=False)
    assert "not of one build" in only_error(tmp_path)


def test_one_broken_file_does_not_hide_the_others(plant: Plant) -> None:
    folder = plant(planted.CLEAN)
    (folder / "deep").mkdir()
    (folder / "deep" / "x.ptx").write_text("nothing")
    result = run.audit_path(folder, STRICT)
    assert sorted(report.verdict for report in result.reports) == ["clean", "error"]
    assert not result.clean


def test_nothing_to_audit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "readme.txt").write_text("no code")
    for path in (tmp_path, tmp_path / "readme.txt", tmp_path / "missing.cubin"):
        with pytest.raises(ValueError, match=str(path)):
            run.audit_path(path, STRICT)


def test_a_kernel_that_does_not_compile_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(kernel: CudaKernel, arch: str) -> bytes:
        raise nvrtc.CompileError("identifier nonsense is undefined")

    monkeypatch.setattr(nvrtc, "compile_kernel", refuse)
    monkeypatch.setattr(nvrtc, "source_text", lambda kernel: "nonsense")
    job = run.Job("h_aggregate", Build(CudaKernel("h_aggregate", "k"), ("c",)), STRICT)
    (report,) = run.audit_jobs([job], ["sm_90"]).reports
    assert report.verdict == "error" and "identifier nonsense" in report.findings[0].examples[0]


def test_a_kernel_without_a_source_is_an_error() -> None:
    job = run.Job("h_aggregate", Build(CudaKernel("h_aggregate", "no_such_file"), ("ascending",)), STRICT)
    (report,) = run.audit_jobs([job], ["sm_90"]).reports
    assert report.verdict == "error" and "no_such_file" in report.findings[0].examples[0]


def test_ptx_statements_of_every_shape() -> None:
    module = ptx.parse(
        """.version 8.7
.target sm_90a
.address_size 64
/* a comment; with { braces } */
.func (.param .b32 out) helper(.param .b32 in)
{
    .reg .f32 %f<3>;
    { mul.rn.f32 %f1, %f1, %f2; add.rn.f32 %f1,
    %f1, %f2; }
	ret;
}
.visible .entry kernel(
	.param .u64 a
)
.reqntid 128
{
	.local .align 4 .b8 depot[16];
	.loc	1 4 0                           // x.py:4:0
$L__func_begin0:
	@%p1 ld.global.v2.b32 { %r1, %r2 }, [ %rd1 + 0 ];
	@!%p2 bra $L__func_begin0;
	call.uni (retval0),
	helper,
	(param0);
	ret;
}
.section .debug_abbrev
{
.b8 1                                   // note
}
"""
    )
    helper, kernel = module.functions
    assert [i.opcode for i in helper.instructions] == ["mul.rn.f32", "add.rn.f32", "ret"]
    assert [i.opcode for i in kernel.instructions] == ["ld.global.v2.b32", "bra", "call.uni", "ret"]
    assert (helper.entry, kernel.entry, module.entries) == (False, True, frozenset({"kernel"}))
    assert kernel.local == ("line 17: .local .align 4 .b8 depot[16]",)
    assert kernel.instructions[0].place == "line 20"


def test_ptx_that_is_no_instruction_is_refused() -> None:
    with pytest.raises(AuditError, match="not a PTX instruction"):
        ptx.parse(".version 8.0\n.target sm_90\n.entry k()\n{\n\t%broken;\n}\n")


def test_sass_that_is_no_instruction_is_refused() -> None:
    listing = '\t.target\tsm_90\n\t.section\t.text.k,"ax",@progbits\n        /*0000*/   <unknown bits> ;\n'
    with pytest.raises(AuditError, match="not a SASS instruction"):
        sass.parse(listing, "")


def test_resources_and_opcodes_of_several_kernels(plant: Plant) -> None:
    source = planted.PLAIN + planted.LOCAL
    module = sass.disassemble((plant(source, ptx=False) / "planted.cubin").read_bytes())
    by_name = {function.name: function for function in module.functions}
    assert by_name["plain"].resources is not None and by_name["local"].resources is not None
    assert by_name["plain"].resources.stack == 0 and by_name["local"].resources.stack == 256
    assert sass.histogram(by_name["plain"])["FMUL"] == 1 and "NOP" not in sass.histogram(by_name["plain"])


def test_a_missing_disassembler_is_said_clearly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sass.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sass.shutil, "which", lambda name: None)
    sass.tool.cache_clear()
    with pytest.raises(AuditError, match="install triton"):
        sass.tool("nvdisasm")
    sass.tool.cache_clear()


def test_architecture_names() -> None:
    build = Build(CudaKernel("planted", "k"), ("c",))
    assert [arch_name(build, arch) for arch in ("80", "sm_90", "sm_90a", "sm_100")] == [
        "sm_80",
        "sm_90a",
        "sm_90a",
        "sm_100",
    ]
    with pytest.raises(ValueError, match="no architecture"):
        capability("hopper")
