// Copies into shared memory that do not wait, by the type of the row; csrc/async.cuh has the one for BF16.
#pragma once
#include "async.cuh"

// Elements first .. of a row of `size` into 16 aligned bytes: eight BF16 or four FP32. Those past the end become +0.
template <int V>
__device__ __forceinline__ void copy16_async(bf16* shared, const bf16* row, i64 first, i64 size) {
  copy8_async<V>(shared, row, (int)first, (int)size);
}

template <int V>
__device__ __forceinline__ void copy16_async(float* shared, const float* row, i64 first, i64 size) {
  if constexpr (V == 8) {
    const unsigned target = (unsigned)__cvta_generic_to_shared(shared);
    const int bytes = first < size ? 16 : 0;
    const float* source = first < size ? row + first : row;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(bytes) : "memory");
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e) shared[e] = first + e < size ? row[first + e] : 0.0f;
  }
}
