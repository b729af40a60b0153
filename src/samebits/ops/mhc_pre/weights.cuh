// From the raw sums of a controller (controller.cuh) to the mixing weights of a token; weights.cu and collapse.cu share it.
// Compile-time choices: HEAD (hyper_head: 4 outputs, pre only); IS_FAST and IS_DSV4 (the contract).
#pragma once
#include "controller.cuh"
#include "sinkhorn.cuh"

constexpr int H = 4;
constexpr int N = HEAD ? 4 : 24;
constexpr int WIDTH = N + 1;  // odd, so that tokens in shared memory lie in different banks

struct Controller {
  const float* parts;
  int P;
  const float *gain, *bias;
  i64 rows, size;
  float eps;
};

// Results by row. hyper_head has neither post nor comb.
struct Weights {
  float *pre, *post, *comb, *logits, *proj, *r, *q;
};

__device__ __forceinline__ void put4(float* at, const float* v) { *reinterpret_cast<float4*>(at) = make_float4(v[0], v[1], v[2], v[3]); }

// proj of output n, or the sum of squares for n = N.
__device__ __forceinline__ float finished_sum(const Controller& c, i64 token, int n) {
  const float sum = controller_sum(c.parts, c.P, c.rows, WIDTH, token, n);
  return n < N ? canonical<IS_FAST>(sum) : sum;
}

// 1 / (1 + exp(-x)) + eps: what sinkhorn.cuh does for pre.
__device__ __forceinline__ float gate(float x) { return add(__fdiv_rn(1.0f, add(1.0f, expf(-x))), sinkhorn::EPS); }

// What follows from the finished sums of a token, up to pre, by one thread. `sums`, `gain` and `bias` are in shared memory.
__device__ __forceinline__ void logits_of(const Controller& c, const Weights& out, i64 token, const float* sums, const float* gain,
                                          const float* bias, float (&logits)[N], float (&pre)[H]) {
  const Rms rms = rms_of<IS_DSV4>(sums[N], c.size, c.eps);
  out.r[token] = rms.r, out.q[token] = rms.q;
#pragma unroll
  for (int n = 0; n < N; ++n) logits[n] = add(mul(mul(rms.r, sums[n]), gain[n]), bias[n]);
#pragma unroll
  for (int i = 0; i < H; ++i) pre[i] = gate(logits[i]);
  put4(out.pre + token * H, pre);
}

// Everything else: logits and proj as they are, post and comb.
__device__ __forceinline__ void finish_token(const Weights& out, i64 token, const float* sums, const float (&logits)[N]) {
#pragma unroll
  for (int n = 0; n < N; n += 4) {
    put4(out.logits + token * N + n, logits + n);
    put4(out.proj + token * N + n, sums + n);
  }
  if constexpr (!HEAD) {
    sinkhorn::Logits x;
#pragma unroll
    for (int i = 0; i < 8; ++i) x.weights[i] = logits[i];
#pragma unroll
    for (int i = 0; i < H; ++i)
#pragma unroll
      for (int j = 0; j < H; ++j) x.comb.at[i][j] = logits[8 + 4 * i + j];
    const sinkhorn::Split split = sinkhorn::forward(x);
    put4(out.post + token * H, split.post);
#pragma unroll
    for (int i = 0; i < H; ++i) put4(out.comb + token * H * H + i * H, split.comb.at[i]);
  }
}
