// Contract "fma": table (T, N) on the FP32 lanes, any dtype of the weight. A warp takes COLUMNS outputs and ROWS timesteps.
// Lane l folds the vectors l, l + 32, ... of eight consecutive d by fused multiply-adds from +0; the halving tree over the lanes;
// then + 0, + bias, one rounding. The weight is read once per ROWS timesteps, one turn of vectors ahead; the activation, which
// all warps share, comes from the L1 and L2 caches.
// Compile-time choices: ELEMENT of weight, act, bias and table; ROWS; VEC.
#include "scalars.cuh"
#include "tree.cuh"

constexpr int COLUMNS = 4, WARPS = 4;

struct Turn {
  Raw<8> at[COLUMNS];
};

// Vector v of every output; those that are not there are +0.
__device__ __forceinline__ Turn turn(const element* weight, i64 weight_row, int columns, int v, int size) {
  Turn w;
#pragma unroll
  for (int c = 0; c < COLUMNS; ++c) {
    const bool here = c < columns;
    w.at[c] = read_once<VEC, 8>(here ? weight + c * weight_row : weight, 8 * v, here ? size : 0);
  }
  return w;
}

// act is (padded rows, pitch), rows padded to a multiple of ROWS and columns to one of 8.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 2)
    table_fma(element* table, const element* act, i64 pitch, const element* weight, i64 weight_row, const element* bias, i64 rows,
              i64 outputs, i64 size) {
  const int lane = threadIdx.x % 32, width = (int)size;
  const i64 row_tiles = (rows + ROWS - 1) / ROWS, tiles = row_tiles * ((outputs + COLUMNS - 1) / COLUMNS);
#pragma unroll 1
  for (i64 tile = (i64)blockIdx.x * WARPS + threadIdx.x / 32; tile < tiles; tile += (i64)gridDim.x * WARPS) {
    const i64 n0 = tile / row_tiles * COLUMNS, t0 = tile % row_tiles * ROWS;
    const int columns = (int)min(outputs - n0, (i64)COLUMNS);
    const element* const first = weight + n0 * weight_row;
    float acc[COLUMNS][ROWS] = {};
    Turn next = turn(first, weight_row, columns, lane, width);
#pragma unroll 1
    for (int v = lane; 8 * v < width; v += 32) {
      Float8 w[COLUMNS];
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) w[c] = widened(next.at[c]);
      next = turn(first, weight_row, columns, v + 32, width);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const Float8 a = read_wide<8, 8>(act + (t0 + r) * pitch, 8 * v, (int)pitch);
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c)
#pragma unroll
          for (int e = 0; e < 8; ++e) acc[c][r] = __fmaf_rn(a.at[e], w[c].at[e], acc[c][r]);
      }
    }
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c)
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const float sum = tree_warp(acc[c][r]);
        if (lane == c * ROWS + r && c < columns && t0 + r < rows)
          table[(t0 + r) * outputs + n0 + c] = to_element(add(add(sum, 0.0f), to_float(bias[n0 + c])));
      }
  }
}
