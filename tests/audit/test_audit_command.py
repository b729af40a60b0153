"""``samebits audit`` as a user calls it: exit codes 0, 1 and 2, a readable verdict, JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from audit import planted

from samebits import catalogue, environment, registry
from samebits.audit import compile as compiling
from samebits.audit import listing, lock
from samebits.audit.build import Build
from samebits.cli.audit import audit
from samebits.cli.errors import UserError
from samebits.runtime import nvrtc
from samebits.runtime.nvrtc import CudaKernel

Plant = Callable[..., Path]


def exit_code(*args: object, **options: object) -> int:
    try:
        audit(*args, **options)  # type: ignore[arg-type]
    except typer.Exit as stop:
        return stop.exit_code
    return 0


def test_foreign_files_end_to_end(plant: Plant, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = plant(planted.FMA)
    assert exit_code(str(folder), json=tmp_path / "out.json") == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "fail contraction in planted fused: 1 in PTX" in shown and "fma.rn.f32" in shown and "remedy" in shown
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["clean"] is False and written["reports"][0]["findings"][0]["rule"] == "contraction"
    assert exit_code(str(folder / "planted.cubin"), allow=["fma"]) == 0


@pytest.mark.parametrize(
    "options",
    [
        {"target": "no_such_operator_or_file"},
        {"write_lock": True, "check_lock": True},
        {"write_lock": True, "arch": ["sm_80"]},
        {"write_lock": True, "target": "."},
        {"everything": True},
        {"allow": ["fma"]},
        {"arch": ["hopper"]},
        {"target": ".", "check_lock": True},
        {"target": ".", "arch": ["sm_90"]},
        {"target": ".", "allow": ["speed"]},
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(UserError):
        audit(**options)  # type: ignore[arg-type]


BUILD = Build(CudaKernel("h_aggregate", "clean"), ("ascending",))
OTHER = Build(CudaKernel("h_aggregate", "clean", (("X", 1),)), ("tree256",))


def forget() -> None:
    """As a new process: nothing listed, nothing compiled."""
    listing.everything.cache_clear()
    compiling.compile_build.cache_clear()


@pytest.fixture
def ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """One operator whose kernels' text is ``ours.text`` and whose builds are ``ours.builds``; its checkout is empty.

    ``ours.compiled`` are the names of what was compiled, with the architecture.
    """
    state = SimpleNamespace(text=planted.CLEAN, builds={"cuda": (BUILD,), "triton": (BUILD,)}, compiled=[])
    spec = registry.spec("h_aggregate")

    def backend(name: str) -> SimpleNamespace:
        return SimpleNamespace(builds=lambda: state.builds[name])

    def compiled(kernel: CudaKernel, arch: str) -> nvrtc.Built:
        state.compiled.append(f"{kernel.name} {arch}")
        text = planted.nvrtc_build(state.text, arch.replace("sm_", "compute_"), planted.EXACT)
        return nvrtc.Built(planted.nvrtc_build(state.text, arch, planted.EXACT), text.decode())

    monkeypatch.setattr(nvrtc, "compile_kernel", compiled)
    monkeypatch.setattr(nvrtc, "source_text", lambda kernel: state.text)
    monkeypatch.setattr(catalogue, "names", lambda: ("h_aggregate",))
    monkeypatch.setattr(registry, "operator", lambda name: SimpleNamespace(spec=spec, backend=backend))
    monkeypatch.setattr(environment, "checkout", lambda: tmp_path)
    forget()
    yield state
    forget()


def test_an_operator_is_judged_by_its_contracts(ours: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("h_aggregate", arch=["sm_90"]) == 0
    assert "clean" in capsys.readouterr().out
    ours.text = planted.FMA
    forget()
    assert exit_code("h_aggregate", arch=["sm_90"]) == 1
    assert "fail contraction" in capsys.readouterr().out


def test_a_backend_without_kernels_is_an_error(ours: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    ours.builds["triton"] = ()
    assert exit_code(arch=["sm_90"]) == 1
    assert "lists no kernel" in capsys.readouterr().out
    with pytest.raises(UserError, match="could not be listed"):
        audit(write_lock=True)


def test_a_kernel_listed_twice_is_an_error(ours: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    ours.builds["cuda"] *= 2
    assert exit_code(arch=["sm_90"]) == 1
    assert "listed twice" in capsys.readouterr().out


def test_a_kernel_of_no_operator_is_an_error(ours: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    ours.builds["cuda"] = (Build(CudaKernel("nobody", "clean"), ("ascending",)),)
    assert exit_code(arch=["sm_90"]) == 1
    assert "in no operator's folder" in capsys.readouterr().out


def test_the_lock_end_to_end(ours: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    ours.builds["triton"] = (OTHER,)
    with pytest.raises(UserError, match="no lock"):
        audit(check_lock=True)
    assert exit_code(write_lock=True) == 0
    assert exit_code(check_lock=True) == 0
    ours.text = planted.CLEAN.replace("+ 1.0f /", "+ 3.0f * a[n] + 1.0f /")
    forget()
    capsys.readouterr()
    assert exit_code("h_aggregate", arch=["sm_90"], check_lock=True) == 1
    assert "machine code changed" in capsys.readouterr().out


def test_only_what_changed_is_compiled_for_the_lock(ours: SimpleNamespace, tmp_path: Path) -> None:
    path = tmp_path / "tests" / "golden" / "audit.lock.json"
    assert exit_code(write_lock=True) == 0
    first = path.read_text()
    assert len(ours.compiled) == 3
    ours.builds["triton"] = (OTHER,)
    forget()
    assert exit_code(write_lock=True) == 0
    assert ours.compiled[3:] == ["clean[X=1] sm_80", "clean[X=1] sm_90a", "clean[X=1] sm_100"]
    forget()
    assert exit_code(write_lock=True, everything=True) == 0
    assert len(ours.compiled) == 12
    ours.builds["triton"] = (BUILD,)
    forget()
    assert exit_code(write_lock=True) == 0
    assert path.read_text() == first, "an entry that no build has any more is gone"


def test_the_lock_of_one_operator(
    ours: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its changed and stale entries are renewed, those of others stay as they are, whatever their sources are by now."""
    path = tmp_path / "tests" / "golden" / "audit.lock.json"
    with pytest.raises(UserError, match="no lock"):
        audit("h_aggregate", write_lock=True)
    assert exit_code(write_lock=True) == 0
    whole = path.read_text()
    entry = '"mhc_post/cuda/other sm_80": {"fingerprint": "of older code", "opcodes": "FADD:1"},\n'
    path.write_text(whole.replace('"kernels": {\n', '"kernels": {\n' + entry))
    ours.text = planted.CLEAN.replace("+ 1.0f /", "+ 3.0f * a[n] + 1.0f /")
    ours.builds["triton"] = (OTHER,)
    forget()
    capsys.readouterr()
    assert exit_code("h_aggregate", write_lock=True) == 0
    assert "6 entries written, 1 kept" in " ".join(capsys.readouterr().out.split())
    recorded = json.loads(path.read_text())["kernels"]
    assert len(recorded) == 7
    assert json.dumps(recorded["mhc_post/cuda/other sm_80"]) == entry.partition(": ")[2].strip(",\n")
    monkeypatch.setattr(lock, "compilers", lambda: {"nvrtc": "99.0.1", "triton": "3.6.0"})
    with pytest.raises(UserError, match="write the whole lock"):
        audit("h_aggregate", write_lock=True)


def test_a_build_is_compiled_where_it_is_launched(ours: SimpleNamespace, tmp_path: Path) -> None:
    hopper = Build(BUILD.kernel, ("ascending",), (90,))
    ours.builds = {"cuda": (hopper,), "triton": (OTHER,)}
    assert exit_code(write_lock=True) == 0
    assert ours.compiled == ["clean sm_90a", "clean[X=1] sm_80", "clean[X=1] sm_90a", "clean[X=1] sm_100"]
    path = tmp_path / "tests" / "golden" / "audit.lock.json"
    assert lock.check_inputs(path, listing.everything(), compiling.ARCHES).status == "same"
    assert exit_code("h_aggregate", check_lock=True) == 0
    ours.builds["triton"] = (OTHER, Build(BUILD.kernel, ("tree256",), (80,)))
    forget()
    (both,) = (j for j in listing.everything() if isinstance(j, listing.Job) and j.build.kernel == BUILD.kernel)
    assert both.build.arches == (80, 90)
    assert exit_code("h_aggregate", check_lock=True) == 1, "the lock lacks one of the two"


def test_code_with_findings_is_not_recorded(
    ours: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(write_lock=True) == 0
    ours.text = planted.FMA
    forget()
    capsys.readouterr()
    assert exit_code(write_lock=True) == 1
    assert "3 not recorded" in " ".join(capsys.readouterr().out.split())
    listed = listing.everything()
    lines = lock.check_inputs(tmp_path / "tests" / "golden" / "audit.lock.json", listed, compiling.ARCHES).lines
    assert [line.partition(":")[0] for line in lines] == ["not recorded"] * 3
