// grad_gamma[d] = left fold over ascending rows of (grad_y * x) * rstd, the same for both contracts. A block owns 32 columns
// and all rows: warp 0 folds, a lane per column, while the other warps copy rows STAGES tiles ahead and compute the terms of
// the next tile, transposed so that the folding lane reads four rows at once. Compile-time choices: VEC; TILE (rows per
// step); STAGES (steps in flight).
#include "async.cuh"
#include "fold.cuh"

constexpr int COLUMNS = 32;
constexpr int PRODUCERS = TILE * 2;  // a thread takes two vectors of one row, 16 columns apart
constexpr int TILE_PITCH = TILE + 4;

extern "C" __global__ void __launch_bounds__(32 + PRODUCERS)
    backward_gamma(const bf16* dy, i64 dy_row, const bf16* x, i64 x_row, const float* rstd, i64 rstd_row, float* dgamma,
                           i64 rows, i64 size) {
  extern __shared__ __align__(16) float terms[];  // [2][COLUMNS][TILE_PITCH], then the copies in flight
  bf16* const flight = reinterpret_cast<bf16*>(terms + 2 * COLUMNS * TILE_PITCH);  // [STAGES][2 vectors][dy, x][PRODUCERS][8]
  const int column0 = blockIdx.x * COLUMNS, d_end = (int)size;
  const i64 tiles = (rows + TILE - 1) / TILE;

  if (threadIdx.x < 32) {
    float acc = 0.0f;
    for (i64 k = 0; k < tiles; ++k) {
      __syncthreads();  // the terms of tile k are complete
      const int count = (int)min((i64)TILE, rows - k * TILE);
      acc = fold_terms(acc, terms + (k % 2 * COLUMNS + threadIdx.x) * TILE_PITCH, (count + 15) / 16 * 16);
    }
    const int d = column0 + threadIdx.x;
    if (d < d_end) dgamma[d] = acc;
    return;
  }

  const int producer = threadIdx.x - 32;
  const int row_in_tile = producer / 2, half = producer % 2;
  const auto slot = [&](i64 tile, int vector, int which) {
    return flight + ((((int)(tile % STAGES) * 2 + vector) * 2 + which) * PRODUCERS + producer) * 8;
  };
  const auto column_of = [&](int vector) { return column0 + vector * 16 + half * 8; };
  const auto fetch = [&](i64 tile) {  // a thread reads back only what it copied itself, so no barrier is needed
    const i64 row = tile * TILE + row_in_tile;
    const int end = row < rows ? d_end : 0;  // past the last row everything is +0
    const i64 safe = row < rows ? row : 0;
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      copy8_async<VEC>(slot(tile, v, 0), dy + safe * dy_row, column_of(v), end);
      copy8_async<VEC>(slot(tile, v, 1), x + safe * x_row, column_of(v), end);
    }
    copies_commit();
  };
  const auto rstd_at = [&](i64 tile) {
    const i64 row = tile * TILE + row_in_tile;
    return row < rows ? rstd[row * rstd_row] : 0.0f;
  };
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) fetch(s);
  float r_next = rstd_at(0);
  for (i64 k = 0; k < tiles; ++k) {
    const float r = r_next;
    r_next = rstd_at(k + 1);
    fetch(k + STAGES - 1);
    copies_wait<STAGES - 1>();
    float* const out = terms + k % 2 * COLUMNS * TILE_PITCH + row_in_tile;
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      const Float8 g = widen8(*reinterpret_cast<const uint4*>(slot(k, v, 0)));
      const Float8 w = widen8(*reinterpret_cast<const uint4*>(slot(k, v, 1)));
#pragma unroll
      for (int e = 0; e < 8; ++e) out[(v * 16 + half * 8 + e) * TILE_PITCH] = mul(mul(g.at[e], w.at[e]), r);
    }
    __syncthreads();
  }
  copies_wait<0>();
}
