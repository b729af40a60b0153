// The forward of RMSNorm on eight columns at a time.
#pragma once
#include "vectors.cuh"

__device__ __forceinline__ float rstd_of(float sum, int size, float eps) { return rsqrtf(add(divide_by_count(sum, size), eps)); }

// y = bf16((x * rstd) * gamma)
__device__ __forceinline__ uint4 normalised(uint4 raw, float r, const Float8& g) {
  Float8 x = widen8(raw);
#pragma unroll
  for (int e = 0; e < 8; ++e) x.at[e] = mul(mul(x.at[e], r), g.at[e]);
  return narrow8(x);
}
