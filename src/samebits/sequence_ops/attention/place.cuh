// Where a block works: on a tile of one sequence. Without PACKED each batch entry is one; with it, documents lie behind one another.
#pragma once
#include "boxes.cuh"

struct Place {
  bool here;                     // packed: false where the documents have no tile for this block
  int batch, tile, first, count;  // `count` tiled positions of the sequence, from position `first` on
  int other_first, other_count;   // those that they meet
};

// The tiles of `tiled` positions, `size` each; LAST_FIRST starts those with most to do, under a causal mask, first. `bounds` of the tiled
// positions and `other_bounds` count `documents` + 1 entries, ascending.
//
// Packed, block i works on the last document d with bounds[d] / size + d <= i: that many blocks suffice for the documents before it,
// so no table of tiles has to be made. A document that needs fewer leaves the blocks behind its last tile without work.
template <bool LAST_FIRST>
__device__ __forceinline__ Place place_of(int size, const i64* bounds, const i64* other_bounds, i64 documents, i64 tiled, i64 others) {
  Place at;
  at.here = true, at.batch = 0, at.first = 0, at.count = (int)tiled, at.other_first = 0, at.other_count = (int)others;
  if constexpr (PACKED) {
    const int lane = threadIdx.x % 32, index = blockIdx.x;
    int low = 0, high = (int)documents;
    while (high - low > 1) {  // 32 documents at a time; the first of them always qualifies
      const int step = (high - low + 31) / 32, document = low + lane * step;
      const bool before = document < high && (int)bounds[document] / size + document <= index;
      low += (__popc(__ballot_sync(~0u, before)) - 1) * step;
      high = min(high, low + step);
    }
    auto uniform = [](i64 value) { return __shfl_sync(~0u, (int)value, 0); };  // so that the compiler knows it is
    at.first = uniform(bounds[low]), at.count = uniform(bounds[low + 1]) - at.first;
    at.other_first = uniform(other_bounds[low]), at.other_count = uniform(other_bounds[low + 1]) - at.other_first;
    const int turn = index - (at.first / size + low), tiles = (at.count + size - 1) / size;
    at.here = turn < tiles;
    at.tile = LAST_FIRST ? tiles - 1 - turn : turn;
  } else {
    const int per_sequence = ((int)tiled + size - 1) / size;
    at.batch = blockIdx.x / per_sequence;
    const int turn = blockIdx.x - at.batch * per_sequence;
    at.tile = LAST_FIRST ? per_sequence - 1 - turn : turn;
  }
  return at;
}

// What lies behind the last position of a packed sequence belongs to another, and 0 times an infinity would be NaN: the warp that had a
// box of BOX rows copied makes those from `rows` on +0, when the box is there and before it tells others.
template <int BOX>
__device__ __forceinline__ void clear_rows(unsigned box, int rows) {
#pragma unroll 1  // once in a sequence
  for (int i = rows * (LINE / 16) + threadIdx.x % 32; i < BOX * (LINE / 16); i += 32)
#pragma unroll
    for (int part = 0; part < D / 64; ++part)
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(box + part * BOX * LINE + i * 16), "r"(0) : "memory");
}
