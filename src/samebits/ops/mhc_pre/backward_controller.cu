// From the gradients of pre, post and comb to those of the controller, one thread per token:
//   grad_logits    csrc/sinkhorn.cuh for N = 24; grad_pre * (s * (1 - s)) with s = sigmoid(logits) for N = 4
//   grad_proj[n] = (grad_logits[n] * gain[n]) * r
//   grad_r       = left fold over ascending n, from +0, of (grad_logits[n] * gain[n]) * proj[n]
// Each of the results may be absent: grad_proj [rows][N] for grad_weight; a record per token for backward_merge.cu; for
// backward_tokens.cu the terms of grad_gain, grad_logits[n] * (r * proj[n]), and of grad_bias, grad_logits[n], as 2N chains
// of `pitch` floats, +0 past the last token. Threads never meet: the trace in shared memory is each one's own.
// Compile-time choices: VEC; those of record.cuh but RMS, which is an argument here.
#include "record.cuh"
#include "sinkhorn.cuh"

constexpr int THREADS = N == 24 ? 32 : 128;

struct Upstream {
  Floats<H> pre, post, comb[H];
};

__device__ __forceinline__ Floats<N> grad_logits_of(const Upstream& g, const Floats<N>& logits) {
  Floats<N> out;
#if OUTPUTS == 24
  __shared__ float4 trace[sinkhorn::ROW_STEPS * H * THREADS];
  sinkhorn::Split grad;
  sinkhorn::Logits x;
#pragma unroll
  for (int n = 0; n < 2 * H; ++n) x.weights[n] = logits.at[n];
#pragma unroll
  for (int i = 0; i < H; ++i) {
    grad.pre[i] = g.pre.at[i], grad.post[i] = g.post.at[i];
#pragma unroll
    for (int j = 0; j < H; ++j) grad.comb.at[i][j] = g.comb[i].at[j], x.comb.at[i][j] = logits.at[2 * H + i * H + j];
  }
  const sinkhorn::Trace<THREADS> kept{trace + threadIdx.x};
  const sinkhorn::Logits of = sinkhorn::backward(grad, x, kept);
#pragma unroll
  for (int n = 0; n < 2 * H; ++n) out.at[n] = of.weights[n];
#pragma unroll
  for (int m = 0; m < H * H; ++m) out.at[2 * H + m] = of.comb.at[m / H][m % H];
#else
  const float x[8] = {logits.at[0], logits.at[1], logits.at[2], logits.at[3]};
  float s[8];
  sinkhorn::sigmoid(x, s);
#pragma unroll
  for (int i = 0; i < H; ++i) out.at[i] = mul(g.pre.at[i], mul(s[i], sub(1.0f, s[i])));
#endif
  return out;
}

// The RMS leg as backward_merge.cu computes it. p1: grad_r * ((-(r*r) * x) / (K*q)); dsv4: grad_r * ((-((r*r)*r) * x) / K).
__device__ __forceinline__ RmsRow rms_row(float grad_r, float r, float q, float size, bool dsv4, int rms) {
  if (q == 0.0f) return {0.0f, 1.0f, 0.0f, 0u};
  const float square = mul(r, r), factor = -(dsv4 ? mul(square, r) : square), divisor = dsv4 ? size : mul(size, q);
  if (rms == 0) return {__fdiv_rn(mul(grad_r, factor), divisor), 1.0f, 0.0f, ~0u};
  return {factor, rms == 1 ? divisor : __fdiv_rn(1.0f, divisor), grad_r, ~0u};
}

extern "C" __global__ void __launch_bounds__(THREADS)
    backward_controller(const float* grad_pre, const float* grad_post, i64 grad_post_row, const float* grad_comb,
                        i64 grad_comb_row, i64 grad_comb_stream, const float* logits, i64 logits_row, const float* proj,
                        i64 proj_row, const float* r_of, i64 r_row, const float* q_of, i64 q_row, const float* gain,
                        const float* pre, i64 pre_row, const float* comb, i64 comb_row, i64 comb_stream, float* grad_proj,
                        float* record, float* chains, i64 pitch, i64 rows, i64 K, i64 dsv4, i64 rms) {
  const i64 token = (i64)blockIdx.x * THREADS + threadIdx.x;
  float* const gain_terms = chains + token;
  float* const bias_terms = gain_terms + N * pitch;
  if (token >= rows) {
    if (chains != nullptr && token < pitch)
#pragma unroll
      for (int n = 0; n < N; ++n) gain_terms[n * pitch] = bias_terms[n * pitch] = 0.0f;
    return;
  }
  Upstream g = {load<8, H>(grad_pre + token * H, 0, H)};
  if (N == 24) {
    g.post = load<VEC, H>(grad_post + token * grad_post_row, 0, H);
#pragma unroll
    for (int i = 0; i < H; ++i) g.comb[i] = load<VEC, H>(grad_comb + token * grad_comb_row + i * grad_comb_stream, 0, H);
  }
  const Floats<N> grad_logits = grad_logits_of(g, load<VEC, N>(logits + token * logits_row, 0, N));

  const Floats<N> p = load<VEC, N>(proj + token * proj_row, 0, N);
  const float r = r_of[token * r_row];
  Floats<N> gradient;
  float grad_r = 0.0f;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const float scaled = mul(grad_logits.at[n], gain[n]);
    gradient.at[n] = mul(scaled, r);
    grad_r = add(grad_r, mul(scaled, p.at[n]));
    if (chains != nullptr) {
      gain_terms[n * pitch] = mul(grad_logits.at[n], mul(r, p.at[n]));
      bias_terms[n * pitch] = grad_logits.at[n];
    }
  }
  if (grad_proj != nullptr) store<8, N>(grad_proj + token * N, 0, N, gradient);
  if (record != nullptr) {
    float* const of = record + token * RECORD;
    store<8, N>(of, 0, N, gradient);
    store<8, H>(of + PRE_AT, 0, H, load<VEC, H>(pre + token * pre_row, 0, H));
    *reinterpret_cast<RmsRow*>(of + RMS_AT) = rms_row(grad_r, r, q_of[token * q_row], (float)K, dsv4 != 0, (int)rms);
#if STREAMS
#pragma unroll
    for (int i = 0; i < H; ++i)
      store<8, H>(of + COMB_AT + i * H, 0, H, load<VEC, H>(comb + token * comb_row + i * comb_stream, 0, H));
#endif
  }
}
