// The lanes of x @ weight^T for long sums and few columns: a block has 4 R rows by 8 C columns, and each of its warps all of these for
// one lane of the order; a thread has R x C sums. So many warps share one tile, and a tile may be small.
//
// GROUPS: blocks that share the lanes of a tile. Each has the lanes of two residues, one lane to a warp, and leaves a sum for each
// residue in parts[residue][t][n], for fold_lanes.cu.
// A lane's `+ (+0)` matters only where all of a tree's sums are -0: it is left to the end.
//
// Staged are PERIODS vectors of each line for every warp; STAGES - 1 stages are on their way. Past the end of a line stands +0.
#include "staged.cuh"

constexpr int WARPS = 32 / GROUPS, THREADS = 32 * WARPS;
constexpr int TALL = 4 * R, WIDE = 8 * C, LINES = TALL + WIDE, OUTPUTS = R * C;
constexpr int PITCH = LINES | 1;  // vectors of a line lie in other banks
constexpr int PERIODS = 2, PERIOD = 128;  // elements from a vector of a lane to its next one
constexpr int TOGETHER = OUTPUTS > 16 ? 1 : PERIODS;  // of which the operands are in registers at a time
constexpr int COPIES = (LINES + 31) / 32;  // of a thread, for each period

typedef float Stage[PERIODS][WARPS][PITCH][4];
typedef float Sums[OUTPUTS];
typedef float Parked[WARPS][OUTPUTS][32];

__device__ __forceinline__ int lane_of(int warp, int group) { return 2 * group + warp % 2 + warp / 2 * (2 * GROUPS); }

__device__ __forceinline__ void multiply(Sums& sum, const float (&here)[PITCH][4], int x_line, int w_line) {
  constexpr bool HOLD_X = R <= C;  // the shorter side stays in registers
  constexpr int HELD = HOLD_X ? R : C, OTHER = HOLD_X ? C : R;
  Floats<4> held[HELD];
#pragma unroll
  for (int i = 0; i < HELD; ++i) held[i] = read4(here[HOLD_X ? x_line + 4 * i : w_line + 8 * i]);
#pragma unroll
  for (int j = 0; j < OTHER; ++j) {
    const Floats<4> other = read4(here[HOLD_X ? w_line + 8 * j : x_line + 4 * j]);
#pragma unroll
    for (int e = 0; e < 4; ++e)
#pragma unroll
      for (int i = 0; i < HELD; ++i) {
        float& acc = sum[HOLD_X ? i * C + j : j * C + i];
        acc = __fmaf_rn(held[i].at[e], other.at[e], acc);
      }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 512 / THREADS)  // sixteen warps hide what one waits for
    lane_tile(const float* x, i64 x_row, const float* weight, i64 weight_row, float* parts, i64 rows, i64 columns, i64 size_of_sum) {
  extern __shared__ __align__(16) unsigned char shared[];
  Stage* const stages = reinterpret_cast<Stage*>(shared);
  Parked& parked = *reinterpret_cast<Parked*>(shared);  // when stages have been read
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, size = (int)size_of_sum;
  const int group = (int)(blockIdx.x % GROUPS);
  const i64 row0 = (i64)(blockIdx.x / GROUPS) * TALL, column0 = (i64)blockIdx.y * WIDE;

  // What this thread copies: for warp `of` the lines `line` + 32 j; +0 where there is no such row or column.
  const int of = thread % WARPS, line = thread / WARPS;
  const float* source[COPIES];
  int sizes[COPIES];
#pragma unroll
  for (int j = 0; j < COPIES; ++j) {
    const int at = line + 32 * j;
    const i64 row = row0 + at, column = column0 + at - TALL;
    sizes[j] = (at < TALL ? row < rows : column < columns) ? size : 0;
    source[j] = (at < TALL ? x + row * x_row : weight + column * weight_row) + 4 * lane_of(of, group);
    sizes[j] -= 4 * lane_of(of, group);
    asm volatile("" : "+r"(sizes[j]));  // to be kept, not made again for every copy
  }
  int copied = 0;
  const auto copy_stage = [&](int stage) {
    if (copied < size) {
#pragma unroll
      for (int i = 0; i < PERIODS; ++i) {
#pragma unroll
        for (int j = 0; j < COPIES; ++j) {
          if (32 * (j + 1) > LINES && line + 32 * j >= LINES) continue;
          const int at = copied + i * PERIOD;
          copy_bytes_async(stages[stage][i][of][line + 32 * j], source[j] + at, at < sizes[j] ? 16 : 0);
        }
      }
      copied += PERIODS * PERIOD;
    }
    copies_commit();
  };
#pragma unroll 1
  for (int s = 0; s < STAGES - 1; ++s) copy_stage(s);

  const int row_group = place_of_four(lane), column_group = place_of_eight(lane);  // rows row_group + 4 r, columns column_group + 8 c
  Sums sum = {};
  int stage = 0, filling = STAGES - 1;
#pragma unroll 1
  for (int first = 0; first < size; first += PERIODS * PERIOD) {
    copies_wait<STAGES - 2>();
    __syncthreads();  // the stage is there for all, and the one before it has been read by all
    copy_stage(filling);
#pragma unroll TOGETHER
    for (int i = 0; i < PERIODS; ++i) multiply(sum, stages[stage][i][warp], row_group, TALL + column_group);
    stage = stage + 1 == STAGES ? 0 : stage + 1;
    filling = filling + 1 == STAGES ? 0 : filling + 1;
  }
  copies_wait<0>();
  __syncthreads();
#pragma unroll
  for (int i = 0; i < OUTPUTS; ++i) parked[warp][i][lane] = sum[i];
  __syncthreads();

  // The first levels of the tree, a result at a time: halves of what the warps have, until one is left for each residue.
#pragma unroll 2
  for (int i = warp; i < 2 * OUTPUTS; i += WARPS) {
    const int which = i % OUTPUTS, residue = i / OUTPUTS;
    float p[WARPS / 2];
#pragma unroll
    for (int u = 0; u < WARPS / 2; ++u) p[u] = parked[residue + 2 * u][which][lane];
    const i64 row = row0 + row_group + 4 * (which / C), column = column0 + column_group + 8 * (which % C);
    if (row < rows && column < columns) parts[((2 * group + residue) * rows + row) * columns + column] = halved(p);
  }
}
