// The last levels of the halving tree over what lane_tile.cu left in parts[residue][t][n], then + bias. One thread per result.
// SILU: then `y` takes the sums with their bias, `act` their SiLU.
#include "silu.cuh"
#include "staged.cuh"

extern "C" __global__ void __launch_bounds__(128)
    fold_lanes(const float* parts, const float* bias, float* y, float* act, i64 rows, i64 columns) {
  const i64 at = (i64)blockIdx.x * 128 + threadIdx.x, count = rows * columns;
  if (at >= count) return;
  float p[PARTS];
#pragma unroll
  for (int u = 0; u < PARTS; ++u) p[u] = parts[u * count + at];
  const float value = add(add(halved(p), 0.0f), bias[at % columns]);  // -0 becomes +0: a lane ends so
  y[at] = value;
#if SILU
  act[at] = silu(value);
#endif
}
