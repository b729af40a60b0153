"""The device language on a CPU: each thing a kernel may do, and each thing it must not."""

from __future__ import annotations

import pytest
import torch
from emulate import probe

from samebits.emulate import build, translate
from samebits.emulate.elementary import Elementary
from samebits.emulate.launch import Emulator, KernelFault, emulated
from samebits.exact.compare import first_difference
from samebits.exact.tensor_core import chain

CONVERT = {
    ("bf16", "float"): (torch.bfloat16, torch.float32, "out[t] = widen(in[t]);"),
    ("half", "float"): (torch.float16, torch.float32, 'asm("cvt.f32.f16 %0, %1;" : "=f"(out[t]) : "h"(in[t]));'),
    ("float", "bf16"): (torch.float32, torch.bfloat16, "out[t] = narrow(in[t]);"),
    ("float", "half"): (torch.float32, torch.float16, 'asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out[t]) : "f"(in[t]));'),
}


def every_value(dtype: torch.dtype) -> torch.Tensor:
    """All values of a 16-bit type; of FP32 those halfway between two, near them, and at the edges."""
    if dtype != torch.float32:
        return torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    halves = torch.arange(1 << 16, dtype=torch.int64) << 16
    bits = torch.cat([halves + low for low in (0, 0x7FFF, 0x8000, 0x8001, 0x0FFF, 0x1000, 0x1001, 0x3000)])
    return ((bits + (1 << 31)) % (1 << 32) - (1 << 31)).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("source, target", CONVERT)
def test_conversions_have_the_bits_of_torch(source: str, target: str) -> None:
    given, wanted, line = CONVERT[source, target]
    values = every_value(given)
    got = torch.zeros(values.shape, dtype=wanted)
    types = "typedef unsigned short half;"
    body = f"for (i64 t = threadIdx.x; t < count; t += blockDim.x) {{ {line} }}"
    probe.run(probe.kernel(f"const {source}* in, {target}* out, i64 count", body, types), values, got, values.numel())
    expected = values.to(wanted)
    assert torch.equal(expected.isnan(), got.isnan())
    integer = torch.int32 if wanted == torch.float32 else torch.int16
    assert torch.equal(expected.nan_to_num().view(integer), got.nan_to_num().view(integer))


@pytest.mark.parametrize("name, line", [
    ("rsqrt", "out[t] = rsqrtf(in[t]);"),
    ("exp", "out[t] = expf(in[t]);"),
    ("sin", "float other; sincosf(in[t], out + t, &other);"),
    ("cos", "float other; sincosf(in[t], &other, out + t);"),
    ("sigmoid", "out[t] = __fdiv_rn(1.0f, add(1.0f, expf(-in[t])));"),
])  # fmt: skip
def test_elementary_functions_are_those_of_the_reference(name: str, line: str) -> None:
    values = torch.linspace(-30, 60, 4097)
    got = torch.zeros(values.shape)
    body = f"for (i64 t = threadIdx.x; t < count; t += blockDim.x) {{ {line} }}"
    probe.run(probe.kernel("const float* in, float* out, i64 count", body), values, got, values.numel())
    with Elementary():
        expected = getattr(torch, name)(values)
        again = getattr(values, name)()
    assert torch.allclose(expected, getattr(torch, name)(values.double()).float(), rtol=2e-7, atol=0, equal_nan=True)
    for other in (expected, again):
        assert first_difference(other, got, payloads=False) is None


PAIRS = """
  unsigned to;
  asm("fma.rn.FORMAT %0, %1, %2, %3;" : "=r"(to) : "r"(a[threadIdx.x]), "r"(b[threadIdx.x]), "r"(c[threadIdx.x]));
  out[threadIdx.x] = to;
"""


@pytest.mark.parametrize("name, dtype", [("bf16x2", torch.bfloat16), ("f16x2", torch.float16)])
def test_pairs_are_multiplied_and_added_with_one_rounding(name: str, dtype: torch.dtype) -> None:
    """A product and a sum have the bits of FP32 and then the narrow type; a fused one those of exact arithmetic."""
    generator = torch.Generator().manual_seed(6)
    words = torch.randint(-(2**15), 2**15, (3, 1024, 32, 2), generator=generator).to(torch.int16)
    words[:, :32] = torch.tensor([0, -(2**15), 1, 0x7F80 if dtype == torch.bfloat16 else 0x7C00], dtype=torch.int16)[
        torch.randint(0, 4, (3, 32, 32, 2), generator=generator)
    ]  # zeros, the least subnormal, infinity
    near = words.clone()
    near[1], near[2] = words[0] ^ (words[1] & 0x3F), words[2]
    one, minus_zero = torch.ones((), dtype=dtype).view(torch.int16), torch.tensor(-(2**15), dtype=torch.int16)
    source = probe.kernel(
        "const unsigned* all_a, const unsigned* all_b, const unsigned* all_c, unsigned* all",
        "const i64 at = blockIdx.x * 32; const unsigned *a = all_a + at, *b = all_b + at, *c = all_c + at;"
        "unsigned* out = all + at;" + PAIRS.replace("FORMAT", name),
    )

    def run(*given: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(1024, 32, dtype=torch.int32)
        shaped = [t.expand(1024, 32, 2).contiguous().view(torch.int32) for t in given]
        probe.run(source, *shaped, out, grid=1024)
        return out.view(dtype)

    for a, b, c in (words, near):
        x, y, z = (t.view(dtype) for t in (a, b, c))
        flat = (1024, 64)
        for got, expected in (
            (run(a, b, minus_zero), (x.float() * y.float()).to(dtype)),
            (run(a, one, b), (x.float() + y.float()).to(dtype)),
        ):
            assert first_difference(expected.view(flat), got.view(flat), payloads=False) is None
        exact = x.double() * y.double() + z.double()
        sure = exact.isfinite() & (exact.abs() < torch.finfo(dtype).max) & (exact.abs() > torch.finfo(dtype).tiny)
        error = (run(a, b, c).view(x.shape).double() - exact).abs() / exact.abs()
        assert error[sure].max() <= torch.finfo(dtype).eps / 2 * (1 + 1e-6)
        twice = ((x.float() * y.float()).to(dtype).float() + z.float()).to(dtype)
        assert ((twice.double() - exact).abs() / exact.abs())[sure].max() > torch.finfo(
            dtype
        ).eps  # two roundings are not it


def test_memory_that_an_operator_allocates_is_full_of_nan() -> None:
    like = torch.zeros(3)
    with emulated(Emulator()):
        for made in (torch.empty(64), like.new_empty(64), torch.empty_like(like)):
            assert bool(made.isnan().all())
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("width", [8, 16, 32])
def test_a_shuffle_takes_from_a_lane_of_its_own_part(width: int) -> None:
    given = torch.arange(100, 132, dtype=torch.int32)
    lanes = torch.randint(0, width, (32,), generator=torch.Generator().manual_seed(8), dtype=torch.int32)
    got = torch.zeros_like(given)
    body = f"out[threadIdx.x] = __shfl_sync(0xffffffffu, in[threadIdx.x], from[threadIdx.x], {width});"
    probe.run(probe.kernel("const unsigned* in, const int* from, unsigned* out", body), given, lanes, got)
    assert got.tolist() == [100 + t // width * width + int(lanes[t]) for t in range(32)]


MMA = """
  const int g = threadIdx.x / 4, q = threadIdx.x % 4;
  const auto pair = [](const unsigned short* row, int k) { return (unsigned)row[k] | (unsigned)row[k + 1] << 16; };
  const unsigned short *a0 = a + g * 16, *a1 = a + (g + 8) * 16, *column = b + g * 16;
  unsigned r0 = pair(a0, 2 * q), r1 = pair(a1, 2 * q), r2 = pair(a0, 2 * q + 8), r3 = pair(a1, 2 * q + 8);
  unsigned s0 = pair(column, 2 * q), s1 = pair(column, 2 * q + 8);
  float c[4];
  for (int i = 0; i < 4; ++i) c[i] = io[(g + i / 2 * 8) * 8 + 2 * q + i % 2];
  asm("mma.sync.aligned.m16n8k16.row.col.f32.FORMAT.FORMAT.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(r0), "r"(r1), "r"(r2), "r"(r3), "r"(s0), "r"(s1));
  for (int i = 0; i < 4; ++i) io[(g + i / 2 * 8) * 8 + 2 * q + i % 2] = c[i];
"""


@pytest.mark.parametrize("name, dtype", [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_the_tensor_core_is_the_exact_model(name: str, dtype: torch.dtype) -> None:
    source = probe.kernel(
        "const unsigned short* all_a, const unsigned short* all_b, float* all",
        "const unsigned short *a = all_a + blockIdx.x * 256, *b = all_b + blockIdx.x * 128; float* io = all + blockIdx.x * 128;"
        + MMA.replace("FORMAT", name),
    )
    generator, groups = torch.Generator().manual_seed(5), 240

    def drawn(*shape: int, widest: int) -> torch.Tensor:
        spread = torch.arange(groups) % (widest + 1)  # from one binade to all that there are
        exponent = (torch.rand(groups, *shape, generator=generator) - 0.5) * 2 * spread.view(-1, 1, 1)
        values = torch.randn(groups, *shape, generator=generator) * torch.exp2(exponent.round())
        return torch.where(torch.rand(values.shape, generator=generator) < 0.1, 0.0, values)

    widest = 62 if dtype == torch.bfloat16 else 20
    a, b = drawn(16, 16, widest=widest).to(dtype), drawn(8, 16, widest=widest).to(dtype)
    a, b = a.nan_to_num(posinf=3.0, neginf=-3.0), b.nan_to_num(posinf=3.0, neginf=-3.0)
    a[::7] *= 2.0 ** (
        -120 if dtype == torch.bfloat16 else -20
    )  # subnormal products, and results below the normal range
    start = drawn(16, 8, widest=100) * (torch.arange(groups) % 3 > 0).view(-1, 1, 1)
    got = start.clone()
    probe.run(source, a, b, got, grid=groups)
    expected = chain(a, b, start)
    assert expected.isfinite().float().mean() > 0.9
    assert (expected != 0).float().mean() > 0.9
    assert torch.equal(
        (got + 0.0).view(torch.int32), (expected + 0.0).view(torch.int32)
    )  # a zero's sign is not promised


def test_the_tensor_core_of_8_bit_integers_is_exact() -> None:
    body = """
  const int g = threadIdx.x / 4, q = threadIdx.x % 4;
  const unsigned *a0 = a + g * 8, *a1 = a + (g + 8) * 8, *column = b + g * 8;
  int c[4];
  for (int i = 0; i < 4; ++i) c[i] = io[(g + i / 2 * 8) * 8 + 2 * q + i % 2];
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0[q]), "r"(a1[q]), "r"(a0[q + 4]), "r"(a1[q + 4]), "r"(column[q]), "r"(column[q + 4]));
  for (int i = 0; i < 4; ++i) io[(g + i / 2 * 8) * 8 + 2 * q + i % 2] = c[i];
"""
    generator = torch.Generator().manual_seed(7)
    a, b = (torch.randint(-128, 128, (rows, 32), generator=generator, dtype=torch.int8) for rows in (16, 8))
    a[3], b[5] = -128, -128
    start = torch.randint(-(2**31), 2**31, (16, 8), generator=generator).to(torch.int32)  # sums wrap
    got = start.clone()
    probe.run(probe.kernel("const unsigned* a, const unsigned* b, int* io", body), a, b, got)
    assert torch.equal(got, (a.long() @ b.long().t() + start).to(torch.int32))


def test_a_tensor_core_is_not_finite_where_its_operands_are_not() -> None:
    a, b, io = torch.ones(16, 16).bfloat16(), torch.ones(8, 16).bfloat16(), torch.zeros(16, 8)
    a[3, 5] = float("inf")
    parameters = "const unsigned short* a, const unsigned short* b, float* io"
    probe.run(probe.kernel(parameters, MMA.replace("FORMAT", "bf16")), a, b, io)
    assert not io[3].isfinite().any()
    assert bool((io[torch.arange(16) != 3] == 16).all())


SHIFT = "__shared__ int held[64]; held[threadIdx.x] = threadIdx.x; {} out[threadIdx.x] = held[(threadIdx.x + {}) % 64];"


@pytest.mark.parametrize("by", (1, 63))
def test_a_missing_barrier_is_a_wrong_result_in_one_of_the_orders(by: int) -> None:
    right = (torch.arange(64, dtype=torch.int32) + by) % 64
    for barrier, orders in (("__syncthreads();", {True}), ("", {True, False})):
        seen = set()
        for descending in (False, True):
            out = torch.zeros(64, dtype=torch.int32)
            probe.run(probe.kernel("int* out", SHIFT.format(barrier, by)), out, block=64, descending=descending)
            seen.add(torch.equal(out, right))
        assert seen == orders or (not barrier and False in seen)


COPY = """
  __shared__ __align__(16) float held[4];
  if (threadIdx.x == 0) {{
    const unsigned target = (unsigned)__cvta_generic_to_shared(held);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(in), "r"(given) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
    {}
    for (int i = 0; i < 4; ++i) out[i] = held[i];
  }}
"""


def copied(wait: str, given: int = 16) -> list[float]:
    source = probe.kernel("const float* in, float* out, i64 bytes", "const int given = (int)bytes;" + COPY.format(wait))
    out = torch.zeros(4)
    probe.run(source, torch.tensor([1.0, 2.0, 3.0, 4.0]), out, given)
    return out.tolist()


def test_a_copy_is_there_when_it_was_waited_for_and_not_earlier() -> None:
    wait = 'asm volatile("cp.async.wait_group %0;" ::"n"({}) : "memory");'
    assert copied(wait.format(0)) == copied(wait.format(1)) == [1.0, 2.0, 3.0, 4.0]
    assert copied(wait.format(0), given=4) == [1.0, 0.0, 0.0, 0.0]
    for missing in ("", wait.format(2)):
        assert all(value != value for value in copied(missing))


def test_what_a_block_left_in_shared_memory_is_nobodys() -> None:
    body = """
      __shared__ float held[32];
      extern __shared__ float more[];
      if (threadIdx.x == 0) out[2 * blockIdx.x] = held[0], out[2 * blockIdx.x + 1] = more[0], held[0] = more[0] = 5;
    """
    out = torch.zeros(2, 2)
    probe.run(probe.kernel("float* out", body), out, grid=2, shared=16)
    assert bool(out.isnan().all())


FAULTS = {
    "read behind a tensor": ("out[0] = in[8];", "bytes from the 32 bytes of parameter 0"),
    "read before a tensor": ("out[0] = in[-1];", "bytes from the 32 bytes of parameter 0"),
    "write behind a tensor": ("out[8] = 0;", "the 32 bytes of parameter 1"),
    "far away": ("out[0] = in[100000];", "access to"),
    "null": ("const float* n = nullptr; out[0] = n[threadIdx.x];", "access to"),
    "index of a register array": ("float r[4] = {}; out[0] = r[threadIdx.x];", "index 4 is outside its array"),
    "index of shared memory": ("__shared__ float s[16]; s[threadIdx.x] = 0;", "index 16 is outside its array"),
    "dynamic shared memory": ("extern __shared__ __align__(16) float s[]; s[16] = 0;", "access to"),
    "alignment": ("out[0] = reinterpret_cast<const float4*>(in + 1)->x;", "not aligned"),
    "a barrier that not all reach": ("if (threadIdx.x < 7) __syncwarp(); else __syncthreads();", "wait for ever"),
    "a named barrier that too few reach": ('asm volatile("bar.sync 1, %0;" ::"n"(64) : "memory");', "wait for ever"),
    "a lane that has returned": ("if (threadIdx.x == 3) return; __syncwarp();", "returns"),
    "lanes at different instructions": (
        "if (threadIdx.x < 16) __syncwarp(); else __ballot_sync(0xffffffffu, true);",
        "__ballot_sync",
    ),
    "some lanes": ("__ballot_sync(1u, true);", "whole warps"),
    "an address that is not shared": ("__cvta_generic_to_shared(in);", "outside shared memory"),
    "an assertion": ('require(threadIdx.x < 9, "nine of them");', "nine of them"),
    "an assumption": ("__builtin_assume(threadIdx.x < 9);", "assumed"),
    "a shift": ("out[0] = 1 << (threadIdx.x + 31);", "shift by 32"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_ends_the_launch_and_says_what_it_was(name: str) -> None:
    body, words = FAULTS[name]
    source = probe.kernel("const float* in, float* out", body, '#include "guard.cuh"')
    messages = []
    for descending in (False, True):  # each has the fence on another side of a tensor, and meets another lane first
        try:
            probe.run(source, torch.zeros(8), torch.zeros(8), shared=64, descending=descending)
        except KernelFault as fault:
            messages.append(str(fault))
        good = torch.zeros(8)
        probe.run(
            probe.kernel("float* out", "if (threadIdx.x < 8) out[threadIdx.x] = 1;"), good
        )  # the next launch is whole
        assert bool((good == 1).all())
    assert any(words in message for message in messages), messages
    assert len(messages) == 2 or "read" in name or name == "dynamic shared memory", messages


LIMITS = {
    "threads": ({"block": 65}, "1 to 64 threads"),
    "blocks": ({"grid": 0}, "by 1 to 65535 blocks"),
    "shared memory": ({"shared": 232449}, "shared memory"),
}


@pytest.mark.parametrize("name", LIMITS)
def test_a_launch_that_a_gpu_refuses(name: str) -> None:
    options, words = LIMITS[name]
    with pytest.raises(KernelFault, match=words):
        probe.run(probe.kernel("float* out", "", bounds=64), torch.zeros(1), **options)


@pytest.mark.parametrize(
    "args, words", [((), "given 0 arguments"), ((3,), "p8"), ((torch.zeros(1), 2.0), "given 2"), ((7,), "p8")]
)
def test_arguments_must_be_what_the_kernel_takes(args: tuple[object, ...], words: str) -> None:
    with pytest.raises(KernelFault, match=words):
        probe.run(probe.kernel("float* out", ""), *args)


def test_an_instruction_that_is_not_known_is_named() -> None:
    with pytest.raises(build.CompileError, match="mapa_u64"):
        probe.run(probe.kernel("i64 n", 'i64 p; asm("mapa.u64 %0, %1, %2;" : "=l"(p) : "l"(n), "r"(0));'), 1)
    with pytest.raises(translate.UnknownSource, match="@p bra"):
        probe.run(probe.kernel("i64 n", 'asm volatile("@p bra there;");'), 1)
