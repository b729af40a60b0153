// Contract "tree256": partial u folds d = u, u + 256, ... A warp holds all 256 partials of a stream: lane l owns 4l .. 4l+3
// and 128+4l .. 128+4l+3, so that every access of a warp is contiguous. Of the halving tree inside a group of 32 partials
// (8 lanes), offsets 16, 8 and 4 are 4, 2 and 1 lanes away and the rest is local; of the tree over the 8 groups, offset 4 is
// local and offsets 2 and 1 are 16 and 8 lanes away.
#include "tree.cuh"
#include "upstream.cuh"

__device__ __forceinline__ float tree256(float (&low)[4], float (&high)[4]) {
#pragma unroll
  for (int lanes = 4; lanes >= 1; lanes /= 2)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      low[e] = add(low[e], __shfl_down_sync(0xffffffffu, low[e], lanes));
      high[e] = add(high[e], __shfl_down_sync(0xffffffffu, high[e], lanes));
    }
  float group = add(tree_registers(low), tree_registers(high));
#pragma unroll
  for (int lanes = 16; lanes >= 8; lanes /= 2) group = add(group, __shfl_down_sync(0xffffffffu, group, lanes));
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
  float p[STREAMS], acc[STREAMS][2][4] = {};
#pragma unroll
  for (int i = 0; i < STREAMS; ++i) p[i] = pre[token * pre_row + first + i];
#pragma unroll 2
  for (int base = lane * 4; base < u.size; base += 256) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int d = base + half * 128;
      const Floats<4> g = load<VEC, 4>(u.grad, d, u.size);
#pragma unroll
      for (int i = 0; i < STREAMS; ++i) {
        const Floats<4> r = load<VEC, 4>(u.streams + (first + i) * u.stream, d, u.size);
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[i][half][e] = add(acc[i][half][e], mul(g.at[e], r.at[e]));
        if (WANT_RESIDUAL) scale_out(u, first + i, d, p[i], g);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < STREAMS; ++i) {
    const float sum = tree256(acc[i][0], acc[i][1]);
    if (lane == 0) grad_pre[token * H + first + i] = sum;
  }
}
