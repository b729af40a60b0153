// RMSNorm of the heads of each position (NORM), their rotary embedding (ROPE), or both, in one reading; with BACK 1 the gradient
// of the rotation. `across` groups of LANES threads share a position. Each has EACH neighbouring heads at once, all of them on their
// way before the first is needed, and reads the angles once.
#include "heads.cuh"

constexpr int MOST = 256;  // threads of a block
constexpr int EACH = FULL && ELEMENT != 0 ? 7 : 4;

extern "C" __global__ void __launch_bounds__(MOST)
    forward(const element* x, i64 x_row, i64 x_head, const element* weight, const float* cosine, i64 cosine_row, const float* sine,
            i64 sine_row, element* y, float* rstd, i64 rows, i64 head_count, i64 size, i64 rotated_columns, i64 across_groups,
            float eps) {
  const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES, across = (int)across_groups;
  const int d = lane * 8, d_end = FULL ? COLUMNS : (int)size, heads = (int)head_count;
  const int positions = (int)blockDim.x / LANES / across;
  const i64 token = (i64)blockIdx.x * positions + group / across;
  const bool live = group / across < positions && token < rows;  // the others keep their warp whole
  struct Flight {
    Raw<8> at[EACH];
  };
  const auto fetch = [&](int head) {
    Flight f = {};
    const element* const from = x + token * x_row + head * x_head;
#pragma unroll
    for (int i = 0; i < EACH; ++i)
      if (live && head + i < heads) f.at[i] = read_once<VEC, 8>(from + i * x_head, d, d_end);
    return f;
  };
  int head = group % across * EACH;
  Flight f = fetch(head);
#if ROPE
  __shared__ __align__(16) element rows_held[VEC == 8 ? 1 : MOST / LANES][COLUMNS];
  element* const own_row = rows_held[VEC == 8 ? 0 : group];
  const Rotation by = {(int)(rotated_columns / 2), (int)rotated_columns};
  Angles angles = {};
  if (live) angles = read_angles<BACK>(cosine + token * cosine_row, sine + token * sine_row, d, by);
#endif
#if NORM
  const Floats<8> gain = read_wide<VEC, 8>(weight, d, d_end);
#endif
#pragma unroll 1
  for (int turn = 0; turn < heads; turn += across * EACH, head += across * EACH) {
    if (turn > 0) f = fetch(head);
    const i64 to = token * heads + head;
#if NORM
    float kept = 0.0f;  // rstd of row `lane`
#endif
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      Raw<8> raw = f.at[i];
#if NORM
      const Floats<8> v = widened(raw);
      float sum = group_sum(squares_of({0.0f, 0.0f}, v));
#if LANES == 32
      sum = add(sum, __shfl_xor_sync(0xffffffffu, sum, 16));  // the second group of 32 chains; the others have none
#endif
      const float r = rstd_of(sum, d_end, eps);
      if (lane == i) kept = r;
      raw = narrowed(weighted(v, r, gain));
#endif
#if ROPE
      raw = rotated<BACK>(own_row, raw, angles, d, by);
#endif
      if (live && head + i < heads) write<VEC>(y + (to + i) * d_end, d, d_end, raw);
    }
#if NORM
    if (live && lane < EACH && head + lane < heads) rstd[to + lane] = kept;
#endif
  }
}
