// y = x @ weight^T + bias for many rows: a block has 64 rows by 64 columns, and a thread owns whole chains of 8 x 4 results.
//
// Lane u of the order takes the vectors u, u + 32, ... of four elements. Two neighbouring threads share results: one has the even
// lanes, the other the odd ones. A thread goes through its sixteen lanes one after the other, with all vectors of a lane in a
// row, and in bit-reversed order: 0, 16, 8, 24, ... So what the halving tree adds next is always the newest sum and one that
// waits in a register, four of those per result at most. The last level, p[0] + p[1], is between the two threads.
//
// A step is a vector of both parities of every row of the tile, 32 bytes each; AHEAD steps are a stage of shared memory, STAGES - 1
// stages are on their way. Rows of the tile lie in shared memory as the threads of a warp read them, 128 bytes at a time.
#include "async.cuh"

constexpr int SIDE = 64, THREADS = 256, AHEAD = 4, STAGES = 3;
constexpr int ROWS = 8, COLS = 4, OUTPUTS = ROWS * COLS;
constexpr int LANES = 16;  // of a thread
constexpr int PERIOD = 128;  // elements from a vector of a lane to its next one

// Lane 2 * m + parity is the j-th: m has the four bits of j in reverse.
__device__ __forceinline__ int lane_of(int j) { return (j & 1) << 3 | (j & 2) << 1 | (j & 4) >> 1 | (j & 8) >> 3; }

// The steps in their order: elements `at` .. `at + 7` of every row, `at` = 8 * m + PERIOD * i.
struct Steps {
  int j, at, size;
  __device__ __forceinline__ void settle() {  // past lanes without elements
    while (at >= size && j < LANES) at = 8 * lane_of(++j);
  }
  __device__ __forceinline__ void next() {
    at += PERIOD;
    settle();
  }
};

typedef float Sums[OUTPUTS];

// From +0 on, so the first one is taken as it is, but for -0, which becomes +0: vectors past the end may be added or not.
__device__ __forceinline__ void add_to(Sums& total, const Sums& sum) {
#pragma unroll
  for (int i = 0; i < OUTPUTS; ++i) total[i] = add(total[i], sum[i]);
}
__device__ __forceinline__ void clear(Sums& sum) {
#pragma unroll
  for (int i = 0; i < OUTPUTS; ++i) sum[i] = 0.0f;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    linear_tile(const float* x, i64 x_row, const float* weight, i64 weight_row, const float* bias, float* y, i64 rows,
                i64 columns, i64 size_of_sum) {
  __shared__ __align__(16) float held[STAGES][AHEAD][2 * SIDE][8];  // rows of x, then rows of weight
  const int thread = threadIdx.x, parity = thread % 2, warp = thread / 32, size = (int)size_of_sum;
  const i64 row0 = (i64)blockIdx.x * SIDE, column0 = (i64)blockIdx.y * SIDE;

  // What this thread copies: 16 bytes of one row. Past the last row the last one is copied again; what comes of it is not stored.
  const int mine = thread / 2, inner = mine % SIDE;
  const float* const source = mine < SIDE ? x + min(row0 + inner, rows - 1) * x_row : weight + min(column0 + inner, columns - 1) * weight_row;
  const int place = mine < SIDE ? inner : SIDE + (inner & ~15) + inner % 4 * 4 + inner % 16 / 4;  // columns 4 g + c stand at 4 c + g
  Steps copied = {0, 0, size};
  const auto copy_stage = [&](int stage) {
#pragma unroll 1
    for (int d = 0; d < AHEAD; ++d) {
      if (copied.j < LANES) {  // four FP32 are eight BF16 to the copy
        copy8_async<8>(reinterpret_cast<bf16*>(&held[stage][d][place][parity * 4]), reinterpret_cast<const bf16*>(source),
                       2 * (copied.at + parity * 4), 2 * size);
        copied.next();
      }
    }
    copies_commit();
  };
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) copy_stage(s);

  // What it computes: rows row_group + 4 r of the 32 of its warp, columns 4 column_group + c of the 16.
  const int row_group = thread / 2 % 4, column_group = thread / 8 % 4, row_base = warp % 2 * 32, column_base = warp / 2 * 16;
  const int x_place = row_base + row_group, w_place = SIDE + column_base + column_group;
  Sums sum, pair = {}, four = {}, eight = {}, all = {};  // of one lane, two, four, eight, sixteen
  int step = 0, stage = 0, filling = STAGES - 1;
#pragma unroll 1
  for (int j = 0; j < LANES; ++j) {
    clear(sum);
#pragma unroll 1
    for (int at = 8 * lane_of(j); at < size; at += PERIOD) {
      if (step == 0) {
        copies_wait<STAGES - 2>();
        __syncthreads();  // the stage is there for all, and the one before it has been read by all
        copy_stage(filling);
        filling = filling + 1 == STAGES ? 0 : filling + 1;
      }
      const float(&here)[2 * SIDE][8] = held[stage][step];
      float4 w[COLS];
#pragma unroll
      for (int c = 0; c < COLS; ++c) w[c] = *reinterpret_cast<const float4*>(&here[w_place + 4 * c][parity * 4]);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const float4 a = *reinterpret_cast<const float4*>(&here[x_place + 4 * r][parity * 4]);
#pragma unroll
        for (int c = 0; c < COLS; ++c) {
          float& acc = sum[r * COLS + c];
          acc = __fmaf_rn(a.w, w[c].w, __fmaf_rn(a.z, w[c].z, __fmaf_rn(a.y, w[c].y, __fmaf_rn(a.x, w[c].x, acc))));
        }
      }
      if (++step == AHEAD) {
        step = 0;
        stage = stage + 1 == STAGES ? 0 : stage + 1;
      }
    }
    add_to(pair, sum);
    if ((j & 1) == 0) continue;
    add_to(four, pair), clear(pair);
    if ((j & 2) == 0) continue;
    add_to(eight, four), clear(four);
    if ((j & 4) == 0) continue;
    add_to(all, eight), clear(eight);
  }
  copies_wait<0>();

  // The two threads of a pair halve the results between them: rows r < 4 to the even one.
#pragma unroll
  for (int r = 0; r < ROWS / 2; ++r) {
    Floats<COLS> out;
    const i64 row = row0 + row_base + row_group + 4 * (r + parity * ROWS / 2), column = column0 + column_base + 4 * column_group;
#pragma unroll
    for (int c = 0; c < COLS; ++c) {
      const float low = all[r * COLS + c], high = all[(r + ROWS / 2) * COLS + c];
      const float total = add(parity ? high : low, __shfl_xor_sync(0xffffffffu, parity ? low : high, 1));
      out.at[c] = add(total, column < columns ? bias[column + c] : 0.0f);
    }
    if (row < rows) store<8, COLS>(y + row * columns, (int)column, (int)columns, out);
  }
}
