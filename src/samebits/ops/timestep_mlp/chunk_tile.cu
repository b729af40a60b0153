// grad @ weight for long sums and few columns: the sum over n of grad[t, n] * weight[n, k], in chunks of 64 terms that are folded.
// A block has 4 R rows by 8 C columns. Each of its eight warps takes all of these for a chunk of its own, a thread R x C sums;
// then the eight chunks are folded, a result at a time, and the warps go on with the next eight. SLOPE: as in across_tile.cu.
//
// A warp stages what it needs by itself, STEP terms at a time, STAGES - 1 stages on their way. Terms past the end are +0 * +0; the -0
// that this may turn into +0 makes no difference to a fold that starts from +0.
#include "silu.cuh"
#include "staged.cuh"

constexpr int WARPS = 8, CHUNK = 64, STEP = 8, STEPS = CHUNK / STEP, FOURS = C / 4;
constexpr int TALL = 4 * R, WIDE = 8 * C, OUTPUTS = R * C, PITCH = TALL | 1;

struct Stage {  // of a warp
  float grads[STEP / 4][PITCH][4];
  float weights[STEP][WIDE];
};
typedef float Parked[WARPS][OUTPUTS][32];

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
    chunk_tile(const float* grad, i64 grad_row, const float* weight, i64 weight_row, const float* pre, i64 pre_row, float* out,
               i64 rows, i64 terms, i64 columns) {
  extern __shared__ __align__(16) unsigned char shared[];
  Parked& parked = *reinterpret_cast<Parked*>(shared);
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, last = (int)terms, width = (int)columns;
  Stage* const stages = reinterpret_cast<Stage*>(shared + sizeof(Parked)) + warp * STAGES;
  const i64 row0 = (i64)blockIdx.x * TALL;
  const int column0 = (int)blockIdx.y * WIDE;

  // What this lane copies: part `part` of rows r and r + 16 of grad, and four of every 32 columns of rows e and e + 4 of the weight.
  const int part = lane % 2 * 4, r = lane / 2, e = lane / 8, piece = lane % 8 * 4;
  constexpr int HALVES = (TALL + 15) / 16;
  const float* const grads_from = grad + (row0 + r) * grad_row + part;
  const float* const weights_from = weight + e * weight_row + column0 + piece;
  int grads_end[HALVES], weights_end[FOURS];  // 0 where there is no such row or column
#pragma unroll
  for (int i = 0; i < HALVES; ++i) {
    grads_end[i] = row0 + r + 16 * i < rows ? last - part : 0;
    asm volatile("" : "+r"(grads_end[i]));  // to be kept, not made again for every copy
  }
#pragma unroll
  for (int j = 0; j < FOURS; ++j) {
    weights_end[j] = column0 + piece + 32 * j < width ? last - e : 0;
    asm volatile("" : "+r"(weights_end[j]));
  }
  int copied = warp * CHUNK;  // the term that the next stage begins with
  const auto copy_stage = [&](int stage) {
    Stage& to = stages[stage];
    if (copied < last) {
#pragma unroll
      for (int i = 0; i < HALVES; ++i)
        if (16 * (i + 1) <= TALL || r + 16 * i < TALL)
          copy_bytes_async(to.grads[part / 4][r + 16 * i], grads_from + copied + 16 * i * grad_row, copied < grads_end[i] ? 16 : 0);
#pragma unroll
      for (int i = 0; i < STEP; i += 4) {
        const float* const from = weights_from + (copied + i) * weight_row;
#pragma unroll
        for (int j = 0; j < FOURS; ++j)
          copy_bytes_async(&to.weights[e + i][piece + 32 * j], from + 32 * j, copied + i < weights_end[j] ? 16 : 0);
      }
    }
    copied += STEP;
    if (copied % CHUNK == 0) copied += (WARPS - 1) * CHUNK;
    copies_commit();
  };
#pragma unroll 1
  for (int s = 0; s < STAGES - 1; ++s) copy_stage(s);

  const int row_group = place_of_four(lane), column_group = place_of_eight(lane);  // rows row_group + 4 r, columns 4 column_group + 32 j + c
  constexpr int FOLDED = (OUTPUTS + WARPS - 1) / WARPS;
  float total[FOLDED] = {};  // results warp + 8 i, of every warp's thread with this lane
  int stage = 0, filling = STAGES - 1;
#pragma unroll 1
  for (int first = 0; first < last; first += WARPS * CHUNK) {
    const int chunk = first + warp * CHUNK;
    Floats<4> sum[R][FOURS] = {};
#pragma unroll 1
    for (int step = 0; step < STEPS; ++step) {
      copies_wait<STAGES - 2>();
      __syncwarp();  // the stage is there for all of the warp, and the one before it has been read by all
      copy_stage(filling);
      if (chunk + step * STEP < last) {
        const Stage& here = stages[stage];
#pragma unroll
        for (int four = 0; four < STEP / 4; ++four) {
          Floats<4> g[R];
#pragma unroll
          for (int r = 0; r < R; ++r) g[r] = read4(here.grads[four][row_group + 4 * r]);
#pragma unroll
          for (int e = 0; e < 4; ++e)
#pragma unroll
            for (int j = 0; j < FOURS; ++j) {
              const Floats<4> w = read4(&here.weights[4 * four + e][4 * column_group + 32 * j]);
#pragma unroll
              for (int r = 0; r < R; ++r)
#pragma unroll
                for (int c = 0; c < 4; ++c) sum[r][j].at[c] = __fmaf_rn(g[r].at[e], w.at[c], sum[r][j].at[c]);
            }
        }
      }
      stage = stage + 1 == STAGES ? 0 : stage + 1;
      filling = filling + 1 == STAGES ? 0 : filling + 1;
    }
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
      for (int j = 0; j < FOURS; ++j)
#pragma unroll
        for (int c = 0; c < 4; ++c) parked[warp][(r * FOURS + j) * 4 + c][lane] = sum[r][j].at[c];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < FOLDED; ++i) {
      if (warp + WARPS * i >= OUTPUTS) break;
#pragma unroll
      for (int u = 0; u < WARPS; ++u) total[i] = add(total[i], parked[u][warp + WARPS * i][lane]);
    }
    __syncthreads();  // until all are folded, nothing is parked
  }
  copies_wait<0>();

#pragma unroll
  for (int i = 0; i < FOLDED; ++i) {
    const int which = warp + WARPS * i, r = which / C, c = which % C;
    const i64 row = row0 + row_group + 4 * r, column = column0 + 4 * column_group + c / 4 * 32 + c % 4;
    if (which >= OUTPUTS || row >= rows || column >= columns) continue;
#if SLOPE
    total[i] = mul(total[i], silu_slope(pre[row * pre_row + column]));
#endif
    out[row * columns + column] = total[i];
  }
}
