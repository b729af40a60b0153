// grad_bias (N) FP32: left fold from +0 over ascending rows of grad_table. A thread owns an output.
#include "upstream.cuh"

constexpr int AHEAD = 8;

extern "C" __global__ void __launch_bounds__(256)
    grad_bias(float* out, const void* grad, i64 grad_row, i64 dtype, i64 rows, i64 outputs) {
  const i64 n = (i64)blockIdx.x * 256 + threadIdx.x;
  if (n >= outputs) return;
  float acc = 0.0f;
#pragma unroll 1
  for (i64 t0 = 0; t0 < rows; t0 += AHEAD) {
    float g[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) g[i] = t0 + i < rows ? value_at(grad, (t0 + i) * grad_row + n, (int)dtype) : 0.0f;
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) acc = add(acc, g[i]);  // adding +0 changes no sum that started at +0
  }
  out[n] = acc;
}
