// The end of the forward: from the raw sums (controller.cuh) to proj, r and q. A thread per sum. Compile-time choices: IS_FAST,
// IS_DSV4.
#include "controller.cuh"

extern "C" __global__ void __launch_bounds__(256)
    finish(const float* parts, float* proj, float* r, float* q, i64 P, i64 rows, i64 size, i64 outputs, float eps) {
  const int width = (int)outputs + 1;
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x, t = i / width;
  const int n = (int)(i % width);
  if (t >= rows) return;
  const float sum = controller_sum(parts, (int)P, rows, width, t, n);
  if (n < outputs) {
    proj[t * outputs + n] = canonical<IS_FAST>(sum);
  } else {
    const Rms rms = rms_of<IS_DSV4>(sum, size, eps);
    r[t] = rms.r, q[t] = rms.q;
  }
}
