// The last step of sums over tiles: left folds of their partials from +0, a thread per column, a block per table row and for
// each of `tables` tables, whose gradients are FP32. One more block, where `shared_out` is given, has the parameter that all rows
// share: it folds all tiles, and is FP32 or, where `own` says so, of the element type. With SEGMENTED 0 that is all there is.
#include "elements.cuh"
#include "segments.cuh"

constexpr int AHEAD = 32;  // partials on their way

__device__ __forceinline__ float fold(const float* partials, i64 first, i64 count, i64 size) {
  float acc = 0.0f;
  for (i64 base = 0; base < count; base += AHEAD) {
    float term[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) term[i] = base + i < count ? partials[(first + base + i) * size] : 0.0f;
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) acc = add(acc, term[i]);  // +0 past the end changes no sum that began at +0
  }
  return acc;
}

extern "C" __global__ void __launch_bounds__(128)
    fold_tiles(const float* first_sums, float* first_out, const float* second_sums, float* second_out, const float* shared_sums,
               void* shared_out, i64 own, const i64* bounds, i64 bounds_step, i64 table_rows, i64 tiles, i64 rows, i64 size,
               i64 tables) {
  i64 count = tiles;
#if SEGMENTED
  const Segments segments = {nullptr, 0, nullptr, 0, bounds, bounds_step, table_rows, rows};
  if (blockIdx.x < tables * table_rows) {
    const i64 row = blockIdx.x / (unsigned)tables;
    const bool second = blockIdx.x % (unsigned)tables;
    const RowTiles those = tiles_of_row(segments, row, tiles);
    const float* const sums = second ? second_sums : first_sums;
    float* const out = second ? second_out : first_out;
    if (!out) return;
    for (i64 d = (i64)blockIdx.y * blockDim.x + threadIdx.x; d < size; d += (i64)gridDim.y * blockDim.x)
      out[row * size + d] = fold(sums + d, those.first, those.count, size);
    return;
  }
  const RowTiles last = tiles_of_row(segments, table_rows - 1, tiles);
  count = last.first + last.count;
#endif
  if (!shared_out) return;
  for (i64 d = (i64)blockIdx.y * blockDim.x + threadIdx.x; d < size; d += (i64)gridDim.y * blockDim.x) {
    const float sum = fold(shared_sums + d, 0, count, size);
#if ELEMENT != 0
    if (own) {
      static_cast<element*>(shared_out)[d] = (element)pair_of(sum, 0.0f);
      continue;
    }
#endif
    static_cast<float*>(shared_out)[d] = sum;
  }
}
