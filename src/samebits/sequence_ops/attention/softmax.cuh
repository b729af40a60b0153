// The running softmax of the two rows that a thread of a warpgroup holds (c[4 j + 2 r + e] of wgmma.cuh: row r, column 8 j + 2 q + e,
// q its place in the quad), and what becomes of it at the end. One rounding per written operation; see the README for the orders.
//
// A thread owns its columns, so partial sum q of a row is a sum over this thread's registers. KEYS columns, FA2: which contract.
#pragma once
#include "ex2.cuh"


struct Rows {
  float m[2];    // the largest score so far
  float sum[2];  // this thread's partial sum
  float a[2];    // what the block before this one is multiplied by
  int last[2];   // the last key that the row sees
};

// Scores of one block become p; m, sum and a advance. `key` is the key of the thread's first column.
template <bool MASKED>
__device__ __forceinline__ void advance(float (&s)[KEYS / 2], Rows& rows, int key, float c) {
  if constexpr (MASKED) {
#pragma unroll
    for (int i = 0; i < KEYS / 2; ++i)
      if (key + i / 4 * 8 + i % 2 > rows.last[i / 2 % 2]) s[i] = -INFINITE;
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float even = s[2 * r], odd = s[2 * r + 1];
#pragma unroll
    for (int i = 4 + 2 * r; i < KEYS / 2; i += 4) even = fmaxf(even, s[i]), odd = fmaxf(odd, s[i + 1]);
    float most = fmaxf(even, odd);
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    const float m = fmaxf(rows.m[r], most);
    const float base = m == -INFINITE ? 0.0f : m;  // a row that has seen no key yet
    const float scaled = mul(base, c);
    rows.a[r] = ex2(FA2 ? mul(sub(rows.m[r], base), c) : sub(mul(rows.m[r], c), scaled));
    rows.m[r] = m;
#pragma unroll
    for (int i = 2 * r; i < KEYS / 2; i += 4) {
      s[i] = ex2(sub(mul(s[i], c), scaled));
      s[i + 1] = ex2(sub(mul(s[i + 1], c), scaled));
    }
    float sum = FA2 ? __fmaf_rn(rows.sum[r], rows.a[r], s[2 * r]) : s[2 * r];
    sum = add(sum, s[2 * r + 1]);
#pragma unroll
    for (int i = 4 + 2 * r; i < KEYS / 2; i += 4) sum = add(add(sum, s[i]), s[i + 1]);
    rows.sum[r] = FA2 ? sum : __fmaf_rn(rows.sum[r], rows.a[r], sum);
  }
}

// The four partial sums of a row as one: (0 + 1) + (2 + 3), or (0 + 2) + (1 + 3) in fa2. An addition commutes, so a quad agrees.
__device__ __forceinline__ float total_of(float partial) {
  const float pair = add(partial, __shfl_xor_sync(~0u, partial, FA2 ? 2 : 1));
  return add(pair, __shfl_xor_sync(~0u, pair, FA2 ? 1 : 2));
}

__device__ __forceinline__ float inverse_of(float total) {
  if constexpr (FA2) return __fdiv_rn(1.0f, total);
  float inverse;
  asm("div.full.f32 %0, 0f3F800000, %1;" : "=f"(inverse) : "f"(total));
  return inverse;
}

// samebits.exact.special.log2_portable; the constants are what FP64 rounds to once.
__device__ __forceinline__ float log2_portable(float x) {
  constexpr double LN2 = 0.693147180559945309417;
  constexpr float C[] = {(float)(2.0 / LN2), (float)(2.0 / (3 * LN2)), (float)(2.0 / (5 * LN2)), (float)(2.0 / (7 * LN2)),
                         (float)(2.0 / (9 * LN2))};
  const int word = __float_as_int(x);
  const float fraction = __int_as_float((word & 0x7fffff) | 0x3f800000);
  const bool upper = fraction > 1.375f;
  const float exponent = (float)((word >> 23) - 127 + upper), f = upper ? mul(fraction, 0.5f) : fraction;
  const float z = __fdiv_rn(sub(f, 1.0f), add(f, 1.0f)), w = mul(z, z);
  float p = C[4];
#pragma unroll
  for (int i = 3; i >= 0; --i) p = add(mul(p, w), C[i]);
  return x < INFINITE ? add(exponent, mul(z, p)) : x;
}
