// Only grad_residual is wanted: no chain, no shared memory.
#include "upstream.cuh"

extern "C" __global__ void __launch_bounds__(512)
    backward_residual(const grad_in* grad, i64 grad_row, const float* pre, i64 pre_row, grad_out* grad_residual, i64 size) {
  const i64 token = blockIdx.x;
  const Upstream u = upstream_of(token, grad, grad_row, nullptr, 0, 0, grad_residual, size);
  float p[H];
#pragma unroll
  for (int i = 0; i < H; ++i) p[i] = pre[token * pre_row + i];
  for (int d = threadIdx.x * 8; d < u.size; d += blockDim.x * 8) {
    const Float8 g = load8<VEC>(u.grad, d, u.size);
#pragma unroll
    for (int i = 0; i < H; ++i) scale_out(u, i, d, p[i], g);
  }
}
