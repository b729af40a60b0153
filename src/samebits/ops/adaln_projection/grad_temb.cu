// grad_temb (T, D) FP32: left fold of the partials from +0, ascending, then the derivative of the SiLU:
// (grad_act * s) * (1 + x * (1 - s)), s = 1 / (1 + exp(-x)). A thread owns an element; AHEAD partials are in flight.
#include "numbers.cuh"

constexpr int AHEAD = 32;

extern "C" __global__ void __launch_bounds__(128)
    grad_temb(float* out, const float* partial, i64 parts, i64 pitch, const float* temb, i64 temb_row, i64 rows, i64 size) {
  const i64 i = (i64)blockIdx.x * 128 + threadIdx.x;
  if (i >= rows * size) return;
  const i64 t = i / size, d = i % size, stride = rows * pitch;
  const float* from = partial + t * pitch + d;
  float acc = 0.0f;
#pragma unroll 1
  for (i64 p0 = 0; p0 < parts; p0 += AHEAD) {
    float part[AHEAD];
#pragma unroll
    for (int p = 0; p < AHEAD; ++p) part[p] = p0 + p < parts ? from[p * stride] : 0.0f;
    from += AHEAD * stride;
#pragma unroll
    for (int p = 0; p < AHEAD; ++p) acc = add(acc, part[p]);  // adding +0 changes no sum that started at +0
  }
  const float x = temb[t * temb_row + d];
  const float s = __fdiv_rn(1.0f, add(1.0f, expf(-x)));
  out[i] = mul(mul(acc, s), add(1.0f, mul(x, sub(1.0f, s))));
}
