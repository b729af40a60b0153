// Contract "ascending": one block per token. Warp 0 folds, lane i the stream i; the other PRODUCERS threads load a
// chunk ahead, write grad_residual and put the products of the next chunk into shared memory, double-buffered. A thread
// takes four columns at a time, so that the FP32 accesses of a warp are contiguous.
#include "fold.cuh"
#include "upstream.cuh"

constexpr int CHUNK = PRODUCERS * 4;
constexpr int PITCH = CHUNK + 4;  // the four folding lanes read different banks

struct Columns {
  decltype(load4_raw<VEC>((const grad_in*)nullptr, 0, 0)) g;
  uint2 r[H];
};

__device__ __forceinline__ Columns columns_at(const Upstream& u, int d) {
  Columns c;
  c.g = load4_raw<VEC>(u.grad, d, u.size);
#pragma unroll
  for (int i = 0; i < H; ++i) c.r[i] = load4_raw<VEC>(u.streams + i * u.stream, d, u.size);
  return c;
}

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
      if (stream < H) acc = fold<16>(acc, terms[k % 2][stream], min(CHUNK, padded(u.size - k * CHUNK, 16)));
    }
    if (stream < H) grad_pre[token * H + stream] = acc;
    return;
  }

  const int slot = (threadIdx.x - 32) * 4;
  const Floats<H> p = load<VEC, H>(pre + token * pre_row, 0, H);
  Columns coming = columns_at(u, slot);
  for (int k = 0; k < chunks; ++k) {
    const int d = k * CHUNK + slot;
    const Columns now = coming;
    coming = columns_at(u, d + CHUNK);
    const Floats<4> g = widen4(now.g);
#pragma unroll
    for (int i = 0; i < H; ++i) {
      Floats<4> product = widen4(now.r[i]);
#pragma unroll
      for (int e = 0; e < 4; ++e) product.at[e] = mul(g.at[e], product.at[e]);  // past the end: +0 * +0
      store<8, 4>(&terms[k % 2][i][slot], 0, 4, product);
      if (WANT_RESIDUAL) scale_out(u, i, d, p.at[i], g);
    }
    __syncthreads();
  }
}
