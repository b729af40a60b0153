"""E12: no option that relaxes the arithmetic reaches a kernel, whoever asks for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from samebits import registry
from samebits.runtime import nvrtc, triton_build
from samebits.runtime.nvrtc import CompileError, CudaKernel

RELAXED = (
    "--use_fast_math",
    "-use_fast_math",
    "--fmad=true",
    "-fmad=true",
    "--ftz=true",
    "--prec-div=false",
    "--prec-sqrt=false",
    "-DX=--use_fast_math",
)
KERNEL = CudaKernel("h_aggregate", "forward", (("VEC", 1),))


@pytest.mark.parametrize("option", RELAXED)
def test_relaxed_options_are_refused(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="relaxes the arithmetic"):
        nvrtc.refuse_relaxed((*nvrtc.OPTIONS, option))
    monkeypatch.setattr(nvrtc, "OPTIONS", (*nvrtc.OPTIONS, option))
    with pytest.raises(ValueError, match="relaxes the arithmetic"):
        nvrtc.options(KERNEL, "sm_90a")


@pytest.mark.parametrize(
    "option",
    [
        "--ftz=yes",
        "--ftz",
        "true",
        "-optf",
        "--options-file=relaxed.txt",
        "@relaxed.txt",
        "-arch=compute_90",
        "-DX=a b",
    ],
)
def test_unknown_options_are_refused(option: str) -> None:
    """Fails closed: another spelling, a value that is neither exact nor relaxed, a file that nobody has read."""
    with pytest.raises(ValueError, match="might relax the arithmetic"):
        nvrtc.refuse_relaxed((*nvrtc.OPTIONS, option))


def test_every_build_says_what_it_must_be() -> None:
    for name in registry.names():
        for build in registry.operator(name).backend("cuda").builds():
            chosen = nvrtc.options(build.kernel, "sm_90a")
            assert {"--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true"} <= set(chosen)
    assert triton_build.OPTIONS["enable_fp_fusion"] is False


@pytest.mark.parametrize("variable", ["NVRTC_APPEND_FLAGS", "NVRTC_PREPEND_FLAGS"])
def test_options_from_the_environment_are_refused(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "--use_fast_math")
    with pytest.raises(CompileError, match=variable):
        nvrtc.compile_kernel(KERNEL, "sm_90a")


NVCC_VARIABLES = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "TORCH_NVCC_FLAGS", "CFLAGS", "CXXFLAGS", "CUDAFLAGS")
RELAXING = (
    "--use_fast_math",
    "-use_fast_math",
    "--ftz=true --prec-div=false --prec-sqrt=false --fmad=true",
    "--options-file {file}",
    "--options-file=missing.txt,{file}",
    "-optf {file}",
    '"--use_fast_math',
)


@pytest.mark.parametrize("flags", RELAXING)
def test_variables_of_nvcc_change_nothing(flags: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """NVRTC reads none of them, in whatever spelling: the machine code is the same to the byte."""
    exact = nvrtc.compile_kernel(KERNEL, "sm_90a")
    file = tmp_path / "relaxed.txt"
    file.write_text("--use_fast_math --ftz=true")
    for variable in NVCC_VARIABLES:
        monkeypatch.setenv(variable, flags.format(file=file))
    assert nvrtc.compile_kernel(KERNEL, "sm_90a").cubin == exact.cubin
