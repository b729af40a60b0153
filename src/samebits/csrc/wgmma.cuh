// Hopper's warpgroup product, wgmma.mma_async (sm_90a): D (64 x N, FP32, in registers) += A (64 x 16) B (16 x N), BF16 or FP16 by
// ELEMENT (1, 2). Its bits are those of mma.sync: one chain step of samebits.exact.tensor_core for every element.
//
// A warpgroup is four consecutive warps, the first at a multiple of four. In it thread 32 w + 4 g + q holds of D
//   c[4 j + 0], c[4 j + 1]   row 16 w + g,     columns 8 j + 2 q, 8 j + 2 q + 1
//   c[4 j + 2], c[4 j + 3]   row 16 w + g + 8, the same columns
// and, where A is in registers, of A: a[0] row g, columns 2 q, 2 q + 1; a[1] row g + 8; a[2] row g, columns 2 q + 8, 2 q + 9;
// a[3] row g + 8, those columns (pairs, the lower index in the lower half; rows within the warp's 16).
//
// An operand in shared memory is what a TMA box with the 128-byte swizzle leaves, at a multiple of 1024 bytes:
//   K-major (the reduction axis is dense): lines of 64 reduction indices, one per row. `k_major(address)`; the next 16 reduction
//     indices are at address + 32.
//   MN-major (the rows are dense; "turned"): boxes of 64 rows, each of as many lines as it has reduction indices; `mn_major(address,
//     bytes of a box)`; the next 16 reduction indices are at address + 2048.
//
// Order: fence(); products; commit(); wait<n>() until at most n committed groups are in flight. Between fence and wait nothing
// else may touch c. fence() again where other code has written c (or a) since.
#pragma once
#include "numbers.cuh"

namespace wgmma {

__device__ __forceinline__ void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// The compiler may not move what reads or writes c across this.
template <int COUNT>
__device__ __forceinline__ void pin(float (&c)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(c[i])::"memory");
}

// The descriptor of an operand with the 128-byte swizzle: address, leading and stride byte offsets, each in units of 16 bytes.
__device__ __forceinline__ unsigned long long descriptor(unsigned address, unsigned leading, unsigned stride) {
  return (unsigned long long)((address & 0x3ffff) >> 4) | (unsigned long long)(leading >> 4) << 16 |
         (unsigned long long)(stride >> 4) << 32 | 1ull << 62;
}
// The same operand so many bytes further.
__device__ __forceinline__ unsigned long long moved(unsigned long long descriptor, unsigned bytes) { return descriptor + (bytes >> 4); }
__device__ __forceinline__ unsigned long long k_major(unsigned address) { return descriptor(address, 16, 1024); }
__device__ __forceinline__ unsigned long long mn_major(unsigned address, unsigned box) { return descriptor(address, box, 1024); }

// A warpgroup gives registers back or takes more; COUNT per thread, a multiple of 8.
template <int COUNT>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

#if ELEMENT == 1
#define WGMMA_TYPES "f32.bf16.bf16"
#elif ELEMENT == 2
#define WGMMA_TYPES "f32.f16.f16"
#endif

// --- one instruction per N --------------------------------------------------------------------------------------------
#define WGMMA_R32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, " \
  "%23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_R44 WGMMA_R32 ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43"
#define WGMMA_R48 WGMMA_R32 ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_R64 WGMMA_R32 ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, " \
  "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_R68 WGMMA_R64 ", " \
  "%64, %65, %66, %67"
#define WGMMA_R72 WGMMA_R64 ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71"
#define WGMMA_R80 WGMMA_R64 ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define WGMMA_R88 WGMMA_R64 ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, " \
  "%85, %86, %87"
#define WGMMA_R96 WGMMA_R64 ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, " \
  "%85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_R116 WGMMA_R96 ", " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, " \
  "%114, %115"
#define WGMMA_R128 WGMMA_R96 ", " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, " \
  "%114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define WGMMA_C4(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define WGMMA_C8(i) WGMMA_C4(i), WGMMA_C4(i + 4)
#define WGMMA_C16(i) WGMMA_C8(i), WGMMA_C8(i + 8)
#define WGMMA_C32(i) WGMMA_C16(i), WGMMA_C16(i + 16)
#define WGMMA_C64(i) WGMMA_C32(i), WGMMA_C32(i + 32)

template <int N>
struct Product;

// REGISTERS = N / 2, their names, and the numbers of the operands behind them.
#define WGMMA_PRODUCT(N, REGISTERS, O0, O1, O2, O3, O4, O5, O6, ...)                                                             \
  template <>                                                                                                                 \
  struct Product<N> {                                                                                                         \
    template <bool TURNED_A, bool TURNED_B>                                                                                   \
    __device__ static __forceinline__ void add(float (&c)[N / 2], unsigned long long a, unsigned long long b, int carry) {    \
      asm volatile("{.reg .pred carry; setp.ne.b32 carry, %" #O2 ", 0; "                                                      \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16." WGMMA_TYPES " {" REGISTERS "}, %" #O0 ", %" #O1              \
                   ", carry, 1, 1, %" #O3 ", %" #O4 ";}"                                                                      \
                   : __VA_ARGS__                                                                                              \
                   : "l"(a), "l"(b), "r"(carry), "n"((int)TURNED_A), "n"((int)TURNED_B));                                     \
    }                                                                                                                         \
    template <bool TURNED_B>                                                                                                  \
    __device__ static __forceinline__ void add(float (&c)[N / 2], const unsigned (&a)[4], unsigned long long b, int carry) {  \
      asm volatile("{.reg .pred carry; setp.ne.b32 carry, %" #O5 ", 0; "                                                      \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16." WGMMA_TYPES " {" REGISTERS "}, {%" #O0 ", %" #O1 ", %" #O2   \
                   ", %" #O3 "}, %" #O4 ", carry, 1, 1, %" #O6 ";}"                                                           \
                   : __VA_ARGS__                                                                                              \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(carry), "n"((int)TURNED_B));                     \
    }                                                                                                                         \
  };
WGMMA_PRODUCT(64, WGMMA_R32, 32, 33, 34, 35, 36, 37, 38, WGMMA_C32(0))
WGMMA_PRODUCT(88, WGMMA_R44, 44, 45, 46, 47, 48, 49, 50, WGMMA_C32(0), WGMMA_C8(32), WGMMA_C4(40))
WGMMA_PRODUCT(96, WGMMA_R48, 48, 49, 50, 51, 52, 53, 54, WGMMA_C32(0), WGMMA_C16(32))
WGMMA_PRODUCT(128, WGMMA_R64, 64, 65, 66, 67, 68, 69, 70, WGMMA_C64(0))
WGMMA_PRODUCT(136, WGMMA_R68, 68, 69, 70, 71, 72, 73, 74, WGMMA_C64(0), WGMMA_C4(64))
WGMMA_PRODUCT(144, WGMMA_R72, 72, 73, 74, 75, 76, 77, 78, WGMMA_C64(0), WGMMA_C8(64))
WGMMA_PRODUCT(160, WGMMA_R80, 80, 81, 82, 83, 84, 85, 86, WGMMA_C64(0), WGMMA_C16(64))
WGMMA_PRODUCT(176, WGMMA_R88, 88, 89, 90, 91, 92, 93, 94, WGMMA_C64(0), WGMMA_C16(64), WGMMA_C8(80))
WGMMA_PRODUCT(192, WGMMA_R96, 96, 97, 98, 99, 100, 101, 102, WGMMA_C64(0), WGMMA_C32(64))
WGMMA_PRODUCT(232, WGMMA_R116, 116, 117, 118, 119, 120, 121, 122, WGMMA_C64(0), WGMMA_C32(64), WGMMA_C16(96), WGMMA_C4(112))
WGMMA_PRODUCT(256, WGMMA_R128, 128, 129, 130, 131, 132, 133, 134, WGMMA_C64(0), WGMMA_C64(64))

// c += A B, both in shared memory (descriptors), or A in registers; `carry` false: c = A B.
template <int N, bool TURNED_A, bool TURNED_B>
__device__ __forceinline__ void add(float (&c)[N / 2], unsigned long long a, unsigned long long b, bool carry = true) {
  Product<N>::template add<TURNED_A, TURNED_B>(c, a, b, carry);
}
template <int N, bool TURNED_B>
__device__ __forceinline__ void add(float (&c)[N / 2], const unsigned (&a)[4], unsigned long long b, bool carry = true) {
  Product<N>::template add<TURNED_B>(c, a, b, carry);
}

}  // namespace wgmma
