// The BF16 tensor-core instruction, and how its operands come from shared memory. sm_80 and later.
//
// mma: C (16 x 8, FP32) += A (16 x 16, BF16) B (16 x 8, BF16). Its bits are those of samebits.exact.tensor_core: the 16
// products and C are added in one step. In a warp, lane = 4 g + q holds
//   A: at[0] row g, columns 2q, 2q+1;  at[1] row g+8;  at[2] row g, columns 2q+8, 2q+9;  at[3] row g+8, those columns
//   B: at[0] rows 2q, 2q+1 of column g;  at[1] rows 2q+8, 2q+9
//   C: at[0], at[1] row g, columns 2q, 2q+1;  at[2], at[3] row g+8
// A register of A or B holds two BF16, the one of the lower index in its lower half.
#pragma once
#include "numbers.cuh"

struct FragmentA {
  unsigned at[4];
};
struct FragmentB {
  unsigned at[2];
};
struct FragmentC {
  float at[4];
};

__device__ __forceinline__ void mma(FragmentC& c, const FragmentA& a, const FragmentB& b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c.at[0]), "+f"(c.at[1]), "+f"(c.at[2]), "+f"(c.at[3])
      : "r"(a.at[0]), "r"(a.at[1]), "r"(a.at[2]), "r"(a.at[3]), "r"(b.at[0]), "r"(b.at[1]));
}

// ldmatrix reads four 8 x 8 matrices of BF16. Lanes 8i .. 8i+7 give the addresses of the rows (16 aligned bytes) of matrix i,
// and register i of lane 4 g + q gets its row g, columns 2q and 2q+1. `shared` is an address in shared memory.
//
// A from a tile whose rows are the rows of A: lane l points to row l % 16, columns l / 16 * 8 ...
__device__ __forceinline__ FragmentA load_a(unsigned shared) {
  FragmentA a;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a.at[0]), "=r"(a.at[1]), "=r"(a.at[2]), "=r"(a.at[3])
               : "r"(shared)
               : "memory");
  return a;
}

// A from a tile whose rows are the columns of A (each matrix is transposed on its way): lane l points to
// row l % 8 + l / 16 * 8 of the tile, columns l / 8 % 2 * 8 ...
__device__ __forceinline__ FragmentA load_a_transposed(unsigned shared) {
  FragmentA a;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a.at[0]), "=r"(a.at[1]), "=r"(a.at[2]), "=r"(a.at[3])
               : "r"(shared)
               : "memory");
  return a;
}

__device__ __forceinline__ unsigned shared_address(const void* pointer) { return (unsigned)__cvta_generic_to_shared(pointer); }

// The upper halves of two FP32, which are their truncations to BF16.
__device__ __forceinline__ unsigned upper_halves(float low, float high) {
  return __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
}
__device__ __forceinline__ float without_upper_half(float value) {
  return sub(value, __uint_as_float(__float_as_uint(value) & 0xffff0000u));
}

// Four FP32 of one column of B (rows 2q, 2q+1, 2q+8, 2q+9) as three BF16 pieces, each the truncation of what the ones before
// left: high + middle + low is the value, but for bits below 2^-133.
struct Pieces {
  FragmentB at[3];
};

__device__ __forceinline__ Pieces pieces_of(float2 first, float2 second) {
  Pieces p;
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    p.at[i].at[0] = upper_halves(first.x, first.y);
    p.at[i].at[1] = upper_halves(second.x, second.y);
    if (i < 2) {
      first.x = without_upper_half(first.x), first.y = without_upper_half(first.y);
      second.x = without_upper_half(second.x), second.y = without_upper_half(second.y);
    }
  }
  return p;
}
