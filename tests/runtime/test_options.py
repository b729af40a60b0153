"""E12: no option that relaxes the arithmetic reaches a kernel, whoever asks for it."""

from __future__ import annotations

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
