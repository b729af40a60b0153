// grad^T @ given for many rows: out[n, k] is one chain over ascending rows of fused multiply-adds, bias_out[n] the left fold of
// grad[:, n]. A block has 64 x 32 results, a thread 4 x 4. TALL: the 64 lie over n, otherwise over k.
//
// AHEAD rows are a stage of shared memory, STAGES - 1 stages are on their way. Rows past the last one are not added: their zeros
// would turn a sum of -0 into +0.
// WEIGHT, BIAS: which of the two are wanted. A bias is folded by the first block of columns, one number per thread.
#include "staged.cuh"

constexpr int THREADS = 128, AHEAD = 16, STAGES = 3;
constexpr int OVER_N = TALL ? 64 : 32, OVER_K = TALL ? 32 : 64, WIDTH = OVER_N + OVER_K;

extern "C" __global__ void __launch_bounds__(THREADS)
    weight_tile(const float* grad, i64 grad_row, const float* given, i64 given_row, float* out, float* bias_out, i64 rows,
                i64 outputs, i64 columns) {
  __shared__ __align__(16) float held[STAGES][AHEAD][WIDTH];
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, most = (int)outputs, width = (int)columns;
  const int n0 = (int)blockIdx.x * OVER_N, k0 = (int)blockIdx.y * OVER_K;

  i64 copied = 0;
  const auto copy_stage = [&](int stage) {
#pragma unroll
    for (int i = 0; i < AHEAD * WIDTH / 4 / THREADS; ++i) {
      const int r = (thread + i * THREADS) / (WIDTH / 4), at = (thread + i * THREADS) % (WIDTH / 4) * 4;
      const i64 t = copied + r;
      if (t >= rows) continue;
      if (at < OVER_N)
        copy4_async(&held[stage][r][at], grad + t * grad_row, n0 + at, most);
      else if (WEIGHT)
        copy4_async(&held[stage][r][at], given + t * given_row, k0 + at - OVER_N, width);
    }
    copied += AHEAD;
    copies_commit();
  };
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) copy_stage(s);

  const int of_64 = warp * 16 + 4 * place_of_four(lane), of_32 = 4 * place_of_eight(lane);
  const int n = TALL ? of_64 : of_32, k = TALL ? of_32 : of_64;
  Floats<4> sum[4] = {};  // over n, then k
  float bias = 0.0f;
  const bool folds = BIAS && blockIdx.y == 0 && thread < OVER_N;
  int stage = 0, filling = STAGES - 1;
#pragma unroll 1
  for (i64 t = 0; t < rows; t += AHEAD) {
    copies_wait<STAGES - 2>();
    __syncthreads();  // the stage is there for all, and the one before it has been read by all
    copy_stage(filling);
    const int here = (int)min((i64)AHEAD, rows - t);
#pragma unroll 4
    for (int r = 0; r < here; ++r) {
      const float* const row = held[stage][r];
#if WEIGHT
      const Floats<4> g = read4(row + n), a = read4(row + OVER_N + k);
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c) sum[i].at[c] = __fmaf_rn(g.at[i], a.at[c], sum[i].at[c]);
#endif
      if (folds) bias = add(bias, row[thread]);
    }
    stage = stage + 1 == STAGES ? 0 : stage + 1;
    filling = filling + 1 == STAGES ? 0 : filling + 1;
  }
  copies_wait<0>();

#if WEIGHT
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (n0 + n + i < most) store<8, 4>(out + (n0 + n + i) * columns, k0 + k, width, sum[i]);
#endif
  if (folds && n0 + thread < most) bias_out[n0 + thread] = bias;
}
