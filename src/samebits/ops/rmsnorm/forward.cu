// RMSNorm of rows, with MODULATED 1 modulated by the table row of each. LANES threads share a row: 64, or 16 up to 128
// columns. HOLD is the number of vectors of eight columns that a thread keeps in registers; 0 reads the row twice.
#include "row.cuh"

constexpr int THREADS = LANES == 64 ? 64 : 128;
constexpr int BLOCK_ROWS = THREADS / LANES;
constexpr int BLOCKS = 6;  // of a multiprocessor at least, so that a held row has the registers it needs on every architecture
constexpr int AHEAD = MODULATED ? (HOLD < 2 ? HOLD : 2) : 0;  // vectors of the table that are on their way before the sum is known

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    forward(const element* x, i64 x_row, const element* weight, const element* shift, i64 shift_row, const element* scale,
            i64 scale_row, const i64* index, i64 index_step, i64 table_rows, element* y, float* rstd, i64 rows, i64 size, float eps) {
  const int lane = threadIdx.x % LANES, d_end = (int)size;
  const i64 token = (i64)blockIdx.x * BLOCK_ROWS + threadIdx.x / LANES;
  const bool live = token < rows;  // the others keep their warp whole
  const i64 here = live ? token : rows - 1;
  const element* const row = x + here * x_row;
#if MODULATED
  const i64 chosen = checked_index(index[here * index_step], table_rows);
  const element *const shift_of = shift + chosen * shift_row, *const scale_of = scale + chosen * scale_row;
#endif
  Chains chains = {0.0f, 0.0f};
#if HOLD
  Raw<8> raw[HOLD];
#pragma unroll
  for (int j = 0; j < HOLD; ++j) raw[j] = read_once<VEC, 8>(row, (lane + j * LANES) * 8, d_end);
#pragma unroll
  for (int j = 0; j < HOLD; ++j) chains = squares_of(chains, widened(raw[j]));
#else
  for (int d = lane * 8; d < d_end; d += LANES * 8) chains = squares_of(chains, read_wide<VEC, 8>(row, d, d_end));
#endif
#if MODULATED
  Raw<8> scale_ahead[AHEAD + 1], shift_ahead[AHEAD + 1];
#pragma unroll
  for (int j = 0; j < AHEAD; ++j) {
    scale_ahead[j] = read<VEC, 8>(scale_of, (lane + j * LANES) * 8, d_end);
    shift_ahead[j] = read<VEC, 8>(shift_of, (lane + j * LANES) * 8, d_end);
  }
#endif
  float sum = group_sum(chains);
#if LANES == 64
  __shared__ float group[4];
  if (lane % 16 == 0) group[lane / 16] = sum;
  __syncthreads();
  sum = add(add(group[0], group[2]), add(group[1], group[3]));
#endif
  const float r = rstd_of(sum, d_end, eps);
  if (live && lane == 0) rstd[token] = r;
  const auto finish = [&](int j, const Raw<8>& raw_x) {
    const int d = (lane + j * LANES) * 8;
    Floats<8> n = normed(widened(raw_x), r, read_wide<VEC, 8>(weight, d, d_end));
#if MODULATED
    if (j < AHEAD) {
      n = modulated(n, factor_of(scale_ahead[j]), widened(shift_ahead[j]));
    } else {
      n = modulated(n, factor_of(read<VEC, 8>(scale_of, d, d_end)), read_wide<VEC, 8>(shift_of, d, d_end));
    }
#endif
    if (live) write<VEC>(y + token * size, d, d_end, narrowed(n));
  };
#if HOLD
#pragma unroll
  for (int j = 0; j < HOLD; ++j) finish(j, raw[j]);
#else
  for (int j = 0, d = lane * 8; d < d_end; ++j, d += LANES * 8) finish(j, read<VEC, 8>(row, d, d_end));
#endif
}
