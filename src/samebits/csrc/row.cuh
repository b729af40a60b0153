// The formulas of RMSNorm with and without modulation, W columns at a time, and the sum of squares of a row in torch's order.
//
//   n = rd(weight * (rstd * x))                      rd: rounded to the element type
//   y = n, or rd(rd(n * rd(1 + scale)) + shift)
//
// Torch sums the squares with 128 chains: vector v (four columns) belongs to chain v mod 128, and a chain adds its squares by
// fused multiply-add from +0 over ascending columns. In each of four groups of 32 chains s[u] = s[u] + s[u + half], half = 16,
// 8, 4, 2, 1; then (g0 + g2) + (g1 + g3). Here a thread reads eight columns at a time and owns two neighbouring chains: of 64
// threads, thread t has the vectors 2t and 2t + 1 modulo 128. Up to 128 columns a single group has terms, and 16 threads do.
#pragma once
#include "elements.cuh"
#include "guard.cuh"
#include "norm.cuh"
#include "tree.cuh"

struct Chains {
  float even, odd;
};

__device__ __forceinline__ Chains squares_of(Chains c, const Floats<8>& x) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    c.even = __fmaf_rn(x.at[e], x.at[e], c.even);
    c.odd = __fmaf_rn(x.at[e + 4], x.at[e + 4], c.odd);
  }
  return c;
}

// Over the 16 threads that hold one group of chains; each gets the sum (a + b has the bits of b + a).
__device__ __forceinline__ float group_sum(Chains c) {
#pragma unroll
  for (int half = 8; half > 0; half /= 2) {
    c.even = add(c.even, __shfl_xor_sync(0xffffffffu, c.even, half));
    c.odd = add(c.odd, __shfl_xor_sync(0xffffffffu, c.odd, half));
  }
  return add(c.even, c.odd);
}

template <int W>
__device__ __forceinline__ Floats<W> normed(const Floats<W>& x, float rstd, const Floats<W>& weight) {
  Floats<W> n;
#pragma unroll
  for (int e = 0; e < W; ++e) n.at[e] = mul(weight.at[e], mul(rstd, x.at[e]));
  return rounded(n);
}

// rd(1 + scale)
template <int W>
__device__ __forceinline__ Floats<W> factor_of(const Raw<W>& scale) {
  Floats<W> f = widened(scale);
#pragma unroll
  for (int e = 0; e < W; ++e) f.at[e] = add(1.0f, f.at[e]);
  return rounded(f);
}

template <int W>
__device__ __forceinline__ Floats<W> modulated(Floats<W> n, const Floats<W>& factor, const Floats<W>& shift) {
#pragma unroll
  for (int e = 0; e < W; ++e) n.at[e] = mul(n.at[e], factor.at[e]);
  n = rounded(n);
#pragma unroll
  for (int e = 0; e < W; ++e) n.at[e] = add(n.at[e], shift.at[e]);
  return rounded(n);
}

// --- backward ---------------------------------------------------------------------------------------------------------
//
//   d_n = grad_y * rd(1 + scale), FP32, or grad_y itself;  u = weight * d_n
//   dot = sum of u * x: vectors of eight columns are chains from +0; 32 consecutive vectors a halving tree; those a left fold
//   grad_x = rstd * u - x * coef,  coef = (((rstd * rstd) * rstd) * dot) / H

template <int W>
__device__ __forceinline__ Floats<W> product(Floats<W> a, const Floats<W>& b) {
#pragma unroll
  for (int e = 0; e < W; ++e) a.at[e] = mul(a.at[e], b.at[e]);
  return a;
}

// One vector of the dot.
__device__ __forceinline__ float chain_of(const Floats<8>& u, const Floats<8>& x) {
  float acc = 0.0f;
#pragma unroll
  for (int e = 0; e < 8; ++e) acc = add(acc, mul(u.at[e], x.at[e]));
  return acc;
}

__device__ __forceinline__ float coefficient(float rstd, float dot, int size) {
  return divide_by_count(mul(mul(mul(rstd, rstd), rstd), dot), size);
}

__device__ __forceinline__ Floats<8> gradient_of(Floats<8> u, const Floats<8>& x, float rstd, float coef) {
#pragma unroll
  for (int e = 0; e < 8; ++e) u.at[e] = sub(mul(rstd, u.at[e]), mul(x.at[e], coef));
  return u;
}
