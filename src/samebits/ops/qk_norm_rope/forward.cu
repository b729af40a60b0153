// RMSNorm of the heads of each position (NORM), their rotary embedding (ROPE), or both, in one reading; with BACK 1 the gradient
// of the rotation. `across` threads' groups share a position, a power of two; each has AHEAD of its heads on their way, and they
// share the angles, which are read once.
#include "heads.cuh"

constexpr int THREADS = 128, GROUPS = THREADS / LANES;
constexpr int AHEAD = ELEMENT == 0 ? 1 : 2;

extern "C" __global__ void __launch_bounds__(THREADS)
    forward(const element* x, i64 x_row, i64 x_head, const element* weight, const float* cosine, i64 cosine_row, const float* sine,
            i64 sine_row, element* y, float* rstd, i64 rows, i64 head_count, i64 size, i64 rotated_columns, i64 across_groups,
            float eps) {
  const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES, d = lane * 8, d_end = (int)size;
  const int heads = (int)head_count, across = (int)across_groups, first = group % across;
  const i64 token = (i64)blockIdx.x * (GROUPS / across) + group / across;
  const bool live = token < rows;  // the others keep their warp whole
  const i64 here = live ? token : rows - 1;
  const element* const row = x + here * x_row;
  struct Flight {
    Raw<8> at[AHEAD];
  };
  const auto fetch = [&](int turn) {
    Flight raw;
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
      raw.at[i] = read_once<VEC, 8>(row + min(turn + i * across + first, heads - 1) * x_head, d, d_end);
    return raw;
  };
  Flight next = fetch(0);
#if NORM
  const Raw<8> gain = read<VEC, 8>(weight, d, d_end);
#endif
#if ROPE
  __shared__ __align__(16) element held[GROUPS][AHEAD][COLUMNS];
  const Rotation by = {(int)(rotated_columns / 2), (int)rotated_columns};
  const Angles angles = read_angles<BACK>(cosine + here * cosine_row, sine + here * sine_row, d, by);
#endif
#pragma unroll 1
  for (int turn = 0; turn < heads; turn += across * AHEAD) {
    Flight raw = next;
    if (turn + across * AHEAD < heads) next = fetch(turn + across * AHEAD);
#if NORM
    float sum[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      sum[i] = group_sum(squares_of({0.0f, 0.0f}, widened(raw.at[i])));
#if LANES == 32
      sum[i] = add(sum[i], __shfl_xor_sync(0xffffffffu, sum[i], 16));  // the second group of 32 chains; the others have none
#endif
    }
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const int head = turn + i * across + first;
      const float r = rstd_of(sum[i], d_end, eps);
      if (live && head < heads && lane == 0) rstd[token * heads + head] = r;
      raw.at[i] = narrowed(normed(widened(raw.at[i]), r, widened(gain)));
    }
#endif
#if ROPE
    __syncwarp();  // the turn before has been read
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) write_words(held[group][i] + d, raw.at[i].at);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) raw.at[i] = rotated<BACK>(held[group][i], raw.at[i], angles, d, by);
#endif
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const int head = turn + i * across + first;
      if (live && head < heads) write<VEC>(y + (token * heads + head) * size, d, d_end, raw.at[i]);
    }
  }
}
