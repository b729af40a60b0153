// Contract "ascending": N dots and the sum of squares of every token, each a left fold from +0 over ascending k, the product
// rounded first. One lane owns a chain from its first term to its last.
//
// A dependent addition takes 4 cycles, so one chain of K terms takes 4 K cycles (33 us at K = 16384) and a lane can keep four
// chains going in that time. A thread holds R tokens times S outputs, so that a value read from shared memory serves several
// chains; LT lanes of a warp differ in their tokens, the other 32 / LT in their outputs; a block is WT by WN such warps. One
// more lane per token folds the squares. PRODUCERS further warps copy tiles of KT columns of x and of the weight, STAGES
// ahead. A tile never crosses the end of a stream, and what is past it is +0: the product +0 * +0 changes no sum that
// started at +0. Compile-time choices: R, S, LT, WT, WN; KB (columns on their way to registers); KT, STAGES, PRODUCERS;
// VEC, X_BF16.
#include "pieces.cuh"

#if X_BF16
typedef bf16 element;
#else
typedef float element;
#endif

constexpr int LN = 32 / LT;
constexpr int TOKENS = WT * LT * R, OUTPUTS = WN * LN * S;  // of a block
constexpr int DOTS = WT * WN * 32, SQUARES = (TOKENS + 31) / 32 * 32, COPIES = PRODUCERS * 32;  // threads
constexpr int X_PITCH = KT + PIECE<element>, W_PITCH = KT + PIECE<float>;  // eight rows lie in different banks
constexpr int X_PIECES = KT / PIECE<element>, W_PIECES = KT / PIECE<float>;
static_assert(COPIES % X_PIECES == 0 && COPIES % W_PIECES == 0, "a producer keeps its column");
static_assert(KT % (2 * KB) == 0 && KT % 16 == 0, "whole blocks of columns");

struct Tile {
  element x[TOKENS][X_PITCH];
  float w[OUTPUTS][W_PITCH];
};

// What a block works on.
struct Work {
  const element* x;  // its first token
  i64 x_row, x_stream;
  const float* weight;  // its first output
  i64 weight_row;
  int tokens, outputs;  // as many as there are, at most TOKENS and OUTPUTS
  int width, tiles;
};

// --- copying ----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void produce(Tile* tiles, const Work& work, int producer) {
  const int x_first = producer / X_PIECES, x_column = producer % X_PIECES * PIECE<element>;
  const int w_first = producer / W_PIECES, w_column = producer % W_PIECES * PIECE<float>;
  const element* x = work.x + x_first * work.x_row + x_column;
  const float* w = work.weight + w_first * work.weight_row + w_column;
  int column0 = 0;  // of the tile to copy next, which is tile k + STAGES - 1
  for (int k = 1 - STAGES; k < work.tiles; ++k) {
    if (k >= 0) {
      copies_wait<STAGES - 2>();
      __syncthreads();  // tile k is there, and nobody reads tile k - 1 any more
    }
    if (k + STAGES - 1 < work.tiles) {
      Tile& to = tiles[(k + STAGES - 1) % STAGES];
      copy_rows<VEC, TOKENS, X_PITCH, COPIES / X_PIECES>(&to.x[0][x_column], x + column0, work.x_row, x_first, work.tokens,
                                                         work.width - column0 - x_column);
      copy_rows<VEC, OUTPUTS, W_PITCH, COPIES / W_PIECES>(&to.w[0][w_column], w + column0, work.weight_row, w_first,
                                                          work.outputs, work.width - column0 - w_column);
      column0 += KT;
      if (column0 >= work.width) column0 = 0, x += work.x_stream, w += work.width;
    }
    copies_commit();
  }
  copies_wait<0>();
}

// --- folding ----------------------------------------------------------------------------------------------------------

struct Operands {
  Stored<element, KB> x[R];
  Stored<float, KB> w[S];
};

__device__ __forceinline__ Operands operands(const element* x, const float* w) {
  Operands o;
#pragma unroll
  for (int r = 0; r < R; ++r) o.x[r] = stored<KB>(x + r * LT * X_PITCH);
#pragma unroll
  for (int s = 0; s < S; ++s) o.w[s] = stored<KB>(w + s * LN * W_PITCH);
  return o;
}

__device__ __forceinline__ void fold_dots(float (&acc)[R][S], const Operands& o) {
#pragma unroll
  for (int i = 0; i < KB / 4; ++i) {
    Floats<4> x[R];
#pragma unroll
    for (int r = 0; r < R; ++r) x[r] = widen4(o.x[r].at[i]);
#pragma unroll
    for (int e = 0; e < 4; ++e)
#pragma unroll
      for (int r = 0; r < R; ++r)
#pragma unroll
        for (int s = 0; s < S; ++s) acc[r][s] = add(acc[r][s], mul(x[r].at[e], o.w[s].at[i].at[e]));
  }
}

__device__ __forceinline__ float fold_squares(float acc, const Stored<element, 8>& o) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const Floats<4> x = widen4(o.at[i]);
#pragma unroll
    for (int e = 0; e < 4; ++e) acc = add(acc, mul(x.at[e], x.at[e]));
  }
  return acc;
}

// Calls fold(tile, columns) for every tile, as soon as it is there. Columns come in blocks of 16.
template <typename Fold>
__device__ __forceinline__ void for_tiles(const Tile* tiles, const Work& work, Fold fold) {
  int slot = 0, left = work.width;
  for (int k = 0; k < work.tiles; ++k) {
    __syncthreads();
    fold(tiles[slot], min(KT, (left + 15) / 16 * 16));
    slot = slot + 1 < STAGES ? slot + 1 : 0;
    left = left > KT ? left - KT : work.width;
  }
}

extern "C" __global__ void __launch_bounds__(DOTS + SQUARES + COPIES)
    sums_ascending(const element* x, i64 x_row, i64 x_stream, const float* weight, i64 weight_row, float* parts, i64 rows,
                   i64 streams, i64 width, i64 outputs) {
  extern __shared__ __align__(16) char shared[];
  Tile* const tiles = reinterpret_cast<Tile*>(shared);
  const i64 token0 = (i64)blockIdx.x * TOKENS;
  const int output0 = blockIdx.y * OUTPUTS, per_stream = ((int)width + KT - 1) / KT;
  const Work work = {x + token0 * x_row,
                     x_row,
                     x_stream,
                     weight + output0 * weight_row,
                     weight_row,
                     (int)min((i64)TOKENS, rows - token0),
                     min(OUTPUTS, (int)outputs - output0),
                     (int)width,
                     (int)streams * per_stream};
  float* const out = parts + token0 * (outputs + 1);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;

  if (thread < DOTS) {
    const int t = warp / WN * (LT * R) + lane % LT, n = warp % WN * (LN * S) + lane / LT;  // the first of R by S
    float acc[R][S] = {};
    for_tiles(tiles, work, [&](const Tile& tile, int columns) {
      const element* const xs = tile.x[t];
      const float* const ws = tile.w[n];
      Operands even = operands(xs, ws);
      for (int c = 0; c < columns; c += 2 * KB) {
        const Operands odd = operands(xs + c + KB, ws + c + KB);
        fold_dots(acc, even);
        if (c + 2 * KB < columns) even = operands(xs + c + 2 * KB, ws + c + 2 * KB);
        fold_dots(acc, odd);
      }
    });
#pragma unroll
    for (int i = 0; i < R * S; ++i) {
      const int token = t + i / S * LT, output = n + i % S * LN;
      if (token < work.tokens && output < work.outputs) out[token * (outputs + 1) + output0 + output] = acc[i / S][i % S];
    }
  } else if (thread < DOTS + SQUARES) {
    const int t = thread - DOTS;
    const bool mine = t < work.tokens && output0 == 0;  // of the blocks that share a token, the first
    float acc = 0.0f;
    for_tiles(tiles, work, [&](const Tile& tile, int columns) {
      if (!mine) return;
      const element* const row = tile.x[t];
      auto even = stored<8>(row);
      for (int c = 0; c < columns; c += 16) {
        const auto odd = stored<8>(row + c + 8);
        acc = fold_squares(acc, even);
        if (c + 16 < columns) even = stored<8>(row + c + 16);
        acc = fold_squares(acc, odd);
      }
    });
    if (mine) out[t * (outputs + 1) + outputs] = acc;
  } else {
    produce(tiles, work, thread - DOTS - SQUARES);
  }
}
