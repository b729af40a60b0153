// grad^T @ given for many rows: out[n, k] is one chain over ascending rows of fused multiply-adds, bias_out[n] the left fold of
// grad[:, n]. A thread has LONG x 4 results, a block 16 * LONG x 32. TALL: the long side lies over n, otherwise over k.
//
// AHEAD rows are a stage of shared memory, STAGES - 1 stages are on their way. What the next row needs is read while one is
// multiplied, also across stages: a scheduler may have a single warp, since chains over rows cannot be cut. Rows past the last one
// are not added: their zeros would turn a sum of -0 into +0.
// WEIGHT, BIAS: which of the two are wanted. A bias is folded by the first block of columns, one number per thread.
#include "staged.cuh"

constexpr int THREADS = 128, AHEAD = 16, STAGES = 4;
constexpr int FAR = 16 * LONG, NEAR = 32;
constexpr int OVER_N = TALL ? FAR : NEAR, OVER_K = TALL ? NEAR : FAR, WIDTH = OVER_N + OVER_K;

// What a row gives to a thread.
struct Row {
  Floats<4> far[LONG / 4], near;
  float bias;
};

extern "C" __global__ void __launch_bounds__(THREADS)
    weight_tile(const float* grad, i64 grad_row, const float* given, i64 given_row, float* out, float* bias_out, i64 rows,
                i64 outputs, i64 columns) {
  __shared__ __align__(16) float held[STAGES][AHEAD][WIDTH];
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, most = (int)outputs, width = (int)columns;
  const int n0 = (int)blockIdx.x * OVER_N, k0 = (int)blockIdx.y * OVER_K;

  // What this thread copies: sixteen bytes of some rows on the long side, and of one row on the short side.
  constexpr int FAR_ROWS = THREADS / (FAR / 4);
  const int far_part = thread % (FAR / 4) * 4, far_row = thread / (FAR / 4), near_part = thread % (NEAR / 4) * 4, near_row = thread / (NEAR / 4);
  const float* const far_side = TALL ? grad + n0 : given + k0;
  const float* const near_side = TALL ? given + k0 : grad + n0;
  const i64 far_line = TALL ? grad_row : given_row, near_line = TALL ? given_row : grad_row;
  const int far_left = TALL ? most - n0 : WEIGHT ? width - k0 : 0, near_left = TALL ? WEIGHT ? width - k0 : 0 : most - n0;
  const int far_bytes = far_part < far_left ? 16 : 0, near_bytes = near_part < near_left ? 16 : 0;
  const float *far_from = far_side + far_row * far_line + far_part, *near_from = near_side + near_row * near_line + near_part;
  i64 uncopied = rows;
  const auto copy_stage = [&](int stage) {
#pragma unroll
    for (int i = 0; i < AHEAD / FAR_ROWS; ++i) {
      const int r = far_row + i * FAR_ROWS;
      copy_bytes_async(&held[stage][r][(TALL ? 0 : OVER_N) + far_part], far_from, r < uncopied ? far_bytes : 0);
      far_from += FAR_ROWS * far_line;
    }
    copy_bytes_async(&held[stage][near_row][(TALL ? OVER_N : 0) + near_part], near_from, near_row < uncopied ? near_bytes : 0);
    near_from += AHEAD * near_line;
    uncopied -= AHEAD;
    copies_commit();
  };
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) copy_stage(s);

  const int far = warp * 4 * LONG + 4 * place_of_four(lane), near = 4 * place_of_eight(lane);  // far + 16 i
  const int far_at = (TALL ? 0 : OVER_N) + far, near_at = (TALL ? OVER_N : 0) + near;
  const bool folds = BIAS && blockIdx.y == 0 && thread < OVER_N;
  const auto read = [&](int stage, int r) {
    const float* const row = held[stage][r];
    Row read = {};
#if WEIGHT
#pragma unroll
    for (int i = 0; i < LONG / 4; ++i) read.far[i] = read4(row + far_at + 16 * i);
    read.near = read4(row + near_at);
#endif
    if (folds) read.bias = row[thread];
    return read;
  };
  Floats<4> sum[LONG] = {};  // over the far side, then the near one
  float bias = 0.0f;
  const auto add_row = [&](const Row& row) {
#if WEIGHT
#pragma unroll
    for (int i = 0; i < LONG; ++i)
#pragma unroll
      for (int c = 0; c < 4; ++c) sum[i].at[c] = __fmaf_rn(row.far[i / 4].at[i % 4], row.near.at[c], sum[i].at[c]);
#endif
    if (folds) bias = add(bias, row.bias);
  };

  int stage = 0, filling = STAGES - 1;
  const auto enter = [&]() {
    copies_wait<STAGES - 2>();
    __syncthreads();  // the stage is there for all, and the one before it has been read by all
    copy_stage(filling);
    filling = filling + 1 == STAGES ? 0 : filling + 1;
  };
  enter();
  i64 left = rows;
  Row next = {};
  if (left > AHEAD) next = read(0, 0);
#pragma unroll 1
  for (; left > AHEAD; left -= AHEAD) {
#pragma unroll
    for (int r = 0; r < AHEAD; ++r) {
      const Row here = next;
      if (r + 1 < AHEAD) {
        next = read(stage, r + 1);
      } else {
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        enter();
        next = read(stage, 0);
      }
      add_row(here);
    }
  }
#pragma unroll 1
  for (int r = 0; r < (int)left; ++r) add_row(read(stage, r));
  copies_wait<0>();

#if WEIGHT
#if TALL
#pragma unroll
  for (int i = 0; i < LONG; ++i) {
    const int n = n0 + far + 16 * (i / 4) + i % 4;
    if (n < most) store<8, 4>(out + n * columns, k0 + near, width, sum[i]);
  }
#else
#pragma unroll
  for (int c = 0; c < 4; ++c)
#pragma unroll
    for (int i = 0; i < LONG; i += 4) {
      const Floats<4> four = {sum[i].at[c], sum[i + 1].at[c], sum[i + 2].at[c], sum[i + 3].at[c]};
      if (n0 + near + c < most) store<8, 4>(out + (n0 + near + c) * columns, k0 + far + 4 * i, width, four);
    }
#endif
#endif
  if (folds && n0 + thread < most) bias_out[n0 + thread] = bias;
}
