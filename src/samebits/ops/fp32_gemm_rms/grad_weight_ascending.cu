// Contract "ascending": grad_weight[n, k] = left fold, from start or +0, over ascending rows t of grad_proj[t, n] * x[t, k],
// the product rounded first. One thread owns a chain over all rows: S outputs times four columns of them, so that what it
// reads from shared memory serves 4 S chains.
//
// A block is four warps of S outputs each, over the same 128 columns of one stream; PRODUCERS further warps copy tiles of ROWS
// rows, STAGES ahead. Rows past the last are +0: the product +0 * +0 changes no sum that started at +0. Compile-time choices:
// S; ROWS, STAGES, PRODUCERS; VEC, X_BF16.
#include "pieces.cuh"

#if X_BF16
typedef bf16 element;
#else
typedef float element;
#endif

constexpr int WARPS = 4, COLUMNS = 128, COPIES = PRODUCERS * 32;
constexpr int S_PITCH = (S + 3) / 4 * 4;  // the outputs of a warp, in whole vectors
constexpr int X_PIECES = COLUMNS / PIECE<element>;
static_assert(COPIES % X_PIECES == 0 && ROWS % PRODUCERS == 0, "a producer keeps its column");

struct Tile {
  element x[ROWS][COLUMNS];
  float g[ROWS][WARPS][S_PITCH];
};

struct Operands {
  Stored<element, 4> x;
  Stored<float, S_PITCH> g;
};

__device__ __forceinline__ Operands operands(const Tile& tile, int row, int warp, int lane) {
  return {stored<4>(&tile.x[row][lane * 4]), stored<S_PITCH>(tile.g[row][warp])};
}

__device__ __forceinline__ void fold_row(float (&acc)[S][4], const Operands& o) {
  const Floats<4> x = widen4(o.x.at[0]);
#pragma unroll
  for (int s = 0; s < S; ++s)
#pragma unroll
    for (int c = 0; c < 4; ++c) acc[s][c] = add(acc[s][c], mul(o.g.at[s / 4].at[s % 4], x.at[c]));
}

extern "C" __global__ void __launch_bounds__(WARPS * 32 + COPIES)
    grad_weight_ascending(const float* grad_proj, i64 grad_row, const element* x, i64 x_row, i64 x_stream, const float* start,
                          i64 start_row, float* out, i64 rows, i64 streams, i64 width, i64 outputs) {
  extern __shared__ __align__(16) char shared[];
  Tile* const tiles = reinterpret_cast<Tile*>(shared);
  const int per_stream = ((int)width + COLUMNS - 1) / COLUMNS;
  const int stream = blockIdx.x / per_stream, column0 = blockIdx.x % per_stream * COLUMNS;
  const int output0 = blockIdx.y * (WARPS * S), thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const i64 count = (rows + ROWS - 1) / ROWS;

  if (warp >= WARPS) {
    const int producer = thread - WARPS * 32, first = producer / X_PIECES, column = producer % X_PIECES * PIECE<element>;
    const element* from = x + stream * x_stream + first * x_row + column0 + column;
    const int row0 = producer / 32;  // of grad_proj, a warp copies every PRODUCERS-th row and a lane one output of it
    const bool exists = output0 + lane < outputs;
    const float* g = grad_proj + row0 * grad_row + output0 + lane;
    i64 left = rows;
    int slot = 0;  // of the tile to copy next, which is tile k + STAGES - 1
    for (i64 k = 1 - STAGES; k < count; ++k) {
      if (k >= 0) {
        copies_wait<STAGES - 2>();
        __syncthreads();  // tile k is there, and nobody reads tile k - 1 any more
      }
      if (left > 0) {
        Tile& to = tiles[slot];
        const int here = (int)min((i64)ROWS, left);
        copy_rows<VEC, ROWS, COLUMNS, COPIES / X_PIECES>(&to.x[0][column], from, x_row, first, here,
                                                         (int)width - column0 - column);
        if (lane < WARPS * S) {
#pragma unroll
          for (int j = 0; j < ROWS / PRODUCERS; ++j) {
            const int row = row0 + j * PRODUCERS;
            copy_float(&to.g[row][lane / S][lane % S], g, exists && row < here);
            g += PRODUCERS * grad_row;
          }
        }
        from += ROWS * x_row, left -= ROWS;
        slot = slot + 1 < STAGES ? slot + 1 : 0;
      }
      copies_commit();
    }
    copies_wait<0>();
    return;
  }

  const int column = column0 + lane * 4, first = output0 + warp * S;
  const i64 size = streams * width, base = stream * width;
  float acc[S][4] = {};
  if (start)
#pragma unroll
    for (int s = 0; s < S; ++s)
#pragma unroll
      for (int c = 0; c < 4; ++c)
        if (first + s < outputs && column + c < width) acc[s][c] = add(0.0f, start[(first + s) * start_row + base + column + c]);
  int slot = 0;
  for (i64 k = 0; k < count; ++k) {
    __syncthreads();
    const Tile& tile = tiles[slot];
    const int here = ((int)min((i64)ROWS, rows - k * ROWS) + 1) / 2 * 2;
    Operands even = operands(tile, 0, warp, lane);
    for (int row = 0; row < here; row += 2) {
      const Operands odd = operands(tile, row + 1, warp, lane);
      fold_row(acc, even);
      if (row + 2 < here) even = operands(tile, row + 2, warp, lane);
      fold_row(acc, odd);
    }
    slot = slot + 1 < STAGES ? slot + 1 : 0;
  }
#pragma unroll
  for (int s = 0; s < S; ++s)
    if (first + s < outputs) store<VEC>(out + (first + s) * size + base, column, (int)width, Floats<4>{acc[s][0], acc[s][1], acc[s][2], acc[s][3]});
}
