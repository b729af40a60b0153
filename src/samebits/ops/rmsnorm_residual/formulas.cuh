// The formulas of rmsnorm_residual on eight columns at a time.
// Compile-time choices: VEC 8 or 1 (16-byte accesses); HAS_RESIDUAL (an upstream gradient of the copy);
// OUT_BF16 (dtype of grad_x).
#pragma once
#include "async.cuh"
#include "fold.cuh"
#include "norm.cuh"
#include "tree.cuh"

#if OUT_BF16
typedef bf16 grad_out;
#else
typedef float grad_out;
#endif

// The terms of sum(u * x), u = grad_y * gamma.
__device__ __forceinline__ Float8 inner_terms(uint4 dy_raw, uint4 x_raw, const Float8& g) {
  Float8 dy = widen8(dy_raw);
  const Float8 x = widen8(x_raw);
#pragma unroll
  for (int e = 0; e < 8; ++e) dy.at[e] = mul(mul(dy.at[e], g.at[e]), x.at[e]);
  return dy;
}

// grad_x = (rstd*u - ((x*rstd^3) * sum) / D) + grad_residual
__device__ __forceinline__ Float8 gradient(uint4 dy_raw, uint4 x_raw, const Float8& g, uint4 skip_raw, float r, float sum, int size) {
  Float8 dy = widen8(dy_raw);
  const Float8 x = widen8(x_raw), skip = widen8(skip_raw);
  const float r3 = mul(mul(r, r), r);
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const float own = mul(r, mul(dy.at[e], g.at[e]));
    const float shared = divide_by_count(mul(mul(x.at[e], r3), sum), size);
    dy.at[e] = add(sub(own, shared), skip.at[e]);
  }
  return dy;
}

__device__ __forceinline__ uint4 skip_raw(const bf16* row, int d, int size) {
#if HAS_RESIDUAL
  return load8_raw<VEC>(row, d, size);
#else
  return make_uint4(0, 0, 0, 0);  // an absent gradient is zeros, and adding +0 turns -0 into +0
#endif
}
