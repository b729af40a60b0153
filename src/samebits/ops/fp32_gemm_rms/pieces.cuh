// Pieces of rows on their way through shared memory. A piece is 16 bytes there: eight BF16 or four FP32.
// VEC = 8 promises that every piece may be copied with one 16-byte access; VEC = 1 goes element by element.
#pragma once
#include "async.cuh"

template <typename T>
constexpr int PIECE = 16 / sizeof(T);

// `count` elements from global memory into a piece; the rest of it becomes +0. Nothing is read where count <= 0.
template <int V>
__device__ __forceinline__ void copy_piece(bf16* shared, const bf16* from, int count) {
  if constexpr (V == 8) {
    const unsigned target = (unsigned)__cvta_generic_to_shared(shared);
    const int bytes = count > 0 ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(from), "r"(bytes) : "memory");
  } else {  // no asynchronous copy is as small as one BF16
    *reinterpret_cast<uint4*>(shared) = load8_raw<1>(from, 0, count);
  }
}

__device__ __forceinline__ void copy_float(float* shared, const float* from, bool exists) {
  const unsigned target = (unsigned)__cvta_generic_to_shared(shared);
  const int bytes = exists ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(target), "l"(from), "r"(bytes) : "memory");
}

template <int V>
__device__ __forceinline__ void copy_piece(float* shared, const float* from, int count) {
  if constexpr (V == 8) {
    const unsigned target = (unsigned)__cvta_generic_to_shared(shared);
    const int bytes = count > 0 ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(from), "r"(bytes) : "memory");
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) copy_float(shared + i, from + i, i < count);
  }
}

// One thread's share of a tile of HEIGHT rows: the pieces of one column in the rows first, first + STEP, ... `from` is that
// column in row `first`, `count` what is left of a row there; rows from `rows` on do not exist and become +0.
template <int V, int HEIGHT, int PITCH, int STEP, typename T>
__device__ __forceinline__ void copy_rows(T* to, const T* from, i64 row, int first, int rows, int count) {
#pragma unroll(V == 8 ? 64 : 1)
  for (int j = 0; j < (HEIGHT + STEP - 1) / STEP; ++j) {
    const int r = first + j * STEP;
    if (HEIGHT % STEP == 0 || r < HEIGHT) copy_piece<V>(to + r * PITCH, from, r < rows ? count : 0);
    from += STEP * row;
  }
}

// COUNT consecutive elements as stored, from shared memory; four of them are widened when they are used.
template <typename T, int COUNT>
struct Stored;

template <int COUNT>
struct Stored<bf16, COUNT> {
  uint2 at[COUNT / 4];
};

template <int COUNT>
struct Stored<float, COUNT> {
  Floats<4> at[COUNT / 4];
};

template <int COUNT>
__device__ __forceinline__ Stored<bf16, COUNT> stored(const bf16* shared) {
  Stored<bf16, COUNT> s;
  if constexpr (COUNT % 8 == 0) {
#pragma unroll
    for (int i = 0; i < COUNT / 8; ++i) {
      const uint4 eight = reinterpret_cast<const uint4*>(shared)[i];
      s.at[2 * i] = make_uint2(eight.x, eight.y), s.at[2 * i + 1] = make_uint2(eight.z, eight.w);
    }
  } else {
#pragma unroll
    for (int i = 0; i < COUNT / 4; ++i) s.at[i] = reinterpret_cast<const uint2*>(shared)[i];
  }
  return s;
}

template <int COUNT>
__device__ __forceinline__ Stored<float, COUNT> stored(const float* shared) {
  Stored<float, COUNT> s;
#pragma unroll
  for (int i = 0; i < COUNT / 4; ++i) {
    const float4 four = reinterpret_cast<const float4*>(shared)[i];
    s.at[i] = {four.x, four.y, four.z, four.w};
  }
  return s;
}
