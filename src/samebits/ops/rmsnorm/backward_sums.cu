// Sums over the positions of each tile, for the gradients of weight, shift and scale. A thread owns COLUMNS columns (8 or 2) of a
// tile and walks its positions with AHEAD of them on their way. `lanes` threads (whole warps) have `lanes * COLUMNS` columns of
// one tile; a block has several tiles where they are few.
#include "sums.cuh"

constexpr int AHEAD = COLUMNS == 8 ? (ELEMENT == 0 ? 4 : 8) : 16;
constexpr int MOST_TILES = 4;  // of a block: 128 threads, at least 32 for a tile

extern "C" __global__ void __launch_bounds__(128)
    backward_sums(const element* grad, i64 grad_row, const element* x, i64 x_row, const element* weight, const element* scale,
                  i64 scale_row, const i64* index, i64 index_step, const i64* order, i64 order_step, const i64* bounds,
                  i64 bounds_step, i64 table_rows, const float* rstd, i64 rstd_row, float* weight_sums, float* shift_sums,
                  float* scale_sums, i64 tiles, i64 rows, i64 size, i64 lanes, i64 slabs) {
  __shared__ i64 position_held[MOST_TILES][TILE];
  __shared__ float rstd_held[MOST_TILES][TILE];
  const int width = (int)lanes, lane = threadIdx.x % width, slot = threadIdx.x / width, slots = blockDim.x / width;
  const int d_end = (int)size;
#if MODULATED
  const Segments segments = {index, index_step, order, order_step, bounds, bounds_step, table_rows, rows};
#endif
  for (i64 work = blockIdx.x; work < slabs * ((tiles + slots - 1) / slots); work += gridDim.x) {  // one turn, on every real shape
    const i64 number = work / slabs * slots + slot;
#if MODULATED
    const Tile tile = tile_at(segments, number);
#else
    const Tile tile = tile_of_rows(number, rows);
#endif
    __syncthreads();  // the turn before has been read
    for (int place = lane; place < tile.count; place += width) {
#if MODULATED
      const i64 position = position_at(segments, tile, place);
#else
      const i64 position = tile.begin + place;
#endif
      position_held[slot][place] = position;
      rstd_held[slot][place] = rstd[position * rstd_row];
    }
    __syncthreads();
    const int d = (int)(work % slabs * width + lane) * COLUMNS;
    if (number >= tiles || tile.count == 0 || d >= d_end) continue;
    const Floats<COLUMNS> w = read_wide<VEC, COLUMNS>(weight, d, d_end);
#if MODULATED
    const Floats<COLUMNS> factor = factor_of(read<VEC, COLUMNS>(scale + tile.row * scale_row, d, d_end));
#else
    const Floats<COLUMNS> factor = {};
#endif
    Sums<COLUMNS> sums = {};
    for (int base = 0; base < tile.count; base += AHEAD) {
      Raw<COLUMNS> raw_grad[AHEAD], raw_x[AHEAD];
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        const i64 position = position_held[slot][min(base + i, tile.count - 1)];
        raw_grad[i] = read_once<VEC, COLUMNS>(grad + position * grad_row, d, d_end);
        raw_x[i] = read_once<VEC, COLUMNS>(x + position * x_row, d, d_end);
      }
#pragma unroll
      for (int i = 0; i < AHEAD; ++i)
        if (base + i < tile.count) add_position(sums, widened(raw_grad[i]), widened(raw_x[i]), rstd_held[slot][base + i], w, factor);
    }
    write_sums<VEC>({weight_sums, shift_sums, scale_sums}, number, d, d_end, sums);
  }
}
