// The BF16 pieces of the weight, for many tokens: row p * `padded` + n of `pieces` is piece p (high, middle, low) of output n,
// `pitch` columns long. What is past the end of the weight is +0. A thread takes eight columns of one output.
#include "fast_tiles.cuh"

extern "C" __global__ void __launch_bounds__(128)
    split_weight(const float* weight, i64 weight_row, bf16* pieces, i64 size, i64 outputs, i64 padded, i64 pitch) {
  const i64 column = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * 8;
  const i64 n = blockIdx.y;
  if (column >= pitch) return;
  float w[8];
#pragma unroll
  for (int e = 0; e < 8; ++e) w[e] = n < outputs && column + e < size ? weight[n * weight_row + column + e] : 0.0f;
#pragma unroll
  for (int piece = 0; piece < 3; ++piece) {
    unsigned pair[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) pair[i] = upper_halves(w[2 * i], w[2 * i + 1]);
    *reinterpret_cast<uint4*>(pieces + (piece * padded + n) * pitch + column) = make_uint4(pair[0], pair[1], pair[2], pair[3]);
#pragma unroll
    for (int e = 0; e < 8; ++e) w[e] = without_upper_half(w[e]);
  }
}
