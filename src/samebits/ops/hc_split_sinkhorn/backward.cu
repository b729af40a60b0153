// The gradient of the logits, everything recomputed from them: csrc/sinkhorn.cuh. A thread per token; its trace of matrices
// is in shared memory, which no other thread reads, so there is no barrier. Compile-time choices: VEC; THREADS of a block.
#include "token.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    backward(const float* grad_pre, i64 pre_row, const float* grad_post, i64 post_row, const float* grad_comb, i64 comb_row,
             i64 comb_stream, const float* logits, i64 logits_row, float* grad_logits, i64 rows) {
  extern __shared__ float4 trace[];  // [19 * 4][THREADS]
  const i64 token = (i64)blockIdx.x * THREADS + threadIdx.x;
  if (token >= rows) return;
  sinkhorn::Split g;
  const Floats<4> g_pre = load<VEC, 4>(grad_pre + token * pre_row, 0, 4), g_post = load<VEC, 4>(grad_post + token * post_row, 0, 4);
#pragma unroll
  for (int i = 0; i < 4; ++i) g.pre[i] = g_pre.at[i], g.post[i] = g_post.at[i];
  g.comb = matrix_at(grad_comb + token * comb_row, comb_stream);
  const sinkhorn::Trace<THREADS> kept{trace + threadIdx.x};
  const sinkhorn::Logits out = sinkhorn::backward(g, logits_at(logits + token * logits_row), kept);
  float* const row = grad_logits + token * 24;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float w[4] = {out.weights[4 * half], out.weights[4 * half + 1], out.weights[4 * half + 2], out.weights[4 * half + 3]};
    put(row + 4 * half, w);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) put(row + 8 + 4 * i, out.comb.at[i]);
}
