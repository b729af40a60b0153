// Four FP32 at a time from global to shared memory without waiting, and from there.
#pragma once
#include "async.cuh"

// Those past the end of the row become +0. To the copy, four FP32 are eight BF16.
__device__ __forceinline__ void copy4_async(float* shared, const float* row, int first, int size) {
  copy8_async<8>(reinterpret_cast<bf16*>(shared), reinterpret_cast<const bf16*>(row), 2 * first, 2 * size);
}

// The same with the question of the end answered before: bytes are 16, or 0 for +0, and then nothing is read.
__device__ __forceinline__ void copy_bytes_async(float* shared, const float* from, int bytes) {
  const unsigned target = (unsigned)__cvta_generic_to_shared(shared);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ Floats<4> read4(const float* shared) {
  const float4 four = *reinterpret_cast<const float4*>(shared);
  return {four.x, four.y, four.z, four.w};
}

// A thread's place among the 4 x 8 of its warp. Neighbouring lanes share the one number or the other, which lets the hardware
// merge their 16-byte reads.
__device__ __forceinline__ int place_of_four(int lane) { return (lane & 1) | (lane >> 1 & 2); }
__device__ __forceinline__ int place_of_eight(int lane) { return (lane >> 1 & 1) | (lane >> 2 & 6); }

// p[u] + p[u + half] for half = N / 2, N / 4, ..., 1: what is left is p[0].
template <int N>
__device__ __forceinline__ float halved(const float (&p)[N]) {
  if constexpr (N == 1) {
    return p[0];
  } else {
    float half[N / 2];
#pragma unroll
    for (int u = 0; u < N / 2; ++u) half[u] = add(p[u], p[u + N / 2]);
    return halved(half);
  }
}
