// SiLU in FP32 and its slope, one rounding per operation, and loads of four consecutive FP32.
// VEC 8: rows are whole vectors of 16 aligned bytes; VEC 1: element by element. What is past the end is +0.
#pragma once
#include "vectors.cuh"

typedef Floats<4> Float4;

__device__ __forceinline__ float silu(float z) { return __fdiv_rn(z, add(1.0f, expf(-z))); }

// s * (1 + z * (1 - s)) with s = 1 / (1 + exp(-z))
__device__ __forceinline__ float silu_slope(float z) {
  const float s = __fdiv_rn(1.0f, add(1.0f, expf(-z)));
  return mul(s, add(1.0f, mul(z, sub(1.0f, s))));
}
