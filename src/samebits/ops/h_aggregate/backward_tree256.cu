// Contract "tree256": partial u folds d = u, u + 256, ...; lane l of a warp owns the partials 8l .. 8l+7, so a warp
// holds all 256 partials of a stream and its loads are 16 bytes wide.
// Partials 32w .. 32w+31 lie in lanes 4w .. 4w+3: offset 16 is two lanes away, offset 8 one lane, the rest is local.
#include "tree.cuh"
#include "upstream.cuh"

__device__ __forceinline__ float tree256(float (&p)[8]) {
#pragma unroll
  for (int e = 0; e < 8; ++e) p[e] = add(p[e], __shfl_down_sync(0xffffffffu, p[e], 2));
#pragma unroll
  for (int e = 0; e < 8; ++e) p[e] = add(p[e], __shfl_down_sync(0xffffffffu, p[e], 1));
  float group = tree_registers(p);
#pragma unroll
  for (int half = 16; half >= 4; half /= 2) group = add(group, __shfl_down_sync(0xffffffffu, group, half));
  return group;
}

constexpr int TREE_THREADS = 128;

extern "C" __global__ void __launch_bounds__(TREE_THREADS)
    backward_tree256(const grad_in* grad, i64 grad_row, const float* pre, i64 pre_row, const bf16* residual,
                                 i64 residual_row, i64 residual_stream, float* grad_pre, grad_out* grad_residual, i64 rows, i64 size) {
  const int lane = threadIdx.x % 32;
  const i64 warp = (i64)blockIdx.x * (TREE_THREADS / 32) + threadIdx.x / 32;
  const i64 token = warp / (H / STREAMS);
  const int first = (int)(warp % (H / STREAMS)) * STREAMS;
  if (token >= rows) return;  // a whole warp leaves together
  const Upstream u = upstream_of(token, grad, grad_row, residual, residual_row, residual_stream, grad_residual, size);
  float p[STREAMS], acc[STREAMS][8] = {};
#pragma unroll
  for (int i = 0; i < STREAMS; ++i) p[i] = pre[token * pre_row + first + i];
#pragma unroll 4
  for (int base = 0; base < u.size; base += 256) {
    const int d = base + lane * 8;
    const Float8 g = load<VEC, 8>(u.grad, d, u.size);
#pragma unroll
    for (int i = 0; i < STREAMS; ++i) {
      const Float8 r = load<VEC, 8>(u.streams + (first + i) * u.stream, d, u.size);
#pragma unroll
      for (int e = 0; e < 8; ++e) acc[i][e] = add(acc[i][e], mul(g.at[e], r.at[e]));
      if (WANT_RESIDUAL) scale_out(u, first + i, d, p[i], g);
    }
  }
#pragma unroll
  for (int i = 0; i < STREAMS; ++i) {
    const float sum = tree256(acc[i]);
    if (lane == 0) grad_pre[token * H + first + i] = sum;
  }
}
