// The ascending left fold: acc = +0, then one rounded addition per term, in index order, by one lane.
//
// A dependent addition takes 4 cycles, so a chain of n terms takes 4n cycles and nothing can shorten it. Everything
// else is arranged so that the folding lane never waits for anything but its own previous addition: other warps compute
// the terms and put them into shared memory, and the next 16 terms are in registers before the current 16 are added.
#pragma once
#include "numbers.cuh"

__device__ __forceinline__ float fold4(float acc, float4 t) {
  acc = add(acc, t.x);
  acc = add(acc, t.y);
  acc = add(acc, t.z);
  return add(acc, t.w);
}

// Continue `acc` over `count` terms (a multiple of 16) in shared memory, 16-byte aligned.
__device__ __forceinline__ float fold_terms(float acc, const float* terms, int count) {
  const float4* next = reinterpret_cast<const float4*>(terms);
  float4 a = next[0], b = next[1], c = next[2], d = next[3];
  for (int done = 16; done < count; done += 16) {
    next += 4;
    const float4 a2 = next[0], b2 = next[1], c2 = next[2], d2 = next[3];
    acc = fold4(fold4(fold4(fold4(acc, a), b), c), d);
    a = a2, b = b2, c = c2, d = d2;
  }
  return fold4(fold4(fold4(fold4(acc, a), b), c), d);
}
