// The sums of one tile of 256 positions for one chunk: sums[tile][chunk][d], for fold_tiles.cu. A thread owns COLUMNS columns (8 or
// 2) and walks the positions with AHEAD of them on their way. `lanes` threads (whole warps) have `lanes * COLUMNS` columns of one
// tile and chunk; a block has several of these where they are few. An absent gradient is null and sums to +0.
#include "elements.cuh"
#include "segments.cuh"

constexpr int CHUNKS = 6;
constexpr int AHEAD = COLUMNS == 8 ? (ELEMENT == 0 ? 8 : 16) : 32;
constexpr int MOST_SLOTS = 4;  // of a block: 128 threads, at least 32 for a tile and chunk

extern "C" __global__ void __launch_bounds__(128, 4)
    backward(const element* grad0, i64 row0, const element* grad1, i64 row1, const element* grad2, i64 row2, const element* grad3,
             i64 row3, const element* grad4, i64 row4, const element* grad5, i64 row5, const i64* index, i64 index_step,
             const i64* order, i64 order_step, const i64* bounds, i64 bounds_step, i64 table_rows, float* sums, i64 tiles, i64 rows,
             i64 size, i64 lanes, i64 slabs) {
  __shared__ i64 position_held[MOST_SLOTS][TILE];
  const int width = (int)lanes, lane = threadIdx.x % width, slot = threadIdx.x / width, slots = blockDim.x / width;
  const int d_end = (int)size;
  const Segments segments = {index, index_step, order, order_step, bounds, bounds_step, table_rows, rows};
  const element* const grads[CHUNKS] = {grad0, grad1, grad2, grad3, grad4, grad5};
  const i64 strides[CHUNKS] = {row0, row1, row2, row3, row4, row5};
  const i64 all = tiles * CHUNKS;
  for (i64 work = blockIdx.x; work < slabs * ((all + slots - 1) / slots); work += gridDim.x) {  // one turn, on every real shape
    const i64 number = work / slabs * slots + slot, chunk = number % CHUNKS;
    const Tile tile = tile_at(segments, number / CHUNKS);
    __syncthreads();  // the turn before has been read
    for (int place = lane; place < tile.count; place += width) position_held[slot][place] = position_at(segments, tile, place);
    __syncthreads();
    const int d = (int)(work % slabs * width + lane) * COLUMNS;
    if (number >= all || tile.count == 0 || d >= d_end) continue;
    const element* grad = nullptr;
    i64 grad_row = 0;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c)
      if (c == chunk) grad = grads[c], grad_row = strides[c];
    Floats<COLUMNS> sum = {};
    for (int base = 0; grad && base < tile.count; base += AHEAD) {
      Raw<COLUMNS> raw[AHEAD];
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        const i64 position = position_held[slot][min(base + i, tile.count - 1)];
        raw[i] = read_once<VEC, COLUMNS>(grad + position * grad_row, d, d_end);
      }
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        if (base + i >= tile.count) continue;
        const Floats<COLUMNS> term = widened(raw[i]);
#pragma unroll
        for (int e = 0; e < COLUMNS; ++e) sum.at[e] = add(sum.at[e], term.at[e]);
      }
    }
    write_float<VEC>(sums + number * size, d, d_end, sum);
  }
}
