// Four FP32 at a time from global to shared memory without waiting, and from there.
#pragma once
#include "async.cuh"

// Those past the end of the row become +0. To the copy, four FP32 are eight BF16.
__device__ __forceinline__ void copy4_async(float* shared, const float* row, int first, int size) {
  copy8_async<8>(reinterpret_cast<bf16*>(shared), reinterpret_cast<const bf16*>(row), 2 * first, 2 * size);
}

__device__ __forceinline__ Floats<4> read4(const float* shared) {
  const float4 four = *reinterpret_cast<const float4*>(shared);
  return {four.x, four.y, four.z, four.w};
}

// A thread's place among the 4 x 8 of its warp. Neighbouring lanes share the one number or the other, which lets the hardware
// merge their 16-byte reads.
__device__ __forceinline__ int place_of_four(int lane) { return (lane & 1) | (lane >> 1 & 2); }
__device__ __forceinline__ int place_of_eight(int lane) { return (lane >> 1 & 1) | (lane >> 2 & 6); }
