// Halving trees over partial sums: p[u] = p[u] + p[u + half], half = n/2, n/4, ..., 1.
#pragma once
#include "numbers.cuh"

// Over an array of N registers of one lane.
template <int N>
__device__ __forceinline__ float tree_registers(float (&p)[N]) {
#pragma unroll
  for (int half = N / 2; half > 0; half /= 2)
#pragma unroll
    for (int u = 0; u < half; ++u) p[u] = add(p[u], p[u + half]);
  return p[0];
}

// Over the 32 lanes of a warp; every lane gets the sum (a + b has the bits of b + a).
__device__ __forceinline__ float tree_warp(float p) {
#pragma unroll
  for (int half = 16; half > 0; half /= 2) p = add(p, __shfl_xor_sync(0xffffffffu, p, half));
  return p;
}
