// pre = sigmoid + eps, post = 2 sigmoid, comb = 39 normalisations of softmax + eps: csrc/sinkhorn.cuh. A thread per token.
#include "token.cuh"

extern "C" __global__ void __launch_bounds__(128) forward(const float* logits, i64 logits_row, float* pre, float* post, float* comb, i64 rows) {
  const i64 token = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (token >= rows) return;
  const sinkhorn::Split out = sinkhorn::forward(logits_at(logits + token * logits_row));
  put(pre + token * 4, out.pre);
  put(post + token * 4, out.post);
#pragma unroll
  for (int i = 0; i < 4; ++i) put(comb + token * 16 + i * 4, out.comb.at[i]);
}
