// Partials of the gradient of the activation: partial[p, t, d], over the 512 outputs n of p, of grad_table[t, n] * weight[n, d].
//   chain    64 consecutive n, fused multiply-adds from +0, ascending; a warp
//   partial  left fold of its eight chains from +0; a block
// A block takes one p, 256 columns and ROWS rows. A warp reads 512 consecutive bytes or more of a row of the weight at once,
// AHEAD rows before it uses them. Blocks that share a tile of the weight run next to each other.
// Compile-time choices: ELEMENT of the weight; ROWS; VEC.
#include "elements.cuh"
#include "upstream.cuh"

constexpr int CHAIN = 64, CHAINS = 8, COLUMNS = 256, THREADS = 32 * CHAINS;
constexpr int AHEAD = (ELEMENT == 0 ? 4 : 8) / (VEC == 1 || ROWS == 8 ? 2 : 1);  // what registers can hold

// Eight columns from `first` on, over `outputs` rows of the weight.
__device__ __forceinline__ void chain(Float8 (&acc)[ROWS], const element* weight, i64 weight_row, int outputs, int first, int size,
                                      const float4* upstream) {
#pragma unroll 1
  for (int j0 = 0; j0 < outputs; j0 += AHEAD) {
    Raw<8> raw[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) raw[i] = read_once<VEC, 8>(weight + i * weight_row, first, j0 + i < outputs ? size : 0);
    weight += AHEAD * weight_row;
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {  // beyond the outputs both factors are +0
      const Float8 w = widened(raw[i]);
#pragma unroll
      for (int q = 0; q < ROWS / 4; ++q) {
        const float4 four = upstream[(j0 + i) * (ROWS / 4) + q];
        const float g[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int r = 0; r < 4; ++r)
#pragma unroll
          for (int e = 0; e < 8; ++e) acc[4 * q + r].at[e] = __fmaf_rn(g[r], w.at[e], acc[4 * q + r].at[e]);
      }
    }
  }
}

// partial is [parts][rows][pitch], pitch a multiple of 8.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    grad_act(float* partial, const void* grad, i64 grad_row, i64 dtype, const element* weight, i64 weight_row, i64 rows,
             i64 outputs, i64 size, i64 pitch) {
  extern __shared__ __align__(16) float4 shared[];
  float4* const upstream = shared;                                        // [CHAIN * CHAINS][ROWS]
  float4* const sums = shared + CHAIN * CHAINS * ROWS / 4;                // [chain][row][half][lane]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const i64 parts = (outputs + CHAIN * CHAINS - 1) / (CHAIN * CHAINS), column_tiles = (size + COLUMNS - 1) / COLUMNS;
  const i64 row_tiles = (rows + ROWS - 1) / ROWS, tiles = parts * column_tiles * row_tiles;
#pragma unroll 1
  for (i64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const i64 t0 = tile % row_tiles * ROWS, rest = tile / row_tiles;
    const i64 d0 = rest % column_tiles * COLUMNS, part = rest / column_tiles, n0 = part * CHAIN * CHAINS;
    for (int i = threadIdx.x; i < CHAIN * CHAINS * ROWS; i += THREADS) {
      const int t = i / (CHAIN * CHAINS), n = i % (CHAIN * CHAINS);
      const bool here = t0 + t < rows && n0 + n < outputs;
      reinterpret_cast<float*>(upstream)[n * ROWS + t] = here ? value_at(grad, (t0 + t) * grad_row + n0 + n, (int)dtype) : 0.0f;
    }
    __syncthreads();

    Float8 acc[ROWS] = {};
    const i64 first = n0 + warp * CHAIN;
    const int count = (int)max((i64)0, min(outputs - first, (i64)CHAIN));
    chain(acc, weight + first * weight_row, weight_row, count, (int)d0 + 8 * lane, (int)size, upstream + warp * CHAIN * (ROWS / 4));
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        sums[((warp * ROWS + r) * 2 + half) * 32 + lane] =
            make_float4(acc[r].at[4 * half], acc[r].at[4 * half + 1], acc[r].at[4 * half + 2], acc[r].at[4 * half + 3]);
    __syncthreads();

    for (int i = threadIdx.x; i < ROWS * COLUMNS; i += THREADS) {
      float sum = 0.0f;
#pragma unroll
      for (int c = 0; c < CHAINS; ++c)  // an empty chain is +0
        sum = add(sum, reinterpret_cast<const float*>(sums)[c * ROWS * COLUMNS + i]);
      const int r = i / COLUMNS, half = i / 128 % 2, from = i / 4 % 32, e = i % 4;
      const i64 t = t0 + r, d = d0 + 8 * from + 4 * half + e;
      if (t < rows && d < size) partial[(part * rows + t) * pitch + d] = sum;
    }
    __syncthreads();  // both arrays are read before they are overwritten
  }
}
