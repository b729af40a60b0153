// grad @ weight: the sum over n of grad[t, n] * weight[n, k], in chunks of 64 terms.
//
// A warp owns ROWS rows and 128 columns, four per lane; `row_warps` warps of a block lie over rows and share the weight through
// L1, the others over columns.
// SPLIT: a block takes one chunk and leaves its sums in out[chunk][t][k], for fold_chunks.cu: few rows read the weight with all
// multiprocessors. Otherwise a thread folds its chunks itself.
// SLOPE: the sum is multiplied by the slope of SiLU at pre[t, k].
#include "silu.cuh"

constexpr int CHUNK = 64;
constexpr int AHEAD = ROWS == 1 ? 4 : ROWS == 4 ? 2 : 1;  // groups of four terms whose loads are in flight together
constexpr int BLOCKS = SPLIT || __CUDA_ARCH__ < 1000 ? 2 : 1;   // per multiprocessor; for Blackwell the whole sum takes more registers

extern "C" __global__ void __launch_bounds__(256, BLOCKS)
    across(const float* grad, i64 grad_row, const float* weight, i64 weight_row, const float* pre, i64 pre_row, float* out,
           i64 rows, i64 terms, i64 columns, i64 chunks, i64 row_warps) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, over_rows = (int)row_warps, last = (int)terms, width = (int)columns;
  const i64 row_tile = SPLIT ? blockIdx.x / chunks : blockIdx.x;
  const int first_chunk = SPLIT ? (int)(blockIdx.x % chunks) : 0, end_chunk = SPLIT ? first_chunk + 1 : (int)chunks;
  const i64 row0 = (row_tile * over_rows + warp % over_rows) * ROWS;
  const i64 column = ((i64)blockIdx.y * (8 / over_rows) + warp / over_rows) * 128 + lane * 4;
  if (row0 >= rows || column >= columns) return;  // there is no barrier and no exchange
  const int k = (int)column;
  const float* grad_of[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) grad_of[r] = grad + min(row0 + r, rows - 1) * grad_row;
  Float4 total[ROWS] = {};
  for (int chunk = first_chunk; chunk < end_chunk; ++chunk) {
    Float4 sum[ROWS] = {};
    // Terms past the end are +0 * +0; the -0 that this may turn into +0 makes no difference to a fold that starts from +0.
    const int end = min(last, chunk * CHUNK + CHUNK);
#pragma unroll AHEAD
    for (int n = chunk * CHUNK; n < end; n += 4) {
      Float4 w[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) w[e] = load<VEC, 4>(weight + (n + e) * weight_row, n + e < last ? k : width, width);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const Float4 g = load<VEC, 4>(grad_of[r], n, last);
#pragma unroll
        for (int e = 0; e < 4; ++e)
#pragma unroll
          for (int c = 0; c < 4; ++c) sum[r].at[c] = __fmaf_rn(g.at[e], w[e].at[c], sum[r].at[c]);
      }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
      for (int c = 0; c < 4; ++c) total[r].at[c] = SPLIT ? sum[r].at[c] : add(total[r].at[c], sum[r].at[c]);
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const i64 row = row0 + r;
    if (row >= rows) break;
#if SLOPE
    const Float4 z = load<VEC, 4>(pre + row * pre_row, k, width);
#pragma unroll
    for (int c = 0; c < 4; ++c) total[r].at[c] = mul(total[r].at[c], silu_slope(z.at[c]));
#endif
    store<VEC, 4>(out + ((SPLIT ? first_chunk * rows : 0) + row) * columns, k, width, total[r]);
  }
}
