// The left fold over the chunks that across.cu left in parts[chunk][t][k]; SLOPE as there. One thread per result.
#include "silu.cuh"

extern "C" __global__ void __launch_bounds__(256)
    fold_chunks(const float* parts, const float* pre, i64 pre_row, float* out, i64 rows, i64 columns, i64 chunks) {
  const i64 at = (i64)blockIdx.x * 256 + threadIdx.x, count = rows * columns;
  if (at >= count) return;
  float total = 0.0f;
#pragma unroll 8
  for (i64 chunk = 0; chunk < chunks; ++chunk) total = add(total, parts[chunk * count + at]);
#if SLOPE
  total = mul(total, silu_slope(pre[at / columns * pre_row + at % columns]));
#endif
  out[at] = total;
}
