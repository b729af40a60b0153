// grad_gamma[d] = left fold, from start or +0, over ascending rows of (grad_y * x) * rstd, the same for both contracts. A block owns 32 columns
// and all rows: warp 0 folds, a lane per column, while the other warps copy rows STAGES tiles ahead and compute the terms of
// the next tile, transposed so that the folding lane reads four rows at once. Compile-time choices: VEC; TILE (rows per
// step); STAGES (steps in flight).
#include "async.cuh"
#include "fold.cuh"

constexpr int COLUMNS = 32;
constexpr int PRODUCERS = TILE * 2;  // a thread takes eight columns of two rows, TILE / 2 apart
constexpr int TILE_PITCH = TILE + 4;

// Left by BY places, or not at all.
template <int BY>
__device__ __forceinline__ Float8 rotated(const Float8& t, bool yes) {
  Float8 turned;
#pragma unroll
  for (int e = 0; e < 8; ++e) turned.at[e] = yes ? t.at[(e + BY) % 8] : t.at[e];
  return turned;
}

extern "C" __global__ void __launch_bounds__(32 + PRODUCERS)
    backward_gamma(const bf16* dy, i64 dy_row, const bf16* x, i64 x_row, const float* rstd, i64 rstd_row, float* dgamma,
                           const float* start, i64 rows, i64 size) {
  extern __shared__ __align__(16) float terms[];  // [2][COLUMNS][TILE_PITCH], then the copies in flight
  bf16* const flight = reinterpret_cast<bf16*>(terms + 2 * COLUMNS * TILE_PITCH);  // [STAGES][2 vectors][dy, x][PRODUCERS][8]
  const int column0 = blockIdx.x * COLUMNS, d_end = (int)size;
  const i64 tiles = (rows + TILE - 1) / TILE;

  if (threadIdx.x < 32) {
    const int d = column0 + threadIdx.x;
    float acc = start && d < d_end ? add(0.0f, start[d]) : 0.0f;
    for (i64 k = 0; k < tiles; ++k) {
      __syncthreads();  // the terms of tile k are complete
      const int count = (int)min((i64)TILE, rows - k * TILE);
      acc = fold<16>(acc, terms + (k % 2 * COLUMNS + threadIdx.x) * TILE_PITCH, padded(count, 16));
    }
    if (d < d_end) dgamma[d] = acc;
    return;
  }

  const int producer = threadIdx.x - 32;
  const int quarter = producer % 4, row_in_tile = producer / 4, column = column0 + quarter * 8;
  const auto row_of = [&](i64 tile, int v) { return tile * TILE + v * (TILE / 2) + row_in_tile; };
  const auto slot = [&](i64 tile, int v, int which) {
    return flight + ((((int)(tile % STAGES) * 2 + v) * 2 + which) * PRODUCERS + producer) * 8;
  };
  const auto fetch = [&](i64 tile) {  // a thread reads back only what it copied itself, so no barrier is needed
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      const i64 row = min(row_of(tile, v), rows - 1);
      const int end = row_of(tile, v) < rows ? d_end : 0;  // past the last row everything is +0
      copy8_async<VEC>(slot(tile, v, 0), dy + row * dy_row, column, end);
      copy8_async<VEC>(slot(tile, v, 1), x + row * x_row, column, end);
    }
    copies_commit();
  };
  const auto rstd_at = [&](i64 tile, int v) {
    const i64 row = row_of(tile, v);
    return row < rows ? rstd[row * rstd_row] : 0.0f;
  };
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) fetch(s);
  float r_next[2] = {rstd_at(0, 0), rstd_at(0, 1)};
  for (i64 k = 0; k < tiles; ++k) {
    const float r[2] = {r_next[0], r_next[1]};
#pragma unroll
    for (int v = 0; v < 2; ++v) r_next[v] = rstd_at(k + 1, v);
    fetch(k + STAGES - 1);
    copies_wait<STAGES - 1>();
    float* const out = terms + (k % 2 * COLUMNS + quarter * 8) * TILE_PITCH + row_in_tile;
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      const Float8 g = widen8(*reinterpret_cast<const uint4*>(slot(k, v, 0)));
      const Float8 w = widen8(*reinterpret_cast<const uint4*>(slot(k, v, 1)));
      Float8 t;
#pragma unroll
      for (int e = 0; e < 8; ++e) t.at[e] = mul(mul(g.at[e], w.at[e]), r[v]);
      // The four threads of a row start two columns apart, so that a warp writes to 32 different banks.
      t = rotated<2>(t, quarter & 1);
      t = rotated<4>(t, quarter & 2);
#pragma unroll
      for (int e = 0; e < 8; ++e) out[(e + 2 * quarter) % 8 * TILE_PITCH + v * (TILE / 2)] = t.at[e];
    }
    __syncthreads();
  }
  copies_wait<0>();
}
