// hidden = bf16((p0*r0 + p1*r1) + (p2*r2 + p3*r3)), and under NORM normalized = bf16((hidden * rstd) * gamma) with the sum of
// squares by tree512. A block per token, from the last to the first: the projection has just read them in ascending order, and
// what is left of them in L2 is the end.
//
// LANES threads share the columns; each has HOLD vectors of eight columns of all four streams in registers (0: one after the
// other, read when they are needed). Under FUSED one more warp turns the raw sums of the token into its weights while the
// streams are on their way: pre first, on which the others wait, and then, beside them, post and comb, whose Sinkhorn rounds
// nobody in this kernel waits for. Otherwise weights.cu has written pre.
//
// Compile-time choices: VEC; LANES; HOLD; NORM; FUSED, and those of weights.cuh where it is set.
#define OTHER_WARPS FUSED
#if FUSED
#include "weights.cuh"
#else
constexpr int H = 4;
#endif
#include "norm.cuh"
#include "tree512.cuh"

struct Streams {
  uint4 at[H];
};

struct Token {
  const bf16* residual;
  i64 stream;
  int size;
  __device__ __forceinline__ Streams streams(int d) const {
    Streams raw;
#pragma unroll
    for (int i = 0; i < H; ++i) raw.at[i] = load8_raw<VEC>(residual + i * stream, d, size);
    return raw;
  }
};

__device__ __forceinline__ uint4 collapsed(const Streams& raw, const float (&p)[H]) {
  Float8 r[H], sum;
#pragma unroll
  for (int i = 0; i < H; ++i) r[i] = widen8(raw.at[i]);
#pragma unroll
  for (int e = 0; e < 8; ++e)
    sum.at[e] = add(add(mul(p[0], r[0].at[e]), mul(p[1], r[1].at[e])), add(mul(p[2], r[2].at[e]), mul(p[3], r[3].at[e])));
  return narrow8(sum);
}

extern "C" __global__ void __launch_bounds__(LANES + 32 * FUSED)
    collapse(const float* parts, i64 P, const float* gain, const float* bias, float* pre, float* post, float* comb, float* logits,
             float* proj, float* r, float* q, i64 rows, i64 controller_size, float eps, const bf16* residual, i64 residual_row,
             i64 residual_stream, bf16* hidden, const float* gamma, bf16* normalized, float* rstd, i64 size, float norm_eps) {
  const i64 token = rows - 1 - blockIdx.x;
  const int lane = threadIdx.x, d_end = (int)size;
#if FUSED
  __shared__ __align__(16) float weight_of[H];
  if (lane >= LANES) {
    __shared__ float sums[WIDTH], affine[2][N];
    const Controller c = {parts, (int)P, gain, bias, rows, controller_size, eps};
    const Weights out = {pre, post, comb, logits, proj, r, q};
    const int n = lane - LANES;
    if (n < N) affine[0][n] = gain[n], affine[1][n] = bias[n];
    if (n < WIDTH) sums[n] = finished_sum(c, token, n);
    __syncwarp();
    float values[N], gates[H];
    if (n == 0) {
      logits_of(c, out, token, sums, affine[0], affine[1], values, gates);
      put4(weight_of, gates);
    }
    __syncthreads();
    if (n == 0) finish_token(out, token, sums, values);
    return;
  }
#endif
  const Token here = {residual + token * residual_row, residual_stream, d_end};
  bf16 *const hidden_row = hidden + token * size, *const normalized_row = normalized + token * size;
#if HOLD
  Streams raw[HOLD];
#pragma unroll
  for (int j = 0; j < HOLD; ++j) raw[j] = here.streams((lane + j * LANES) * 8);
#endif
#if FUSED
  __syncthreads();
  const float* const source = weight_of;
#else
  const float* const source = pre + token * H;
#endif
  const float4 four = *reinterpret_cast<const float4*>(source);
  const float p[H] = {four.x, four.y, four.z, four.w};

#if HOLD
  uint4 row[HOLD];
  float squares[PARTIALS] = {};
#pragma unroll
  for (int j = 0; j < HOLD; ++j) {
    const int d = (lane + j * LANES) * 8;
    row[j] = collapsed(raw[j], p);
    if (NORM) squares[j % PARTIALS] = fold8(squares[j % PARTIALS], square8(row[j]));
    store8_raw<VEC>(hidden_row, d, d_end, row[j]);
  }
#if NORM
  const float scale = rstd_of(tree512(squares), d_end, norm_eps);
  if (lane == 0) rstd[token] = scale;
#pragma unroll
  for (int j = 0; j < HOLD; ++j) {
    const int d = (lane + j * LANES) * 8;
    store8_raw<VEC>(normalized_row, d, d_end, normalised(row[j], scale, load<VEC, 8>(gamma, d, d_end)));
  }
#endif
#else
  float squares[PARTIALS] = {};
  for (int base = lane * 8; base < d_end; base += 512 * 8)
#pragma unroll
    for (int i = 0; i < PARTIALS; ++i) {
      const int d = base + i * LANES * 8;
      const uint4 row = collapsed(here.streams(d), p);
      if (NORM) squares[i] = fold8(squares[i], square8(row));
      store8_raw<VEC>(hidden_row, d, d_end, row);
    }
#if NORM
  const float scale = rstd_of(tree512(squares), d_end, norm_eps);
  if (lane == 0) rstd[token] = scale;
  for (int d = lane * 8; d < d_end; d += LANES * 8)  // a thread reads back what it has written itself
    store8_raw<VEC>(normalized_row, d, d_end, normalised(load8_raw<VEC>(hidden_row, d, d_end), scale, load<VEC, 8>(gamma, d, d_end)));
#endif
#endif
}
