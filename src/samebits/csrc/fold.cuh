// The ascending left fold: acc = +0, then one rounded addition per term, in index order, by one lane.
//
// A dependent addition takes 4 cycles, so a chain of n terms takes 4n cycles and nothing can shorten it. Everything else is
// arranged so that the folding lane never waits for anything but its own previous addition: other warps compute the terms and
// put them into shared memory, and a block of terms is on its way to registers while the block before it is added. Lanes
// without a chain stay out: reading along with another lane would cost shared-memory cycles of its own.
#pragma once
#include "vectors.cuh"

template <int N>
struct Terms {
  float4 at[N / 4];
};

template <int N>
__device__ __forceinline__ Terms<N> next_block(const float* terms) {
  Terms<N> block;
#pragma unroll
  for (int i = 0; i < N / 4; ++i) block.at[i] = reinterpret_cast<const float4*>(terms)[i];
  return block;
}

template <int N>
__device__ __forceinline__ float fold_block(float acc, const Terms<N>& block) {
#pragma unroll
  for (int i = 0; i < N / 4; ++i) acc = add(add(add(add(acc, block.at[i].x), block.at[i].y), block.at[i].z), block.at[i].w);
  return acc;
}

// The chain of x*x over BF16 elements: the squares are computed by the folding lane in the shadow of its additions.
template <int N>
struct Squares {
  uint4 at[N / 8];
};

template <int N>
__device__ __forceinline__ Squares<N> next_block(const bf16* row) {
  Squares<N> block;
#pragma unroll
  for (int i = 0; i < N / 8; ++i) block.at[i] = reinterpret_cast<const uint4*>(row)[i];
  return block;
}

template <int N>
__device__ __forceinline__ float fold_block(float acc, const Squares<N>& block) {
#pragma unroll
  for (int i = 0; i < N / 8; ++i) {
    const Float8 x = widen8(block.at[i]);
#pragma unroll
    for (int e = 0; e < 8; ++e) acc = add(acc, mul(x.at[e], x.at[e]));
  }
  return acc;
}

// Continue `acc` over `count` elements in shared memory, 16-byte aligned: terms (FP32) or the squares of BF16 elements.
// `count` is a positive multiple of N, the elements in flight; what pads it is +0, which changes no sum that started at +0.
template <int N, typename T>
__device__ __forceinline__ float fold(float acc, const T* elements, int count) {
  auto even = next_block<N>(elements);
#pragma unroll 1
  for (int done = N;; done += N) {
    if (done >= count) return fold_block(acc, even);
    const auto odd = next_block<N>(elements + done);
    acc = fold_block(acc, even);
    done += N;
    if (done >= count) return fold_block(acc, odd);
    even = next_block<N>(elements + done);
    acc = fold_block(acc, odd);
  }
}

__device__ __forceinline__ int padded(int count, int multiple) { return (count + multiple - 1) / multiple * multiple; }
