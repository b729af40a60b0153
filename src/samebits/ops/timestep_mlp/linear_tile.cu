// y = x @ weight^T + bias for many rows and at most 128 elements: a lane of the order has one vector of four elements, or none. A block
// has 64 rows by 32 columns at a time, all of their elements in shared memory, and the next rows on their way.
//
// Two threads share 8 x 4 results: one has the even lanes, the other the odd ones, and the last level of the tree,
// p[0] + p[1], is between them. PAIRS: pairs of lanes that have elements, in fours.
// Pair m is lanes 2 m and 2 m + 1. A thread goes through the pairs as the halving tree joins them, so that few sums wait.
// SILU: then `y` takes the sums with their bias, `act` their SiLU.
// A lane's `+ (+0)` matters only where all of a tree's sums are -0: it is left to the end.
#include "silu.cuh"
#include "staged.cuh"

constexpr int THREADS = 128, TALL = 64, WIDE = 32;
constexpr int ROWS = 8, COLS = 4, OUTPUTS = ROWS * COLS;

constexpr int BLOCKS = PAIRS > (__CUDA_ARCH__ < 1000 ? 12 : 8) ? 2 : 3;  // per multiprocessor, by registers and shared memory

typedef float Sums[OUTPUTS];
// Pairs of lanes, then lines; one more of these, so that neighbouring pairs of a line lie in other banks.
typedef float Rows[PAIRS][TALL + 1][8];
typedef float Columns[PAIRS][WIDE + 1][8];

__device__ __forceinline__ void add_to(Sums& total, const Sums& sum) {
#pragma unroll
  for (int i = 0; i < OUTPUTS; ++i) total[i] = add(total[i], sum[i]);
}

// The sums of one vector of each line, as they are or added to others.
template <bool ADD>
__device__ __forceinline__ void multiply(Sums& sum, const float (&x)[TALL + 1][8], int x_line, const float (&weight)[WIDE + 1][8], int w_line, int at) {
  Floats<4> w[COLS];
#pragma unroll
  for (int c = 0; c < COLS; ++c) w[c] = read4(&weight[w_line + 4 * c][at]);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const Floats<4> a = read4(&x[x_line + 4 * r][at]);
#pragma unroll
    for (int c = 0; c < COLS; ++c) {
      float acc = 0.0f;
#pragma unroll
      for (int e = 0; e < 4; ++e) acc = __fmaf_rn(a.at[e], w[c].at[e], acc);
      sum[r * COLS + c] = ADD ? add(sum[r * COLS + c], acc) : acc;
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    linear_tile(const float* x, i64 x_row, const float* weight, i64 weight_row, const float* bias, float* y, float* act, i64 rows,
                i64 columns, i64 size_of_sum) {
  extern __shared__ __align__(16) unsigned char shared[];
  Rows* const held = reinterpret_cast<Rows*>(shared);  // of this tile and of the next one
  Columns& held_weight = *reinterpret_cast<Columns*>(shared + 2 * sizeof(Rows));
  const int thread = threadIdx.x, parity = thread / 4 % 2, warp = thread / 32, size = (int)size_of_sum;
  const int column0 = (int)blockIdx.y * WIDE, tiles = (int)((rows + TALL - 1) / TALL), width = (int)columns;

  // What this thread copies: a part of every sixteenth line; +0 where there is no such row or column.
  constexpr int LINES = THREADS / 8;
  int part = thread % 8 * 4, line = thread / 8;
  const auto copy_line = [&](float (*to)[8], int pitch, const float* from, bool there) {
#pragma unroll
    for (int j = 0; j < PAIRS / 4; ++j) {
      const int at = part + 32 * j;
      copy_bytes_async(&to[at / 8 * pitch][at % 8], from + at, there && at < size ? 16 : 0);
    }
  };
  const auto copy_rows = [&](Rows& to, int tile) {
    const i64 first = (i64)tile * TALL + line;
#pragma unroll
    for (int a = 0; a < TALL; a += LINES) copy_line(&to[0][line + a], TALL + 1, x + (first + a) * x_row, first + a < rows);
    copies_commit();
  };
#pragma unroll
  for (int a = 0; a < WIDE; a += LINES) {  // columns 4 g + c of sixteen stand at 4 c + g
    const int column = column0 + line + a;
    copy_line(&held_weight[0][line % 4 * 4 + line / 4 + a], WIDE + 1, weight + column * weight_row, column < width);
  }
  copy_rows(held[0], blockIdx.x);

  // What it computes: rows row_group + 4 r of the 32 of its warp, columns 4 column_group + c of the 16. Neighbours share the one
  // number or the other, as in staged.cuh.
  int row_group = (thread / 2 & 1) | (thread / 4 & 2), column_group = (thread & 1) | (thread / 8 & 2), row_base = warp % 2 * 32, column_base = warp / 2 * 16;
  int buffer = 0;
  const auto pair = [&](Sums& sum, int m) {
    multiply<false>(sum, held[buffer][m], row_base + row_group, held_weight[m], column_base + column_group, 4 * parity);
  };
  const auto add_pair = [&](Sums& sum, int m) {
    multiply<true>(sum, held[buffer][m], row_base + row_group, held_weight[m], column_base + column_group, 4 * parity);
  };
  const auto four = [&](Sums& sum, int m) {  // (m, m + 8), (m + 4, m + 12)
    pair(sum, m);
    if constexpr (PAIRS > 8) add_pair(sum, m + 8);
    if constexpr (PAIRS > 12) {
      Sums other;
      pair(other, m + 4), add_pair(other, m + 12);
      add_to(sum, other);
    } else if constexpr (PAIRS > 4) {
      add_pair(sum, m + 4);
    }
  };
#pragma unroll 1
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    // Addresses are made when they are needed: registers hold sums.
    asm volatile("" : "+r"(part), "+r"(line), "+r"(row_group), "+r"(column_group));
    copies_wait<0>();
    __syncthreads();  // this tile is there for all, and the one before it has been read by all
    if (tile + gridDim.x < tiles) copy_rows(held[buffer ^ 1], tile + gridDim.x);
    Sums all, first;
#pragma unroll 1
    for (int m = 0; m < 2; ++m) {
      Sums other;
      four(all, m), four(other, m + 2);
      add_to(all, other);
      if (m == 0) {
#pragma unroll
        for (int i = 0; i < OUTPUTS; ++i) first[i] = all[i];
      }
    }
    add_to(all, first);

    // The two threads of a pair halve the results between them: the first rows to the even one.
#pragma unroll
    for (int r = 0; r < ROWS / 2; ++r) {
      Floats<COLS> out;
      const i64 row = (i64)tile * TALL + row_base + row_group + 4 * (r + parity * ROWS / 2);
      const int column = column0 + column_base + 4 * column_group;
#pragma unroll
      for (int c = 0; c < COLS; ++c) {
        const float low = all[r * COLS + c], high = all[(r + ROWS / 2) * COLS + c];
        const float total = add(parity ? high : low, __shfl_xor_sync(0xffffffffu, parity ? low : high, 4));
        out.at[c] = add(add(total, 0.0f), column < width ? bias[column + c] : 0.0f);
      }
      if (row >= rows) continue;
      store<8, COLS>(y + row * columns, column, width, out);
#if SILU
#pragma unroll
      for (int c = 0; c < COLS; ++c) out.at[c] = silu(out.at[c]);
      store<8, COLS>(act + row * columns, column, width, out);
#endif
    }
    buffer ^= 1;
  }
}
