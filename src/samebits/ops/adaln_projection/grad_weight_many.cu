// grad_weight (N, D) for any number of rows: left fold from +0 over ascending rows of grad_table[t, n] * act[t, d], each product
// rounded first. A thread owns eight columns of TILE outputs, 64 chains in registers; grad_table comes through shared memory,
// CHUNK rows at a time. act is FP32 (rows, pitch).
// Compile-time choices: ELEMENT of the result; VEC.
#include "elements.cuh"
#include "upstream.cuh"

constexpr int TILE = 8, CHUNK = 64;

extern "C" __global__ void __launch_bounds__(384)
    grad_weight_many(element* out, const void* grad, i64 grad_row, i64 dtype, const float* act, i64 pitch, i64 rows,
                     i64 outputs, i64 size) {
  __shared__ float4 upstream[CHUNK * TILE / 4];  // [row][output]
  const i64 column_tiles = (size + 8 * blockDim.x - 1) / (8 * blockDim.x), tiles = column_tiles * ((outputs + TILE - 1) / TILE);
#pragma unroll 1
  for (i64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const i64 n0 = tile / column_tiles * TILE, d = (tile % column_tiles * blockDim.x + threadIdx.x) * 8;
    Float8 sum[TILE] = {};
#pragma unroll 1
    for (i64 t0 = 0; t0 < rows; t0 += CHUNK) {
      const int here = (int)min(rows - t0, (i64)CHUNK);
      __syncthreads();  // the chunk before is read
      for (int i = threadIdx.x; i < here * TILE; i += blockDim.x) {
        const int t = i / TILE, n = i % TILE;
        reinterpret_cast<float*>(upstream)[i] = n0 + n < outputs ? value_at(grad, (t0 + t) * grad_row + n0 + n, (int)dtype) : 0.0f;
      }
      __syncthreads();
      if (d < size) {
        const float* from = act + t0 * pitch;
#pragma unroll 2
        for (int t = 0; t < here; ++t) {
          const Float8 a = load<8, 8>(from, (int)d, (int)pitch);
          from += pitch;
          const float4 low = upstream[2 * t], high = upstream[2 * t + 1];
          const float g[TILE] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
          for (int n = 0; n < TILE; ++n)
#pragma unroll
            for (int e = 0; e < 8; ++e) sum[n].at[e] = add(sum[n].at[e], mul(g[n], a.at[e]));
        }
      }
    }
    if (d < size) {
#pragma unroll
      for (int n = 0; n < TILE; ++n)
        if (n0 + n < outputs) write<VEC>(out + (n0 + n) * size, (int)d, (int)size, narrowed(sum[n]));
    }
  }
}
