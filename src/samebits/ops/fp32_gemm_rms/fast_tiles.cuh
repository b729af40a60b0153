// What the kernels of the fast contracts share: tiles in shared memory, and teams of warps.
#pragma once
#include "async.cuh"
#include "mma.cuh"

constexpr int CHUNK = 256;  // terms of a tensor-core chain

// A row of a tile is COLUMNS BF16 in pieces of 16 bytes. The pieces of a row change places with its index, so that eight rows
// of one column lie in different banks, and so do the pieces of one row.
template <int COLUMNS>
__device__ __forceinline__ int place(int row, int piece) {
  constexpr int PIECES = COLUMNS / 8, LINE = PIECES < 8 ? 8 / PIECES : 1;  // rows that fill the banks once
  return piece ^ (row / LINE & (PIECES < 8 ? PIECES - 1 : 7));
}

// Eight BF16 if they are `here`, else +0. 16-byte accesses are legal.
__device__ __forceinline__ void copy8(bf16* shared, const bf16* from, bool here) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(from), "r"(here ? 16 : 0) : "memory");
}

// The first `count` of four FP32, then +0. `vec`: 16-byte accesses are legal and the four are there together.
__device__ __forceinline__ void copy4(float* shared, const float* from, int count, bool vec) {
  const unsigned target = shared_address(shared);
  if (vec) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(from), "r"(count > 0 ? 16 : 0) : "memory");
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(target + 4 * i), "l"(from + (i < count ? i : 0)),
                   "r"(i < count ? 4 : 0)
                   : "memory");
  }
}

// Columns of x as a row of streams: element k is in stream k / width.
struct Column {
  unsigned stream, d;
  __device__ __forceinline__ Column(int k, int width) : stream((unsigned)k / (unsigned)width), d((unsigned)k % (unsigned)width) {}
};

// Eight BF16 from element by element accesses: `count` of them from `from` on, where the stream ends after `left` elements
// and the next one is `gap` further; then +0.
__device__ __forceinline__ uint4 gather8(const bf16* from, int count, unsigned left, unsigned width, i64 gap) {
  unsigned pair[4] = {0, 0, 0, 0};
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    if (e < count) pair[e / 2] |= (unsigned)*from << (e % 2 * 16);
    ++from;
    if (--left == 0) left = width, from += gap;
  }
  return make_uint4(pair[0], pair[1], pair[2], pair[3]);
}

// The warps of one team wait for each other. COUNT teams of SIZE warps make the block.
template <int COUNT, int SIZE>
__device__ __forceinline__ void team_sync(int team) {
  if constexpr (COUNT == 1)
    __syncthreads();
  else if constexpr (SIZE == 1)
    __syncwarp();
  else
    asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "n"(32 * SIZE) : "memory");
}

// high + (middle + low): the three chains of a chunk.
__device__ __forceinline__ float chunk_sum(float high, float middle, float low) { return add(high, add(middle, low)); }
