// grad @ weight for many rows: the sum over n of grad[t, n] * weight[n, k], in chunks of 64 terms that are folded. A block has
// 32 rows by 32 columns, a thread 4 x 4 results: a chunk's sums and the folded ones.
//
// STEP terms are a stage of shared memory, STAGES - 1 stages are on their way. Terms past the end are +0 * +0; the -0 that this
// may turn into +0 makes no difference to a fold that starts from +0.
#include "staged.cuh"

constexpr int SIDE = 32, THREADS = 64, CHUNK = 64, STEP = 16, STAGES = 4;
constexpr int PITCH = STEP + 4;  // the four rows that a warp reads at a time lie in different banks

extern "C" __global__ void __launch_bounds__(THREADS)
    across_tile(const float* grad, i64 grad_row, const float* weight, i64 weight_row, float* out, i64 rows, i64 terms,
                i64 columns) {
  __shared__ __align__(16) float grads[STAGES][SIDE][PITCH];
  __shared__ __align__(16) float weights[STAGES][STEP][SIDE];
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, last = (int)terms, width = (int)columns;
  const i64 row0 = (i64)blockIdx.x * SIDE;
  const int column0 = (int)blockIdx.y * SIDE;

  int copied = 0;
  const auto copy_stage = [&](int stage) {
#pragma unroll
    for (int i = thread; i < SIDE * STEP / 4; i += THREADS) {  // past the last row the last one again: it is not stored
      const int r = i / (STEP / 4), at = i % (STEP / 4) * 4;
      copy4_async(&grads[stage][r][at], grad + min(row0 + r, rows - 1) * grad_row, copied + at, last);
    }
#pragma unroll
    for (int i = thread; i < STEP * SIDE / 4; i += THREADS) {
      const int e = i / (SIDE / 4), at = i % (SIDE / 4) * 4, n = copied + e;
      copy4_async(&weights[stage][e][at], weight + min(n, last - 1) * weight_row, column0 + at, n < last ? width : 0);
    }
    copied += STEP;
    copies_commit();
  };
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) copy_stage(s);

  const int row = warp * 16 + place_of_four(lane), column = 4 * place_of_eight(lane);  // rows row + 4 r
  Floats<4> total[4] = {}, sum[4] = {};
  const auto fold = [&]() {
#pragma unroll
    for (int r = 0; r < 4; ++r)
#pragma unroll
      for (int c = 0; c < 4; ++c) total[r].at[c] = add(total[r].at[c], sum[r].at[c]), sum[r].at[c] = 0.0f;
  };
  int stage = 0, filling = STAGES - 1;
#pragma unroll 1
  for (int first = 0; first < last; first += STEP) {
    copies_wait<STAGES - 2>();
    __syncthreads();  // the stage is there for all, and the one before it has been read by all
    copy_stage(filling);
#pragma unroll
    for (int at = 0; at < STEP; at += 4) {
      Floats<4> w[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) w[e] = read4(&weights[stage][at + e][column]);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const Floats<4> g = read4(&grads[stage][row + 4 * r][at]);
#pragma unroll
        for (int e = 0; e < 4; ++e)
#pragma unroll
          for (int c = 0; c < 4; ++c) sum[r].at[c] = __fmaf_rn(g.at[e], w[e].at[c], sum[r].at[c]);
      }
    }
    if ((first + STEP) % CHUNK == 0) fold();
    stage = stage + 1 == STAGES ? 0 : stage + 1;
    filling = filling + 1 == STAGES ? 0 : filling + 1;
  }
  copies_wait<0>();
  fold();  // of a chunk that is cut short, or +0

#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const i64 t = row0 + row + 4 * r;
    if (t < rows) store<8, 4>(out + t * columns, column0 + column, width, total[r]);
  }
}
