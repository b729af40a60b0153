// grad_x[t, k] = projection leg + RMS leg, all four contracts.
//
// ascending: the projection leg is a left fold from +0 over ascending n of grad_proj[t, n] * weight[n, k], the product rounded
// first; the RMS leg is grad_r * ((factor * x) / divisor). fast: a chain of fused multiply-adds from +0 over ascending n, and
// ((grad_r * factor) / divisor) * x. Where q is 0 the RMS leg is +0.
//
// A thread keeps its four columns of the weight in registers and walks over the tokens of its block, whose grad_proj and row
// factors lie in shared memory. Compile-time choices: MAX_N, the number of outputs, or ANY_N for every number up to that;
// FAST; VEC, X_BF16, OUT_BF16.
#include "vectors.cuh"

#if X_BF16
typedef bf16 element;
#else
typedef float element;
#endif
#if OUT_BF16
typedef bf16 result;
#else
typedef float result;
#endif

constexpr int THREADS = 128, MOST = 64;  // tokens of a block
constexpr int G_PITCH = (MAX_N + 3) / 4 * 4;

struct Row {
  float g[G_PITCH];
  float grad_r, factor, divisor;  // divisor 0: there is no RMS leg; fast: factor holds all three
  float inverse;                  // of a divisor that is a power of two, else 0
};

// For a power of two the product with the exact reciprocal has the bits of the quotient.
__device__ __forceinline__ float inverse_if_exact(float divisor) {
  const unsigned word = __float_as_uint(divisor), exponent = word >> 23;
  return (word & 0x7fffffu) == 0 && exponent > 1 && exponent < 253 ? __fdiv_rn(1.0f, divisor) : 0.0f;
}

__device__ __forceinline__ void prepare(Row& row, float grad_r, float r, float q, float size, bool dsv4) {
  const float square = mul(r, r);
  const float factor = dsv4 ? -mul(square, r) : -square;
  const float divisor = q == 0.0f ? 0.0f : dsv4 ? size : mul(size, q);
  row.grad_r = grad_r;
  row.divisor = divisor;
  row.factor = FAST ? __fdiv_rn(mul(grad_r, factor), divisor == 0.0f ? 1.0f : divisor) : factor;
  row.inverse = FAST ? 0.0f : inverse_if_exact(divisor);
}

__device__ __forceinline__ float rms_leg(const Row& row, float x) {
  if (row.divisor == 0.0f) return 0.0f;
  if (FAST) return mul(row.factor, x);
  const float top = mul(row.factor, x);
  return mul(row.grad_r, row.inverse != 0.0f ? mul(top, row.inverse) : __fdiv_rn(top, row.divisor));
}

__device__ __forceinline__ float step(float acc, float g, float w) { return FAST ? __fmaf_rn(g, w, acc) : add(acc, mul(g, w)); }

extern "C" __global__ void __launch_bounds__(THREADS)
    grad_x(const float* grad_proj, i64 grad_row, const float* grad_r, i64 grad_r_row, const element* x, i64 x_row,
           const float* weight, i64 weight_row, const float* r, i64 r_row, const float* q, i64 q_row, result* out, i64 rows,
           i64 size, i64 outputs, i64 per_block, i64 dsv4) {
  __shared__ __align__(16) Row row[MOST];
  const i64 token0 = blockIdx.x * per_block;
  const int column = (blockIdx.y * THREADS + threadIdx.x) * 4, end = (int)size;
  const int count = (int)min(per_block, rows - token0);

  const int N = ANY_N ? (int)outputs : MAX_N;
  for (int i = threadIdx.x; i < count * N; i += THREADS) row[i / N].g[i % N] = grad_proj[(token0 + i / N) * grad_row + i % N];
  if (threadIdx.x < count) {
    const i64 token = token0 + threadIdx.x;
    prepare(row[threadIdx.x], grad_r[token * grad_r_row], r[token * r_row], q[token * q_row], (float)size, dsv4 != 0);
  }
  Floats<4> w[MAX_N];
#pragma unroll
  for (int n = 0; n < MAX_N; ++n) w[n] = load<VEC, 4>(weight + n * weight_row, column, n < N ? end : 0);
  __syncthreads();
  if (column >= end) return;

  const element* from = x + token0 * x_row;
  result* to = out + token0 * size;
  auto coming = load4_raw<VEC>(from, column, end);
#pragma unroll 2
  for (int t = 0; t < count; ++t, to += size) {
    const Floats<4> here = widen4(coming);
    from += x_row;
    if (t + 1 < count) coming = load4_raw<VEC>(from, column, end);
    Floats<4> acc = {};
#pragma unroll
    for (int n = 0; n < MAX_N; ++n)
#pragma unroll
      for (int c = 0; c < 4 && n < N; ++c) acc.at[c] = step(acc.at[c], row[t].g[n], w[n].at[c]);
#pragma unroll
    for (int c = 0; c < 4; ++c) acc.at[c] = add(acc.at[c], rms_leg(row[t], here.at[c]));
    store<VEC>(to, column, end, acc);
  }
}
