"""Faults planted into copies of our kernels: each changes bits or ends a launch, and the kernel as it is does neither."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from samebits import registry
from samebits.emulate import cases, judge
from samebits.emulate.cases import Case
from samebits.emulate.launch import Emulator
from samebits.runtime import nvrtc


@dataclass(frozen=True)
class Fault:
    op: str
    entry: str
    before: str
    after: str
    rows: int = 5
    size: int = 520
    """Of the free axis: more than one round, chunk or stage, and an end that fits none."""
    contract: str = ""
    defines: tuple[tuple[str, int], ...] = ()
    """Of the builds in which the fault is one."""


FAULTS = {
    "a barrier that is missing": Fault("mhc_post", "backward_fast", "__syncthreads();", ""),
    "a warp that does not wait for its lanes": Fault("mhc_post", "backward_ascending", "__syncwarp();", ""),
    "a copy that is not waited for": Fault("mhc_post", "backward_ascending", "copies_wait<STAGES - 2>();", ""),
    "a copy waited for one stage too late": Fault(
        "mhc_post", "backward_ascending", "copies_wait<STAGES - 2>();", "copies_wait<STAGES - 1>();"
    ),
    "a stage copied over while it is read": Fault(
        "mhc_post", "backward_ascending", "copy(k + STAGES - 1);", "copy(k + STAGES);"
    ),
    "a tail one too long": Fault(
        "mhc_post", "backward_fast", "store<VEC, 4>(grad_sublayer + token * size, d, d_end,",
        "store<VEC, 4>(grad_sublayer + token * size, d, d_end + 4,", rows=1, size=515,
    ),
    "a tail one too short": Fault(
        "mhc_post", "backward_fast", "const int d_end = (int)size,", "const int d_end = (int)size - 1,", size=17
    ),
    "an index off by one": Fault("mhc_post", "backward_fast", "chain - H * H]", "chain - H * H + 1]"),
    "a fold in another order": Fault(
        "mhc_post", "backward_fast", "add(add(groups[0][chain], groups[2][chain]), add(groups[1][chain], groups[3][chain]))",
        "add(add(groups[0][chain], groups[1][chain]), add(groups[2][chain], groups[3][chain]))",
    ),
    "a product and a sum rounded once": Fault(
        "mhc_post", "backward_fast", "add(sum[i * H + j], mul(left.at[e], g[j].at[e]))",
        "__fmaf_rn(left.at[e], g[j].at[e], sum[i * H + j])",
        defines=(("G_BF16", 0),),  # the product of two BF16 is exact
    ),
    "a row that nobody writes": Fault(
        "mhc_post", "backward_fast", "const i64 token = blockIdx.x;", "const i64 token = blockIdx.x; if (token == 3) return;"
    ),
    "an input that is written to": Fault(
        "mhc_post", "backward_fast", "const i64 token = blockIdx.x;",
        "const i64 token = blockIdx.x; if (token == 4) *const_cast<float*>(comb) = 0.0f;",
    ),
    "a tensor-core stage that not all have left": Fault(
        "fp32_gemm_rms", "fast_sums", "team_sync<TEAMS, WARPS>(team);", "", contract="fast",
        defines=(("WARPS", 4),),
    ),
    "pieces of a weight in another order": Fault(
        "fp32_gemm_rms", "fast_sums", "chains.piece[0][mt][j].at[e], chains.piece[1][mt][j].at[e]",
        "chains.piece[1][mt][j].at[e], chains.piece[0][mt][j].at[e]", contract="fast",
    ),
    "a squared sum that starts late": Fault(
        "fp32_gemm_rms", "sums_few", "int left = size;", "int left = size - 1;", size=17
    ),
}  # fmt: skip


def case_of(fault: Fault) -> Case:
    """A call of the kernel, with everything wanted; aligned, where that is possible at this size."""
    spec = registry.spec(fault.op)
    sizes = {axis: min(fault.size, most) for axis, _, most in spec.size_limits}
    for case in cases.candidates(spec, (fault.rows,), sizes):
        everything = len(case.call.wanted) == len(spec.direction(case.call.backward).results)
        builds = [k for k in case.kernels if k.entry == fault.entry and set(fault.defines) <= set(k.defines)]
        if builds and everything and fault.contract in ("", case.call.contract):
            return case
    raise LookupError(f"no call runs {fault.entry}")


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str) -> None:
    fault = FAULTS[name]
    case = case_of(fault)
    assert not list(judge.findings(case)), "the kernel as it is"
    sources = {}
    for kernel in case.kernels:
        if kernel.entry == fault.entry:
            text = nvrtc.source_text(kernel)
            assert fault.before in text, f"{kernel.source} has changed: plant this fault elsewhere"
            sources[kernel] = text.replace(fault.before, fault.after)
    assert list(judge.findings(case, Emulator(sources=sources)))
