// The mixing weights of all tokens, before collapse.cu reads them: 32 tokens per block, a thread each behind the sums.
#include "weights.cuh"

constexpr int TOKENS = 32;

extern "C" __global__ void __launch_bounds__(128)
    weights(const float* parts, i64 P, const float* gain, const float* bias, float* pre, float* post, float* comb, float* logits,
            float* proj, float* r, float* q, i64 rows, i64 size, float eps) {
  __shared__ float sums[TOKENS][WIDTH], affine[2][N];
  const Controller c = {parts, (int)P, gain, bias, rows, size, eps};
  const Weights out = {pre, post, comb, logits, proj, r, q};
  const i64 first = (i64)blockIdx.x * TOKENS;
  for (int e = threadIdx.x; e < TOKENS * WIDTH; e += blockDim.x) {
    const int t = e / WIDTH, n = e % WIDTH;
    if (first + t < rows) sums[t][n] = finished_sum(c, first + t, n);
  }
  if (threadIdx.x < N) affine[0][threadIdx.x] = gain[threadIdx.x], affine[1][threadIdx.x] = bias[threadIdx.x];
  __syncthreads();
  const i64 token = first + threadIdx.x;
  if (threadIdx.x >= TOKENS || token >= rows) return;
  float values[N], gates[H];
  logits_of(c, out, token, sums[threadIdx.x], affine[0], affine[1], values, gates);
  finish_token(out, token, sums[threadIdx.x], values);
}
