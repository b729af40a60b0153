// grad^T @ given: out[n, k] is one chain over ascending rows of fused multiply-adds; bias_out[n] the left fold of grad[:, n].
// A warp owns 8 outputs n and 128 columns k, four per lane; the eight warps of a block share the rows of `given` through L1.
// WEIGHT, BIAS: which of the two are wanted. A bias is folded by the first block of columns.
#include "silu.cuh"

constexpr int OUTPUTS = 8;

extern "C" __global__ void __launch_bounds__(256)
    weight_gradient(const float* grad, i64 grad_row, const float* given, i64 given_row, float* out, float* bias_out, i64 rows,
                    i64 outputs, i64 columns, i64 column_blocks) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, width = (int)columns, most = (int)outputs;
  const i64 block = blockIdx.x % column_blocks, first = (blockIdx.x / column_blocks * 8 + warp) * OUTPUTS;
  if (first >= outputs) return;  // there is no barrier and no exchange
  const int n = (int)first, k = (int)(block * 128) + lane * 4;
  Float4 sum[OUTPUTS] = {};
  float bias[OUTPUTS] = {};
#pragma unroll 4
  for (i64 t = 0; t < rows; ++t) {
    const float* const row = grad + t * grad_row;
    const Float4 low = load<VEC, 4>(row, n, most), high = load<VEC, 4>(row, n + 4, most);
#if WEIGHT
    const Float4 a = load<VEC, 4>(given + t * given_row, k, width);
#pragma unroll
    for (int i = 0; i < OUTPUTS; ++i)
#pragma unroll
      for (int c = 0; c < 4; ++c) sum[i].at[c] = __fmaf_rn(i < 4 ? low.at[i % 4] : high.at[i % 4], a.at[c], sum[i].at[c]);
#endif
#if BIAS
    if (block == 0)
#pragma unroll
      for (int i = 0; i < OUTPUTS; ++i) bias[i] = add(bias[i], i < 4 ? low.at[i % 4] : high.at[i % 4]);
#endif
  }
#pragma unroll
  for (int i = 0; i < OUTPUTS; ++i) {
    if (n + i >= most) break;
#if WEIGHT
    store<VEC, 4>(out + (first + i) * columns, k, width, sum[i]);
#endif
#if BIAS
    if (block == 0 && lane == 0) bias_out[n + i] = bias[i];
#endif
  }
}
