// h_aggregate: forward, and backward under both contracts.
// Compile-time choices, 0 where not given: VEC 8 or 1 (16-byte accesses); G_BF16 (dtype of grad_hidden); OUT_BF16 (dtype of
// grad_residual); WANT_PRE, WANT_RESIDUAL (which gradients); PRODUCERS (threads beside the folding warp, "ascending");
// STREAMS (streams per warp, "tree256"). A kernel exists where its choices are given.
#include "fold.cuh"
#include "tree.cuh"
#include "vectors.cuh"

constexpr int H = 4;

#if G_BF16
typedef bf16 grad_in;
#else
typedef float grad_in;
#endif
#if OUT_BF16
typedef bf16 grad_out;
#else
typedef float grad_out;
#endif

// One block per token. hidden = bf16((p0*r0 + p1*r1) + (p2*r2 + p3*r3)).
#if !WANT_PRE && !WANT_RESIDUAL
extern "C" __global__ void __launch_bounds__(512)
    h_aggregate_forward(const float* pre, i64 pre_row, const bf16* residual, i64 residual_row, i64 residual_stream,
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
#else
// What both backward kernels need of eight columns of one token.
struct Upstream {
  const grad_in* grad;
  const bf16* streams;
  i64 stream;
  grad_out* out;
  int size;
};

__device__ __forceinline__ Upstream upstream_of(i64 token, const grad_in* grad, i64 grad_row, const bf16* residual, i64 residual_row,
                                                i64 residual_stream, grad_out* grad_residual, i64 size) {
  return {grad + token * grad_row, residual + token * residual_row, residual_stream, grad_residual + token * H * size, (int)size};
}

// grad_residual[i, d] = pre[i] * grad_hidden[d]
__device__ __forceinline__ void scale_out(const Upstream& u, int i, int d, float p, const Float8& g) {
  Float8 scaled;
#pragma unroll
  for (int e = 0; e < 8; ++e) scaled.at[e] = mul(p, g.at[e]);
  store8<VEC>(u.out + (i64)i * u.size, d, u.size, scaled);
}

// Contract "ascending": one block per token. Warp 0 folds, lane i the chain of stream i; the other warps load, write
// grad_residual and put the products of the next chunk into shared memory, double-buffered.
#if PRODUCERS
constexpr int CHUNK = PRODUCERS * 8;
constexpr int PITCH = CHUNK + 4;  // the four folding lanes read different banks

extern "C" __global__ void __launch_bounds__(32 + PRODUCERS)
    h_aggregate_backward_ascending(const grad_in* grad, i64 grad_row, const float* pre, i64 pre_row, const bf16* residual,
                                   i64 residual_row, i64 residual_stream, float* grad_pre, grad_out* grad_residual, i64 size) {
  __shared__ __align__(16) float terms[2][H][PITCH];
  const i64 token = blockIdx.x;
  const Upstream u = upstream_of(token, grad, grad_row, residual, residual_row, residual_stream, grad_residual, size);
  const int chunks = (u.size + CHUNK - 1) / CHUNK;

  if (threadIdx.x < 32) {
    const int stream = threadIdx.x;
    float acc = 0.0f;
    for (int k = 0; k < chunks; ++k) {
      __syncthreads();  // the products of chunk k are complete
      if (stream < H) acc = fold_terms(acc, terms[k % 2][stream], min(CHUNK, (u.size - k * CHUNK + 15) / 16 * 16));
    }
    if (stream < H) grad_pre[token * H + stream] = acc;
    return;
  }

  const int slot = (threadIdx.x - 32) * 8;
  float p[H];
#pragma unroll
  for (int i = 0; i < H; ++i) p[i] = pre[token * pre_row + i];
  Float8 g = load8<VEC>(u.grad, slot, u.size);
  uint4 raw[H];
#pragma unroll
  for (int i = 0; i < H; ++i) raw[i] = load8_raw<VEC>(u.streams + i * u.stream, slot, u.size);
  for (int k = 0; k < chunks; ++k) {
    const int d = k * CHUNK + slot, ahead = d + CHUNK;
    const Float8 g_now = g;
    Float8 r[H];
#pragma unroll
    for (int i = 0; i < H; ++i) r[i] = widen8(raw[i]);
    g = load8<VEC>(u.grad, ahead, u.size);
#pragma unroll
    for (int i = 0; i < H; ++i) raw[i] = load8_raw<VEC>(u.streams + i * u.stream, ahead, u.size);
#pragma unroll
    for (int i = 0; i < H; ++i) {
      float* t = &terms[k % 2][i][slot];
      Float8 product;
#pragma unroll
      for (int e = 0; e < 8; ++e) product.at[e] = mul(g_now.at[e], r[i].at[e]);  // past the end: +0 * +0
      store8<8>(t, 0, 8, product);
      if (WANT_RESIDUAL) scale_out(u, i, d, p[i], g_now);
    }
    __syncthreads();
  }
}

#endif

// Only grad_residual is wanted: no chain, no shared memory.
#if !WANT_PRE
extern "C" __global__ void __launch_bounds__(512)
    h_aggregate_backward_residual(const grad_in* grad, i64 grad_row, const float* pre, i64 pre_row, grad_out* grad_residual, i64 size) {
  const i64 token = blockIdx.x;
  const Upstream u = upstream_of(token, grad, grad_row, nullptr, 0, 0, grad_residual, size);
  float p[H];
#pragma unroll
  for (int i = 0; i < H; ++i) p[i] = pre[token * pre_row + i];
  for (int d = threadIdx.x * 8; d < u.size; d += blockDim.x * 8) {
    const Float8 g = load8<VEC>(u.grad, d, u.size);
#pragma unroll
    for (int i = 0; i < H; ++i) scale_out(u, i, d, p[i], g);
  }
}
#endif

#if STREAMS
// Contract "tree256": partial u folds d = u, u + 256, ...; lane l of a warp owns the partials 8l .. 8l+7, so a warp
// holds all 256 partials of a stream and its loads are 16 bytes wide.
// Partials 32w .. 32w+31 lie in lanes 4w .. 4w+3: offset 16 is two lanes away, offset 8 one lane, the rest is local.
__device__ __forceinline__ float tree256(float (&p)[8]) {
#pragma unroll
  for (int e = 0; e < 8; ++e) p[e] = add(p[e], __shfl_down_sync(0xffffffffu, p[e], 2));
#pragma unroll
  for (int e = 0; e < 8; ++e) p[e] = add(p[e], __shfl_down_sync(0xffffffffu, p[e], 1));
  float group = tree_registers(p);
#pragma unroll
  for (int half = 16; half >= 4; half /= 2) group = add(group, __shfl_down_sync(0xffffffffu, group, half));
  return group;
}

constexpr int TREE_THREADS = 128;

extern "C" __global__ void __launch_bounds__(TREE_THREADS)
    h_aggregate_backward_tree256(const grad_in* grad, i64 grad_row, const float* pre, i64 pre_row, const bf16* residual,
                                 i64 residual_row, i64 residual_stream, float* grad_pre, grad_out* grad_residual, i64 rows, i64 size) {
  const int lane = threadIdx.x % 32;
  const i64 warp = (i64)blockIdx.x * (TREE_THREADS / 32) + threadIdx.x / 32;
  const i64 token = warp / (H / STREAMS);
  const int first = (int)(warp % (H / STREAMS)) * STREAMS;
  if (token >= rows) return;  // a whole warp leaves together
  const Upstream u = upstream_of(token, grad, grad_row, residual, residual_row, residual_stream, grad_residual, size);
  float p[STREAMS], acc[STREAMS][8] = {};
#pragma unroll
  for (int i = 0; i < STREAMS; ++i) p[i] = pre[token * pre_row + first + i];
#pragma unroll 4
  for (int base = 0; base < u.size; base += 256) {
    const int d = base + lane * 8;
    const Float8 g = load8<VEC>(u.grad, d, u.size);
#pragma unroll
    for (int i = 0; i < STREAMS; ++i) {
      const Float8 r = load8<VEC>(u.streams + (first + i) * u.stream, d, u.size);
#pragma unroll
      for (int e = 0; e < 8; ++e) acc[i][e] = add(acc[i][e], mul(g.at[e], r.at[e]));
      if (WANT_RESIDUAL) scale_out(u, first + i, d, p[i], g);
    }
  }
#pragma unroll
  for (int i = 0; i < STREAMS; ++i) {
    const float sum = tree256(acc[i]);
    if (lane == 0) grad_pre[token * H + first + i] = sum;
  }
}
#endif
#endif
