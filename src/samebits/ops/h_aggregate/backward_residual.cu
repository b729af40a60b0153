// Only grad_residual is wanted: no chain, no shared memory. A thread takes eight columns of one token.
#include "upstream.cuh"

extern "C" __global__ void __launch_bounds__(512)
    backward_residual(const grad_in* grad, i64 grad_row, const float* pre, i64 pre_row, grad_out* grad_residual, i64 size) {
  const i64 token = blockIdx.x;
  const int d = (blockIdx.y * blockDim.x + threadIdx.x) * 8;
  const Upstream u = upstream_of(token, grad, grad_row, nullptr, 0, 0, grad_residual, size);
  if (d >= u.size) return;
  const Float8 g = load<VEC, 8>(u.grad, d, u.size);
  const Floats<H> p = load<VEC, H>(pre + token * pre_row, 0, H);
#pragma unroll
  for (int i = 0; i < H; ++i) scale_out(u, i, d, p.at[i], g);
}
