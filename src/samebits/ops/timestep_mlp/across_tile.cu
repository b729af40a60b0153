// grad @ weight for many rows: the sum over n of grad[t, n] * weight[n, k], in chunks of 64 terms that are folded. A thread has
// R x C results; a block has four warps, ALONG of which lie over columns and the others over rows: a warp has 4 R rows by 8 C columns.
// SPLIT: a block takes one chunk and leaves its sums in out[chunk][t][k], for fold_chunks.cu. Otherwise a thread folds its chunks
// itself. SLOPE: the sum is multiplied by the slope of SiLU at pre[t, k].
//
// STEP terms are a stage of shared memory, STAGES - 1 stages are on their way. Terms past the end are +0 * +0; the -0 that this
// may turn into +0 makes no difference to a fold that starts from +0.
#include "silu.cuh"
#include "staged.cuh"

constexpr int THREADS = 128, CHUNK = 64, STEP = 16, STAGES = 3, FOURS = C / 4;
constexpr int TALL = 4 * R * (4 / ALONG), WIDE = 8 * C * ALONG;
constexpr int PITCH = STEP + 4;  // the four rows that a warp reads at a time lie in different banks

extern "C" __global__ void __launch_bounds__(THREADS, SPLIT ? 3 : 2)
    across_tile(const float* grad, i64 grad_row, const float* weight, i64 weight_row, const float* pre, i64 pre_row, float* out,
                i64 rows, i64 terms, i64 columns) {
  __shared__ __align__(16) float grads[STAGES][TALL][PITCH];
  __shared__ __align__(16) float weights[STAGES][STEP][WIDE];
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, width = (int)columns;
  const i64 chunks = SPLIT ? (terms + CHUNK - 1) / CHUNK : 1, chunk = blockIdx.x % chunks;
  const int begin = SPLIT ? (int)chunk * CHUNK : 0, last = SPLIT ? min((int)terms, begin + CHUNK) : (int)terms;
  const i64 row0 = blockIdx.x / chunks * TALL;
  const int column0 = (int)blockIdx.y * WIDE;

  // What this thread copies: four terms of every 32nd row of grad, four of every 32 columns of one row of the weight.
  const int part = thread % 4 * 4, r = thread / 4, e = thread / 8, piece = thread % 8 * 4;
  constexpr int PIECES = (TALL + 31) / 32;
  const float* const grads_from = grad + (row0 + r) * grad_row + begin + part;
  const float* weights_from = weight + (begin + e) * weight_row + column0 + piece;
  int copied = begin;
  const auto copy_stage = [&](int stage) {
    if (copied < last) {
#pragma unroll
      for (int i = 0; i < PIECES; ++i)
        if (TALL % 32 == 0 || r + 32 * i < TALL)
          copy_bytes_async(&grads[stage][r + 32 * i][part], grads_from + (copied - begin) + 32 * i * grad_row,
                           copied + part < last && row0 + r + 32 * i < rows ? 16 : 0);
#pragma unroll
      for (int j = 0; j < WIDE / 32; ++j)
        copy_bytes_async(&weights[stage][e][piece + 32 * j], weights_from + 32 * j, copied + e < last && column0 + piece + 32 * j < width ? 16 : 0);
      weights_from += STEP * weight_row;
    }
    copied += STEP;
    copies_commit();
  };
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) copy_stage(s);

  const int row = warp / ALONG * 4 * R + place_of_four(lane), column = warp % ALONG * 8 * C + 4 * place_of_eight(lane);  // + 4 r, + 32 j
  Floats<4> total[R][FOURS] = {}, sum[R][FOURS] = {};
  const auto fold = [&]() {
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
      for (int j = 0; j < FOURS; ++j)
#pragma unroll
        for (int c = 0; c < 4; ++c) total[r][j].at[c] = SPLIT ? sum[r][j].at[c] : add(total[r][j].at[c], sum[r][j].at[c]), sum[r][j].at[c] = 0.0f;
  };
  int stage = 0, filling = STAGES - 1;
#pragma unroll 1
  for (int first = begin; first < last; first += STEP) {
    copies_wait<STAGES - 2>();
    __syncthreads();  // the stage is there for all, and the one before it has been read by all
    copy_stage(filling);
#pragma unroll
    for (int at = 0; at < STEP; at += 4) {
      Floats<4> g[R];
#pragma unroll
      for (int r = 0; r < R; ++r) g[r] = read4(&grads[stage][row + 4 * r][at]);
#pragma unroll
      for (int e = 0; e < 4; ++e)
#pragma unroll
        for (int j = 0; j < FOURS; ++j) {
          const Floats<4> w = read4(&weights[stage][at + e][column + 32 * j]);
#pragma unroll
          for (int r = 0; r < R; ++r)
#pragma unroll
            for (int c = 0; c < 4; ++c) sum[r][j].at[c] = __fmaf_rn(g[r].at[e], w.at[c], sum[r][j].at[c]);
        }
    }
    if (!SPLIT && (first + STEP) % CHUNK == 0) fold();
    stage = stage + 1 == STAGES ? 0 : stage + 1;
    filling = filling + 1 == STAGES ? 0 : filling + 1;
  }
  copies_wait<0>();
  fold();  // of a chunk that is cut short, or +0

#pragma unroll
  for (int r = 0; r < R; ++r)
#pragma unroll
    for (int j = 0; j < FOURS; ++j) {
      const i64 t = row0 + row + 4 * r;
      const int k = column0 + column + 32 * j;
      if (t >= rows) continue;
#if SLOPE
      const Floats<4> z = load<8, 4>(pre + t * pre_row, k, width);
#pragma unroll
      for (int c = 0; c < 4; ++c) total[r][j].at[c] = mul(total[r][j].at[c], silu_slope(z.at[c]));
#endif
      store<8, 4>(out + (chunk * rows + t) * columns, k, width, total[r][j]);
    }
}
