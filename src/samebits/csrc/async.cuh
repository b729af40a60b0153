// Copies from global to shared memory that do not wait (cp.async, sm_80 and later).
#pragma once
#include "vectors.cuh"

// Eight BF16 of a row into 16 aligned bytes of shared memory; those past the end of the row become +0.
template <int V>
__device__ __forceinline__ void copy8_async(bf16* shared, const bf16* row, int first, int size) {
  if constexpr (V == 8) {
    const unsigned target = (unsigned)__cvta_generic_to_shared(shared);
    const int bytes = first < size ? 16 : 0;
    const bf16* source = first < size ? row + first : row;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(bytes) : "memory");
  } else {
    *reinterpret_cast<uint4*>(shared) = load8_raw<1>(row, first, size);
  }
}

__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most PENDING of this thread's committed groups are still in flight.
template <int PENDING>
__device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Ask for the sector of an address without waiting for it: a later load finds it in L2.
__device__ __forceinline__ void prefetch_l2(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }
