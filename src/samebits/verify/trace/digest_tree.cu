// Steps 1 and 2 of the digest (digest.py): bytes to vectors of 16 sums, chunk by chunk, and where a part is deep the level above them.
// One launch does up to MOST parts, each a tensor or something of a tensor.
//
// The bytes of a tree are `runs` runs of `width` bytes, `stride` bytes apart. Each run is cut into chunks of 1024, a last one that is
// not full counts as filled up with zeros, and the chunks of all runs are one sequence; where runs are joined, their bytes are one
// string that is cut instead. A part may be several trees, `tree_stride` bytes apart. 16 chunks of a tree are a tile.
//
// A warp does a tile at a time, and nothing of another: a tile leaves its 16 vectors, or in a deep part the one vector above them.
// A chunk is a column of B in the 8-bit tensor-core product, a column of keys is a row of A:
//   mma: C (16 x 8, INT32) += A (16 x 32, INT8) B (32 x 8, INT8). In a warp, lane = 4 g + q holds
//   A: at[0] row g, k = 4q .. 4q+3;  at[1] row g+8;  at[2] row g, k = 4q+16 ..;  at[3] row g+8
//   B: at[0] column g, k = 4q .. 4q+3;  at[1] k = 4q+16 ..      C: at[0], at[1] row g, columns 2q, 2q+1;  at[2], at[3] row g+8
// A sum of integers has no order, so k may be any bytes as long as keys and data agree: a lane takes 16 consecutive bytes of its
// chunk, for two products, and a warp 64 bytes of each of 16 chunks. `keys` has A as the lanes take it, of this level and of the next:
// [step of 64 bytes][product][lane][at[0] .. at[3]].
#include "numbers.cuh"

constexpr int CHUNK = 1024, COLUMNS = 16, TILE = 16, WARPS = 16, STEP = 64, STEPS = CHUNK / STEP, MOST = 16;
constexpr int KEYS = CHUNK * COLUMNS / 16;  // 16 bytes each, of one level

struct Part {
  const unsigned char* data;
  int* out;
  unsigned first;                   // its first tile, among those of the launch
  unsigned per_run, chunks, tiles;  // chunks of a run, chunks of a tree, tiles of a tree
  i64 width, stride, tree_stride;
  i64 joined;  // bytes of all runs where they are joined, else 0
  i64 deep;
};

struct Parts {
  Part part[MOST];  // behind the last one `first` is the largest number
  i64 tiles, deep;  // of all; whether any is deep
};

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

// A lane's way through a chunk, a piece of 16 bytes in each step.
struct Way {
  const unsigned char* from;
  int left;  // bytes of the chunk from here on
  i64 at;    // bytes of the run before here, where runs are joined

  template <bool WHOLE, bool JOINED>
  __device__ __forceinline__ uint4 next(const Part& part) {
    const uint4 found = take<WHOLE>(from, left);
    from += STEP, left -= STEP;
    if constexpr (JOINED)
      for (at += STEP; at >= part.width && left > 0; at -= part.width) from += part.stride - part.width;
    return found;
  }
};

// To where a lane begins in chunk `number` of a tree at `origin`.
__device__ __forceinline__ Way way_to(const Part& part, const unsigned char* origin, unsigned number, int skip) {
  if (number >= part.chunks) return {origin, 0, 0};
  if (part.joined) {
    const i64 begin = (i64)number * CHUNK + skip, run = begin / part.width, at = begin - run * part.width;
    return {origin + run * part.stride + at, (int)min(part.joined - begin, (i64)(CHUNK - skip)), at};
  }
  const unsigned run = number / part.per_run;
  const i64 begin = (i64)(number - run * part.per_run) * CHUNK + skip;
  return {origin + run * part.stride + begin, (int)min(part.width - begin, (i64)(CHUNK - skip)), 0};
}

template <bool WHOLE, bool JOINED>
__device__ __forceinline__ void sums_of(int (&sum)[2][4], const uint4* keys, int lane, const Part& part, Way one, Way other) {
  constexpr int AHEAD = !WHOLE ? 1 : JOINED ? 2 : 4;  // steps whose bytes are on their way together
#pragma unroll 1
  for (int step = 0; step < STEPS; step += AHEAD) {
    uint4 bytes[AHEAD][2];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      bytes[i][0] = one.next<WHOLE, JOINED>(part);
      bytes[i][1] = other.next<WHOLE, JOINED>(part);
    }
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const uint4 first = keys[2 * (step + i) * 32 + lane], second = keys[(2 * (step + i) + 1) * 32 + lane];
      multiply(sum[0], first, second, bytes[i][0]);
      multiply(sum[1], first, second, bytes[i][1]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 2)
    digest_tree(const __grid_constant__ Parts parts, const uint4* __restrict__ keys) {
  __shared__ __align__(16) uint4 own_keys[2 * KEYS];
  __shared__ __align__(16) int above[WARPS][TILE * COLUMNS];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, q = lane % 4;

  const int count = parts.deep ? 2 * KEYS : KEYS;
  for (int i = threadIdx.x; i < count; i += WARPS * 32) own_keys[i] = keys[i];
  __syncthreads();

  int at = 0;
  for (i64 tile = blockIdx.x + (i64)gridDim.x * warp; tile < parts.tiles; tile += (i64)gridDim.x * WARPS) {
    while (at + 1 < MOST && tile >= parts.part[at + 1].first) ++at;
    const Part& part = parts.part[at];
    const unsigned local = (unsigned)tile - part.first, tree = local / part.tiles, number = (local - tree * part.tiles) * TILE;
    const unsigned char* const origin = part.data + tree * part.tree_stride;

    int sum[2][4] = {};
    const Way one = way_to(part, origin, number + g, 16 * q), other = way_to(part, origin, number + 8 + g, 16 * q);
    const bool aligned = ((reinterpret_cast<unsigned long long>(origin) | (unsigned long long)part.stride) & 15) == 0;
    if (part.joined) {  // the planner joins runs of whole pieces only
      if (aligned)
        sums_of<true, true>(sum, own_keys, lane, part, one, other);
      else
        sums_of<false, true>(sum, own_keys, lane, part, one, other);
    } else {
      const bool whole = part.width % 16 == 0 || (part.per_run == part.chunks && number + TILE <= part.width / CHUNK);
      if (aligned && whole)
        sums_of<true, false>(sum, own_keys, lane, part, one, other);
      else
        sums_of<false, false>(sum, own_keys, lane, part, one, other);
    }

    if (!part.deep) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const unsigned chunk = number + i / 4 * 8 + 2 * q + i % 2;
        if (chunk < part.chunks) part.out[((i64)tree * part.chunks + chunk) * COLUMNS + g + i % 4 / 2 * 8] = sum[i / 4][i % 4];
      }
      continue;
    }

    // The tile's vectors are one chunk of the level above: column 0 of the product, the others are nothing.
    int* const vectors = above[warp];
#pragma unroll
    for (int i = 0; i < 8; ++i)
      vectors[(i / 4 * 8 + 2 * q + i % 2) * COLUMNS + g + i % 4 / 2 * 8] = sum[i / 4][i % 4];
    __syncwarp();
    int top[2][4] = {};
#pragma unroll 4
    for (int step = 0; step < STEPS; ++step) {
      const uint4* const next = own_keys + KEYS + 2 * step * 32 + lane;
      const uint4 bytes = g == 0 ? *reinterpret_cast<const uint4*>(vectors + step * COLUMNS + 4 * q) : make_uint4(0, 0, 0, 0);
      multiply(top[step % 2], next[0], next[32], bytes);
    }
    __syncwarp();
    if (q == 0) {
      int* const out = part.out + (i64)local * COLUMNS;
      out[g] = top[0][0] + top[1][0];
      out[g + 8] = top[0][2] + top[1][2];
    }
  }
}
