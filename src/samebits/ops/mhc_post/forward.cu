// streams[j] = bf16(((c0j*r0 + c1j*r1) + (c2j*r2 + c3j*r3)) + post[j]*y). A thread takes eight columns of one token, with all
// its loads in flight before the first use; blockIdx.x is the token.
#include "mix.cuh"

extern "C" __global__ void __launch_bounds__(256)
    forward(const bf16* residual, i64 residual_row, i64 residual_stream, const bf16* sublayer, i64 sublayer_row, const float* comb,
            i64 comb_row, i64 comb_stream, const float* post, i64 post_row, bf16* streams, i64 size) {
  const i64 token = blockIdx.x;
  const int d = (blockIdx.y * blockDim.x + threadIdx.x) * 8, d_end = (int)size;
  if (d >= d_end) return;
  const bf16* old_streams = residual + token * residual_row;
  uint4 r_raw[H];
#pragma unroll
  for (int i = 0; i < H; ++i) r_raw[i] = load8_raw<VEC>(old_streams + i * residual_stream, d, d_end);
  const uint4 y_raw = load8_raw<VEC>(sublayer + token * sublayer_row, d, d_end);
  Weights c[H];  // c[i] is row i of comb
#pragma unroll
  for (int i = 0; i < H; ++i) c[i] = weights(comb + token * comb_row + i * comb_stream);
  const Weights p = weights(post + token * post_row);
  Float8 r[H];
#pragma unroll
  for (int i = 0; i < H; ++i) r[i] = widen8(r_raw[i]);
  const Float8 y = widen8(y_raw);
#pragma unroll
  for (int j = 0; j < H; ++j) {
    const Weights column = {c[0].at[j], c[1].at[j], c[2].at[j], c[3].at[j]};
    Float8 sum = tree4(column, r);
#pragma unroll
    for (int e = 0; e < 8; ++e) sum.at[e] = add(sum.at[e], mul(p.at[j], y.at[e]));
    store<VEC, 8>(streams + (token * H + j) * size, d, d_end, sum);
  }
}
