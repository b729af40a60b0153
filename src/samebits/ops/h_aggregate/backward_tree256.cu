// Contract "tree256": partial u folds d = u, u + 256, ... A warp holds the 256 partials of a stream: lane l owns 4l .. 4l+3
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

// A warp per stream, with UNROLL rounds of 256 columns in flight.
extern "C" __global__ void __launch_bounds__(TREE_THREADS)
    backward_tree256(const grad_in* grad, i64 grad_row, const float* pre, i64 pre_row, const bf16* residual, i64 residual_row,
                     i64 residual_stream, float* grad_pre, grad_out* grad_residual, i64 size) {
  const int lane = threadIdx.x % 32, stream = threadIdx.x / 32;
  const i64 token = blockIdx.x;
  const Upstream u = upstream_of(token, grad, grad_row, residual, residual_row, residual_stream, grad_residual, size);
  const bf16* row = u.streams + stream * u.stream;
  const float p = pre[token * pre_row + stream];
  float partial[2][4] = {};
  for (int base = lane * 4; base < u.size; base += 256 * UNROLL) {
    decltype(load4_raw<VEC>(u.grad, 0, 0)) g_raw[UNROLL][2];
    uint2 r_raw[UNROLL][2];
#pragma unroll
    for (int n = 0; n < UNROLL; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        g_raw[n][half] = load4_raw<VEC>(u.grad, base + n * 256 + half * 128, u.size);
        r_raw[n][half] = load4_raw<VEC>(row, base + n * 256 + half * 128, u.size);
      }
#pragma unroll
    for (int n = 0; n < UNROLL; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Floats<4> g = widen4(g_raw[n][half]), r = widen4(r_raw[n][half]);
#pragma unroll
        for (int e = 0; e < 4; ++e) partial[half][e] = add(partial[half][e], mul(g.at[e], r.at[e]));
        if (WANT_RESIDUAL) scale_out(u, stream, base + n * 256 + half * 128, p, g);
      }
  }
  const float sum = tree256(partial[0], partial[1]);
  if (lane == 0) grad_pre[token * H + stream] = sum;
}
