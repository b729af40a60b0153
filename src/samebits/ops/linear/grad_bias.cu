// grad_bias (N) FP32: start, then the fold over ascending rows of grad_y. A thread owns an output, its reads run AHEAD rows ahead.
// Compile-time choices: ELEMENT of grad_y.
#include "elements.cuh"

constexpr int AHEAD = 32;

extern "C" __global__ void __launch_bounds__(64)
    grad_bias(float* out, const element* grad, i64 grad_row, const float* start, i64 rows, i64 outputs) {
  const i64 n = (i64)blockIdx.x * 64 + threadIdx.x;
  if (n >= outputs) return;
  float acc = start ? add(0.0f, start[n]) : 0.0f;
#pragma unroll 1
  for (i64 t0 = 0; t0 < rows; t0 += AHEAD) {
    element g[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) g[i] = t0 + i < rows ? grad[(t0 + i) * grad_row + n] : 0;
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) acc = add(acc, low_of(g[i]));  // adding +0 changes no sum that started at +0
  }
  out[n] = acc;
}
