"""Kernels for the audit's own tests: planted faults, built with options that samebits itself would refuse."""

from __future__ import annotations

import functools

EXACT = ("--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")

CLEAN = """extern "C" __global__ void clean(float* a, const float* b, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) a[i] = sqrtf((b[i] * b[i + n] + a[i]) / b[i + 2 * n]) + 1.0f / b[i + 3 * n] + (float)(i / n);
}"""
FMA = """extern "C" __global__ void fused(float* a) { a[0] = __fmaf_rn(a[1], a[2], a[3]); }"""
PLAIN = """extern "C" __global__ void plain(float* a) { a[0] = a[1] * a[2] + a[3]; }"""
FLUSH = """extern "C" __global__ void flush(float* a) { a[0] = a[1] + a[2]; }"""
RSQRT = """extern "C" __global__ void root(float* a) { a[0] = rsqrtf(a[1]); }"""
QUICK = """extern "C" __global__ void quick(float* a) { a[0] = __fdividef(a[1], a[2]); }"""
ATOMIC = """extern "C" __global__ void atomic(float* a) { atomicAdd(a, a[threadIdx.x + 1]); }"""
COUNTER = """extern "C" __global__ void counter(int* a) { atomicAdd(a, a[threadIdx.x + 1]); }"""
LOCAL = """extern "C" __global__ void local(float* a, int n) {
    float t[64];
    for (int i = 0; i < 64; i++) t[i] = a[i];
    for (int j = 0; j < n; j++) t[(j * 7 + n) & 63] = t[(j * n) & 63] + t[j & 63];
    a[n] = t[n & 63];
}"""
PACKED = """extern "C" __global__ void packed(unsigned long long* a) {
    unsigned long long x = a[0], y = a[1], z = a[2], m, r;
    asm("mul.rn.f32x2 %0, %1, %2;" : "=l"(m) : "l"(x), "l"(y));
    asm("add.rn.f32x2 %0, %1, %2;" : "=l"(r) : "l"(m), "l"(z));
    a[3] = r;
}"""
TENSOR = """extern "C" __global__ void tensor(float* d, const unsigned* s) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(s[0]), "r"(s[1]), "r"(s[2]), "r"(s[3]), "r"(s[4]), "r"(s[5]));
}"""


@functools.cache
def nvrtc_build(source: str, arch: str, options: tuple[str, ...]) -> bytes:
    from cuda.bindings import nvrtc

    def need(status: object) -> None:
        assert int(status) == 0, status  # type: ignore[call-overload]

    status, program = nvrtc.nvrtcCreateProgram(source.encode(), b"planted.cu", 0, [], [])
    need(status)
    given = [f"-arch={arch}".encode(), *(option.encode() for option in options)]
    need(nvrtc.nvrtcCompileProgram(program, len(given), given)[0])
    machine = arch.startswith("sm_")
    status, size = nvrtc.nvrtcGetCUBINSize(program) if machine else nvrtc.nvrtcGetPTXSize(program)
    need(status)
    code = b" " * size
    need((nvrtc.nvrtcGetCUBIN if machine else nvrtc.nvrtcGetPTX)(program, code)[0])
    return code
