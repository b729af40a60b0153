// grad_weight (N, D) for up to four rows: left fold from +0 over ascending rows of grad_table[t, n] * act[t, d], each product
// rounded first. A thread keeps eight columns of act in registers and writes them, times grad_table, for TILE outputs: what is
// left is the writing. act is FP32 (4, pitch), with zeros for the rows that are not there, which change no sum that began at +0.
// Compile-time choices: ELEMENT of the result; VEC.
#include "elements.cuh"
#include "upstream.cuh"

constexpr int ROWS = 4, TILE = 32;

extern "C" __global__ void __launch_bounds__(384)
    grad_weight_few(element* out, const void* grad, i64 grad_row, i64 dtype, const float* act, i64 pitch, i64 rows,
                    i64 outputs, i64 size) {
  __shared__ float4 upstream[TILE];
  const i64 column_tiles = (size + 8 * blockDim.x - 1) / (8 * blockDim.x), tiles = column_tiles * ((outputs + TILE - 1) / TILE);
#pragma unroll 1
  for (i64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const i64 n0 = tile / column_tiles * TILE, d = (tile % column_tiles * blockDim.x + threadIdx.x) * 8;
    for (int i = threadIdx.x; i < ROWS * TILE; i += blockDim.x) {
      const int t = i / TILE, n = i % TILE;
      const bool here = t < rows && n0 + n < outputs;
      reinterpret_cast<float*>(upstream + n)[t] = here ? value_at(grad, t * grad_row + n0 + n, (int)dtype) : 0.0f;
    }
    __syncthreads();
    if (d < size) {
      Float8 a[ROWS];
#pragma unroll
      for (int t = 0; t < ROWS; ++t) a[t] = load<8, 8>(act + t * pitch, (int)d, (int)pitch);
      const int here = (int)min(outputs - n0, (i64)TILE);
      element* to = out + n0 * size;
#pragma unroll 4
      for (int n = 0; n < here; ++n) {
        const float4 g = upstream[n];
        Float8 sum;
#pragma unroll
        for (int e = 0; e < 8; ++e)
          sum.at[e] = add(add(add(add(0.0f, mul(g.x, a[0].at[e])), mul(g.y, a[1].at[e])), mul(g.z, a[2].at[e])),
                          mul(g.w, a[3].at[e]));
        write<VEC>(to, (int)d, (int)size, narrowed(sum));
        to += size;
      }
    }
    __syncthreads();  // upstream is read before it is overwritten
  }
}
