// Steps 1 and 2 of the digest (digest.py): bytes to vectors of 16 sums, chunk by chunk, and up to two levels above in one launch.
//
// The bytes are `runs` runs of `width` bytes, `stride` bytes apart, beginning `offset` bytes behind `data`; each run is cut into
// chunks of 1024, a last one that is not full counts as filled up with zeros, and the chunks of all runs are one sequence.
// gridDim.y such sequences, `tree_stride` bytes apart, have a tree each. Vectors go to out[first], out[first + 1], ...
//
// A chunk is a column of B in the 8-bit tensor-core product, a column of keys is a row of A:
//   mma: C (16 x 8, INT32) += A (16 x 32, INT8) B (32 x 8, INT8). In a warp, lane = 4 g + q holds
//   A: at[0] row g, k = 4q .. 4q+3;  at[1] row g+8;  at[2] row g, k = 4q+16 ..;  at[3] row g+8
//   B: at[0] column g, k = 4q .. 4q+3;  at[1] k = 4q+16 ..      C: at[0], at[1] row g, columns 2q, 2q+1;  at[2], at[3] row g+8
// A sum of integers has no order, so k may be any bytes as long as keys and data agree: a lane takes 16 consecutive bytes of its
// chunk, for two products. A warp does 16 chunks, 1024 bytes of them at a time. `keys` has A as the lanes take it, for each level:
// [step of 64 bytes][product][lane][at[0] .. at[3]].
//
// Above, the 16 vectors of a warp are one chunk of the next level. All warps share that work: each does its steps of all chunks,
// and what they found is added up in shared memory. `depth` levels are done; three of them need all warps.
#include "numbers.cuh"

constexpr int CHUNK = 1024, COLUMNS = 16, TILE = 16, MOST_WARPS = 16, STEP = 64, STEPS = CHUNK / STEP;
constexpr int KEYS = CHUNK * COLUMNS / 16;        // 16 bytes each, of one level
constexpr int PITCH = CHUNK / 4 + 4;              // from one chunk of the level above to the next, so that lanes meet in no bank

__device__ __forceinline__ void mma(int (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// 16 bytes of a chunk times 16 bytes of each column of keys.
__device__ __forceinline__ void multiply(int (&sum)[4], uint4 one, uint4 other, uint4 bytes) {
  mma(sum, one.x, one.y, one.z, one.w, bytes.x, bytes.y);
  mma(sum, other.x, other.y, other.z, other.w, bytes.z, bytes.w);
}

// Up to 16 bytes, as many as are left, and zeros behind them. WHOLE: aligned, and a multiple of 16 is left.
template <bool WHOLE>
__device__ __forceinline__ uint4 take(const unsigned char* from, int left) {
  if constexpr (WHOLE) {
    return left > 0 ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
  } else {
    unsigned word[4] = {0, 0, 0, 0};
    const bool aligned = (reinterpret_cast<unsigned long long>(from) & 3) == 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (aligned && left >= 4 * i + 4) {
        word[i] = *reinterpret_cast<const unsigned*>(from + 4 * i);
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (left > 4 * i + j) word[i] |= (unsigned)from[4 * i + j] << (8 * j);
      }
    }
    return make_uint4(word[0], word[1], word[2], word[3]);
  }
}

struct Chunk {
  const unsigned char* from;
  int left;
};

template <bool WHOLE>
__device__ __forceinline__ void sums_of(int (&sum)[2][4], const uint4* keys, int lane, Chunk one, Chunk other) {
  constexpr int AHEAD = WHOLE ? 4 : 1;  // steps whose bytes are on their way together
  one.from += lane % 4 * 16, one.left -= lane % 4 * 16;
  other.from += lane % 4 * 16, other.left -= lane % 4 * 16;
#pragma unroll 1
  for (int step = 0; step < STEPS; step += AHEAD) {
    uint4 bytes[AHEAD][2];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const int at = (step + i) * STEP;
      bytes[i][0] = take<WHOLE>(one.from + at, one.left - at);
      bytes[i][1] = take<WHOLE>(other.from + at, other.left - at);
    }
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const uint4 first = keys[2 * (step + i) * 32 + lane], second = keys[(2 * (step + i) + 1) * 32 + lane];
      multiply(sum[0], first, second, bytes[i][0]);
      multiply(sum[1], first, second, bytes[i][1]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(MOST_WARPS * 32, 2)
    digest_tree(const unsigned char* __restrict__ data, int* __restrict__ out, const uint4* __restrict__ keys, i64 offset,
                i64 first, i64 level, i64 depth, i64 width, i64 stride, i64 runs, i64 tree_stride) {
  __shared__ __align__(16) int scratch[KEYS * 4];  // keys of this level, then what each warp found above
  __shared__ __align__(16) int above[TILE * PITCH];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, g = lane / 4, q = lane % 4;

  uint4* const own_keys = reinterpret_cast<uint4*>(scratch);
  const uint4* const level_keys = keys + (level - 1) * KEYS;
  for (int i = threadIdx.x; i < KEYS; i += blockDim.x) own_keys[i] = level_keys[i];

  const unsigned per_run = (unsigned)((width + CHUNK - 1) / CHUNK);
  const i64 total = per_run * runs;
  const i64 tile = ((i64)blockIdx.x * warps + warp) * TILE;
  const unsigned char* const origin = data + offset + (i64)blockIdx.y * tree_stride;

  Chunk chunk[2];
#pragma unroll
  for (int t = 0; t < 2; ++t) {
    const i64 number = tile + 8 * t + g;
    const unsigned run = number < total ? (unsigned)number / per_run : 0;
    const i64 begin = number < total ? (number - (i64)run * per_run) * CHUNK : 0;
    chunk[t].from = origin + run * stride + begin;
    chunk[t].left = number < total ? (int)min(width - begin, (i64)CHUNK) : 0;
  }
  __syncthreads();

  int sum[2][4] = {};
  const bool aligned = ((reinterpret_cast<unsigned long long>(origin) | (unsigned long long)stride) & 15) == 0;
  const bool whole = width % 16 == 0 || (runs == 1 && tile + TILE <= width / CHUNK);
  if (aligned && whole)
    sums_of<true>(sum, own_keys, lane, chunk[0], chunk[1]);
  else
    sums_of<false>(sum, own_keys, lane, chunk[0], chunk[1]);

  if (depth == 1) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const i64 number = tile + i / 4 * 8 + 2 * q + i % 2;
      const int column = g + i % 4 / 2 * 8;
      if (number < total) out[(first + (i64)blockIdx.y * total + number) * COLUMNS + column] = sum[i / 4][i % 4];
    }
    return;
  }

#pragma unroll
  for (int i = 0; i < 8; ++i)
    above[warp * PITCH + (i / 4 * 8 + 2 * q + i % 2) * COLUMNS + g + i % 4 / 2 * 8] = sum[i / 4][i % 4];

  i64 vectors = (total + TILE - 1) / TILE;  // of a tree, at the level that is being made
  for (int up = 1, chunks = warps;; ++up, chunks = 1) {
    __syncthreads();
    int part[2][4] = {};
    for (int step = warp; step < STEPS; step += warps) {
      const uint4* const from = level_keys + up * KEYS + 2 * step * 32 + lane;
      const uint4 one = from[0], other = from[32];
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        const int number = 8 * t + g;
        const uint4* const bytes = reinterpret_cast<const uint4*>(above + number * PITCH + step * (STEP / 4) + q * 4);
        multiply(part[t], one, other, number < chunks ? *bytes : make_uint4(0, 0, 0, 0));
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i)
      scratch[(warp * TILE + i / 4 * 8 + 2 * q + i % 2) * COLUMNS + g + i % 4 / 2 * 8] = part[i / 4][i % 4];
    __syncthreads();

    const bool last = up == depth - 1;
    for (int i = threadIdx.x; i < chunks * COLUMNS; i += blockDim.x) {
      int found = 0;
      for (int w = 0; w < warps; ++w) found += scratch[w * TILE * COLUMNS + i];
      const i64 number = (i64)blockIdx.x * chunks + i / COLUMNS;
      if (!last)
        above[i] = found;
      else if (number < vectors)
        out[(first + (i64)blockIdx.y * vectors + number) * COLUMNS + i % COLUMNS] = found;
    }
    if (last) return;
    vectors = (vectors + TILE - 1) / TILE;
  }
}
