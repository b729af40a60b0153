// hidden = bf16((p0*r0 + p1*r1) + (p2*r2 + p3*r3)). A thread takes eight columns of one token; blockIdx.x is the token.
#include "vectors.cuh"

constexpr int H = 4;

extern "C" __global__ void __launch_bounds__(512)
    forward(const float* pre, i64 pre_row, const bf16* residual, i64 residual_row, i64 residual_stream, bf16* hidden, i64 size) {
  const i64 token = blockIdx.x;
  const int d = (blockIdx.y * blockDim.x + threadIdx.x) * 8, d_end = (int)size;
  if (d >= d_end) return;
  const bf16* streams = residual + token * residual_row;
  uint4 raw[H];
#pragma unroll
  for (int i = 0; i < H; ++i) raw[i] = load8_raw<VEC>(streams + i * residual_stream, d, d_end);
  const Floats<H> p = load<VEC, H>(pre + token * pre_row, 0, H);
  Float8 r[H], sum;
#pragma unroll
  for (int i = 0; i < H; ++i) r[i] = widen8(raw[i]);
#pragma unroll
  for (int e = 0; e < 8; ++e)
    sum.at[e] = add(add(mul(p.at[0], r[0].at[e]), mul(p.at[1], r[1].at[e])), add(mul(p.at[2], r[2].at[e]), mul(p.at[3], r[3].at[e])));
  store<VEC, 8>(hidden + token * size, d, d_end, sum);
}
