// Sums over a row by 512 partials. Vector v (eight columns) of a row belongs to partial v mod 512. LANES threads share a row;
// thread t owns the partials t, t + LANES, ..., so the first steps of the halving tree are inside a thread, the next between
// warps, the last in a warp. A block with further warps behind those of its one row says so with OTHER_WARPS 1.
#pragma once
#include "tree.cuh"
#include "vectors.cuh"

constexpr int PARTIALS = 512 / LANES;
constexpr int TREE_THREADS = LANES < 128 ? 128 : LANES;
constexpr int BLOCK_ROWS = TREE_THREADS / LANES;
constexpr int WARPS = LANES / 32;

__device__ __forceinline__ float fold8(float acc, const Float8& t) {
#pragma unroll
  for (int e = 0; e < 8; ++e) acc = add(acc, t.at[e]);
  return acc;
}

__device__ __forceinline__ Float8 square8(uint4 raw) {
  Float8 x = widen8(raw);
#pragma unroll
  for (int e = 0; e < 8; ++e) x.at[e] = mul(x.at[e], x.at[e]);
  return x;
}

__device__ __forceinline__ float tree512(float (&p)[PARTIALS]) {
  float partial = tree_registers(p);
  if constexpr (WARPS > 1) {
    __shared__ float between[LANES];
    between[threadIdx.x] = partial;
#if OTHER_WARPS
    asm volatile("bar.sync 1, %0;" ::"n"(LANES) : "memory");
#else
    __syncthreads();
#endif
    float column[WARPS];
#pragma unroll
    for (int w = 0; w < WARPS; ++w) column[w] = between[w * 32 + threadIdx.x % 32];
    partial = tree_registers(column);
  }
  return tree_warp(partial);
}
