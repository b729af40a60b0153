#include "vectors.cuh"

constexpr int H = 4;

// One block per token. hidden = bf16((p0*r0 + p1*r1) + (p2*r2 + p3*r3)).
extern "C" __global__ void __launch_bounds__(512)
    forward(const float* pre, i64 pre_row, const bf16* residual, i64 residual_row, i64 residual_stream,
                        bf16* hidden, i64 size) {
  const i64 token = blockIdx.x;
  const int d_end = (int)size;
  const bf16* streams = residual + token * residual_row;
  bf16* out = hidden + token * size;
  float p[H];
#pragma unroll
  for (int i = 0; i < H; ++i) p[i] = pre[token * pre_row + i];
  for (int d = threadIdx.x * 8; d < d_end; d += blockDim.x * 8) {
    uint4 raw[H];
#pragma unroll
    for (int i = 0; i < H; ++i) raw[i] = load8_raw<VEC>(streams + i * residual_stream, d, d_end);
    Float8 r[H], sum;
#pragma unroll
    for (int i = 0; i < H; ++i) r[i] = widen8(raw[i]);
#pragma unroll
    for (int e = 0; e < 8; ++e)
      sum.at[e] = add(add(mul(p[0], r[0].at[e]), mul(p[1], r[1].at[e])), add(mul(p[2], r[2].at[e]), mul(p[3], r[3].at[e])));
    store8<VEC>(out, d, d_end, sum);
  }
}
