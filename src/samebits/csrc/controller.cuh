// The end of a controller projection: from the raw sums that a projection kernel left to proj and the RMS of the row.
//
// Raw sums are FP32 [P][rows][width], width = N + 1: columns n < N are partials of proj, column N one of the sum of squares.
// P is 1 (complete sums), 2, 4, 8 or 16; the parts are added as a binary tree of neighbours.
#pragma once
#include "numbers.cuh"

template <int P>
__device__ __forceinline__ float tree_of_parts(const float* first, i64 stride) {
  if constexpr (P == 1) {
    return *first;
  } else {
    return add(tree_of_parts<P / 2>(first, stride), tree_of_parts<P / 2>(first + (P / 2) * stride, stride));
  }
}

// Column n of row t: ((p0 + p1) + (p2 + p3)) + ... The loads of one call are in flight together.
__device__ __forceinline__ float controller_sum(const float* parts, int P, i64 rows, int width, i64 t, int n) {
  const float* const first = parts + t * width + n;
  const i64 stride = rows * width;
  switch (P) {
    case 1: return tree_of_parts<1>(first, stride);
    case 2: return tree_of_parts<2>(first, stride);
    case 4: return tree_of_parts<4>(first, stride);
    case 8: return tree_of_parts<8>(first, stride);
    default: return tree_of_parts<16>(first, stride);
  }
}

// Under the fast contracts what is not finite becomes the quiet NaN 0x7fc00000: the infinities of a tensor core, and the NaN
// that comes of them, are nobody's promise.
template <bool FAST>
__device__ __forceinline__ float canonical(float value) {
  if constexpr (FAST) return fabsf(value) <= 3.402823466e38f ? value : __uint_as_float(0x7fc00000u);
  return value;
}

struct Rms {
  float r, q;
};

// p1 (DSV4 false): q = sqrt(s) / sqrt(K), r = 1 / (q + eps). dsv4: q = s / K, r = rsqrt(q + eps), the device's own. Divisions
// and square roots are IEEE; sqrt(K) is the FP32 number nearest to it, because K < 2^24 is exact in FP32.
template <bool DSV4>
__device__ __forceinline__ Rms rms_of(float sum_of_squares, i64 K, float eps) {
  const float size = (float)K;
  if constexpr (DSV4) {
    const float q = __fdiv_rn(sum_of_squares, size);
    return {rsqrtf(add(q, eps)), q};
  } else {
    const float q = __fdiv_rn(__fsqrt_rn(sum_of_squares), __fsqrt_rn(size));
    return {__fdiv_rn(1.0f, add(q, eps)), q};
  }
}
