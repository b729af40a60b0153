// The ascending left fold: acc = +0, then one rounded addition per term, in index order, by one lane.
//
// A dependent addition takes 4 cycles, so a chain of n terms takes 4n cycles and nothing can shorten it. Everything
// else is arranged so that the folding lane never waits for anything but its own previous addition: other warps compute
// the terms and put them into shared memory, and the next terms are in registers or on
// their way there long before they are added: a busy shared memory answers only after a few hundred cycles.
#pragma once
#include "numbers.cuh"

__device__ __forceinline__ float fold4(float acc, float4 t) {
  acc = add(acc, t.x);
  acc = add(acc, t.y);
  acc = add(acc, t.z);
  return add(acc, t.w);
}

// Continue `acc` over `count` terms (a multiple of 4) in shared memory, 16-byte aligned, reading 4 * AHEAD terms ahead.
template <int AHEAD>
__device__ __forceinline__ float fold_terms(float acc, const float* terms, int count) {
  const float4* four = reinterpret_cast<const float4*>(terms);
  const int fours = count / 4;
  float4 ring[AHEAD];
#pragma unroll
  for (int i = 0; i < AHEAD; ++i)
    if (i < fours) ring[i] = four[i];
  int at = 0;
  for (; at + 2 * AHEAD <= fours; at += AHEAD)
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      acc = fold4(acc, ring[i]);
      ring[i] = four[at + AHEAD + i];
    }
  for (; at < fours; at += AHEAD)
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      if (at + i < fours) acc = fold4(acc, ring[i]);
      if (at + AHEAD + i < fours) ring[i] = four[at + AHEAD + i];
    }
  return acc;
}
