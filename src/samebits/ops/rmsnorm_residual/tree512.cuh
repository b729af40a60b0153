// Contract "tree512". Vector v of a row belongs to partial v mod 512. LANES threads share a row; thread t owns the partials
// t, t + LANES, ..., so the first steps of the halving tree are inside a thread, the next between warps, the last in a warp.
// HOLD is the number of vectors of a row that a thread keeps in registers; 0 reads the row twice.
#pragma once
#include "formulas.cuh"

constexpr int PARTIALS = 512 / LANES;
constexpr int TREE_THREADS = LANES < 128 ? 128 : LANES;
constexpr int BLOCK_ROWS = TREE_THREADS / LANES;
constexpr int WARPS = LANES / 32;

__device__ __forceinline__ float fold8(float acc, const Float8& t) {
#pragma unroll
  for (int e = 0; e < 8; ++e) acc = add(acc, t.at[e]);
  return acc;
}

__device__ __forceinline__ float tree512(float (&p)[PARTIALS]) {
  float partial = tree_registers(p);
  if constexpr (WARPS > 1) {
    __shared__ float between[LANES];
    between[threadIdx.x] = partial;
    __syncthreads();
    float column[WARPS];
#pragma unroll
    for (int w = 0; w < WARPS; ++w) column[w] = between[w * 32 + threadIdx.x % 32];
    partial = tree_registers(column);
  }
  return tree_warp(partial);
}
