// Contract "ascending": one block per token. Warp 0 folds, lane i the chain of stream i; the other PRODUCERS threads load,
// write grad_residual and put the products of the next chunk into shared memory, double-buffered. A thread takes
// four columns at a time, so that the FP32 accesses of a warp are contiguous.
#include "fold.cuh"
#include "upstream.cuh"

constexpr int W = 4;
constexpr int CHUNK = PRODUCERS * W;
constexpr int PITCH = CHUNK + 4;  // the four folding lanes read different banks

extern "C" __global__ void __launch_bounds__(32 + PRODUCERS)
    backward_ascending(const grad_in* grad, i64 grad_row, const float* pre, i64 pre_row, const bf16* residual, i64 residual_row,
                       i64 residual_stream, float* grad_pre, grad_out* grad_residual, i64 size) {
  __shared__ __align__(16) float terms[2][H][PITCH];
  const i64 token = blockIdx.x;
  const Upstream u = upstream_of(token, grad, grad_row, residual, residual_row, residual_stream, grad_residual, size);
  const int chunks = (u.size + CHUNK - 1) / CHUNK;

  if (threadIdx.x < 32) {
    const int stream = threadIdx.x;
    float acc = 0.0f;
    for (int k = 0; k < chunks; ++k) {
      __syncthreads();  // the products of chunk k are complete
      if (stream < H) acc = fold_terms<16>(acc, terms[k % 2][stream], min(CHUNK, (u.size - k * CHUNK + 15) / 16 * 16));
    }
    if (stream < H) grad_pre[token * H + stream] = acc;
    return;
  }

  const int slot = (threadIdx.x - 32) * W;
  const Floats<H> p = load<VEC, H>(pre + token * pre_row, 0, H);
  Floats<W> g = load<VEC, W>(u.grad, slot, u.size), r[H];
#pragma unroll
  for (int i = 0; i < H; ++i) r[i] = load<VEC, W>(u.streams + i * u.stream, slot, u.size);
  for (int k = 0; k < chunks; ++k) {
    const int d = k * CHUNK + slot, ahead = d + CHUNK;
    const Floats<W> g_ahead = load<VEC, W>(u.grad, ahead, u.size);
    Floats<W> r_ahead[H];
#pragma unroll
    for (int i = 0; i < H; ++i) r_ahead[i] = load<VEC, W>(u.streams + i * u.stream, ahead, u.size);
#pragma unroll
    for (int i = 0; i < H; ++i) {
      Floats<W> product;
#pragma unroll
      for (int e = 0; e < W; ++e) product.at[e] = mul(g.at[e], r[i].at[e]);  // past the end: +0 * +0
      store<8, W>(&terms[k % 2][i][slot], 0, W, product);
      if (WANT_RESIDUAL) scale_out(u, i, d, p.at[i], g);
    }
    g = g_ahead;
#pragma unroll
    for (int i = 0; i < H; ++i) r[i] = r_ahead[i];
    __syncthreads();
  }
}
