// grad_y = grad * gate for the positions of a tile, and the tile's sums of grad * y for the gradient of the gate. A thread owns
// COLUMNS columns (8 or 2) of a tile and walks its positions with AHEAD of them on their way. `lanes` threads (whole warps) have
// `lanes * COLUMNS` columns of one tile; a block has several tiles where they are few. grad_y is null where nobody wants it.
#include "elements.cuh"
#include "segments.cuh"

constexpr int AHEAD = COLUMNS == 8 ? (ELEMENT == 0 ? 4 : 8) : 16;
constexpr int MOST_TILES = 4;  // of a block: 128 threads, at least 32 for a tile

extern "C" __global__ void __launch_bounds__(128)
    backward(const element* grad, i64 grad_row, const element* y, i64 y_row, const element* gate, i64 gate_row, const i64* index,
             i64 index_step, const i64* order, i64 order_step, const i64* bounds, i64 bounds_step, i64 table_rows, void* grad_y,
             i64 own, float* gate_sums, i64 tiles, i64 rows, i64 size, i64 lanes, i64 slabs) {
  __shared__ i64 position_held[MOST_TILES][TILE];
  const int width = (int)lanes, lane = threadIdx.x % width, slot = threadIdx.x / width, slots = blockDim.x / width;
  const int d_end = (int)size;
  const Segments segments = {index, index_step, order, order_step, bounds, bounds_step, table_rows, rows};
  for (i64 work = blockIdx.x; work < slabs * ((tiles + slots - 1) / slots); work += gridDim.x) {  // one turn, on every real shape
    const i64 number = work / slabs * slots + slot;
    const Tile tile = tile_at(segments, number);
    __syncthreads();  // the turn before has been read
    for (int place = lane; place < tile.count; place += width) position_held[slot][place] = position_at(segments, tile, place);
    __syncthreads();
    const int d = (int)(work % slabs * width + lane) * COLUMNS;
    if (number >= tiles || tile.count == 0 || d >= d_end) continue;
    const Floats<COLUMNS> factor = read_wide<VEC, COLUMNS>(gate + tile.row * gate_row, d, d_end);
    Floats<COLUMNS> sum = {};
    for (int base = 0; base < tile.count; base += AHEAD) {
      Raw<COLUMNS> raw_grad[AHEAD], raw_y[AHEAD];
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        const i64 position = position_held[slot][min(base + i, tile.count - 1)];
        raw_grad[i] = read_once<VEC, COLUMNS>(grad + position * grad_row, d, d_end);
        raw_y[i] = read_once<VEC, COLUMNS>(y + position * y_row, d, d_end);
      }
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        if (base + i >= tile.count) continue;
        Floats<COLUMNS> g = widened(raw_grad[i]);
        const Floats<COLUMNS> v = widened(raw_y[i]);
#pragma unroll
        for (int e = 0; e < COLUMNS; ++e) {
          sum.at[e] = add(sum.at[e], mul(g.at[e], v.at[e]));
          g.at[e] = mul(g.at[e], factor.at[e]);
        }
        if (grad_y) write_gradient<VEC>(grad_y, position_held[slot][base + i], own, d, d_end, g);
      }
    }
    write_float<VEC>(gate_sums + number * size, d, d_end, sum);
  }
}
