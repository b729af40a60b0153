// What the backward kernels of h_aggregate share. Compile-time choices: VEC 8 or 1 (16-byte accesses);
// G_BF16 (dtype of grad_hidden); OUT_BF16 (dtype of grad_residual); WANT_RESIDUAL (whether grad_residual is written).
#pragma once
#include "vectors.cuh"

constexpr int H = 4;

#if G_BF16
typedef bf16 grad_in;
#else
typedef float grad_in;
#endif
#if OUT_BF16
typedef bf16 grad_out;
#else
typedef float grad_out;
#endif

// One token.
struct Upstream {
  const grad_in* grad;
  const bf16* streams;
  i64 stream;
  grad_out* out;
  int size;
};

__device__ __forceinline__ Upstream upstream_of(i64 token, const grad_in* grad, i64 grad_row, const bf16* residual, i64 residual_row,
                                                i64 residual_stream, grad_out* grad_residual, i64 size) {
  return {grad + token * grad_row, residual + token * residual_row, residual_stream, grad_residual + token * H * size, (int)size};
}

// grad_residual[i, d] = pre[i] * grad_hidden[d]
template <int W>
__device__ __forceinline__ void scale_out(const Upstream& u, int i, int d, float p, const Floats<W>& g) {
  Floats<W> scaled;
#pragma unroll
  for (int e = 0; e < W; ++e) scaled.at[e] = mul(p, g.at[e]);
  store<VEC, W>(u.out + (i64)i * u.size, d, u.size, scaled);
}
