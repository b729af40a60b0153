// The products of gemm.cu by Hopper's warpgroup instruction, with the same bits: one chain per element over ascending s.
//
// A block takes 128 MI rows of A and NB rows of B at a time, 64 MI and NB for each of two warpgroups, whose sums stay in registers.
// A third warpgroup asks the copy engine for stages of 64 reduction indices, as many ahead as there is room. Blocks stay and take one
// tile after the other, so a stage of the next tile is on its way while this one is stored.
//
// SHARE lets two blocks of a cluster work on neighbouring tiles, where they fetch what both read in turns, each for both: 1 the tiles
// have the rows of A in common, 2 those of B.
// Compile-time choices: ELEMENT, TA, TB, CROSS as in gemm.cu; MI, NB, STAGES, SHARE. For compute capability 9.0 alone: elsewhere the
// kernel is a refusal.
#include "elements.cuh"
#include "finish.cuh"
#include "guard.cuh"
#include "mma.cuh"
#include "tma.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#include "wgmma.cuh"

#if SHARE
#define CLUSTER __cluster_dims__(2, 1, 1)
#else
#define CLUSTER
#endif

constexpr int KS = 64, ROWS = 128 * MI, LINE = 2 * KS, BOX = 64 * LINE;  // a box is 64 rows and 64 reduction indices, either way
constexpr int BOXES_B = (NB + 63) / 64, BYTES_A = ROWS * LINE, BYTES_B = TB ? BOXES_B * BOX : NB * LINE, STAGE = BYTES_A + BYTES_B;
constexpr int GROUP = 128, THREADS = 3 * GROUP, BLOCKS = SHARE ? 2 : 1;  // of a warpgroup, a block; in a cluster
constexpr int REGISTERS = NB / 2;
static_assert(BYTES_A % 1024 == 0 && BYTES_B % 1024 == 0, "tiles start where the swizzle does");
static_assert(CROSS || NB % 32 == 0, "a quad stores 32 columns");

// Where tiles lie: cluster tiles run in bands of `band` along A, so that those at work at one time share operands in the L2 cache.
struct Raster {
  i64 row_tiles, column_tiles, band;  // of clusters

  __device__ __forceinline__ i64 tiles() const { return row_tiles * column_tiles; }
  __device__ __forceinline__ void place(i64 tile, unsigned rank, i64& r0, i64& c0) const {
    const i64 first = tile / (band * column_tiles) * band, within = tile % (band * column_tiles);
    const i64 height = min(row_tiles - first, band);
    r0 = (first + within % height) * (SHARE == 2 ? 2 * ROWS : ROWS) + (SHARE == 2 ? rank * ROWS : 0);
    c0 = within / height * (SHARE == 1 ? 2 * NB : NB) + (SHARE == 1 ? rank * NB : 0);
  }
};

// One operand of a stage: boxes of 64 rows where it is turned, else one box of all rows; for this block, or for both.
template <int COUNT, bool TURNED>
__device__ __forceinline__ void fetch(unsigned to, const tma::Map& map, unsigned full, int row, int s, bool both) {
#pragma unroll
  for (int i = 0; i < (TURNED ? (COUNT + 63) / 64 : 1); ++i) {
    const int x = TURNED ? row + 64 * i : s, y = TURNED ? s : row;
    if (both)
      tma::load_to(to + i * BOX, map, full, x, y, 3);
    else
      tma::load(to + i * BOX, map, full, x, y);
  }
}

// Lane q of a quad has four pieces of 4 bytes; afterwards it has piece q of each of the four lanes, in their order.
__device__ __forceinline__ uint4 turned_in_quad(unsigned (&p)[4]) {
  const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const unsigned got = __shfl_xor_sync(0xffffffffu, odd ? p[i] : p[i + 1], 1);
    (odd ? p[i] : p[i + 1]) = got;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const unsigned got = __shfl_xor_sync(0xffffffffu, high ? p[i] : p[i + 2], 2);
    (high ? p[i] : p[i + 2]) = got;
  }
  return make_uint4(p[0], p[1], p[2], p[3]);
}

// An 8 x 8 matrix of 2-byte elements over a warp, transposed.
__device__ __forceinline__ unsigned transposed(unsigned pair) {
  unsigned turned;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
  return turned;
}

// The sums of a thread. Register e of block i belongs to row r + 64 i + 8 (e / 2 % 2) and column c + 8 (e / 4) + e % 2, where (r, c) is
// the place of its first one.
struct Sums {
  float at[MI][REGISTERS];

  __device__ __forceinline__ void start(const float* from, i64 line, i64 r, i64 c, i64 rows, i64 columns) {
#pragma unroll
    for (int i = 0; i < MI; ++i)
#pragma unroll
      for (int e = 0; e < REGISTERS; ++e) {
        const i64 row = r + 64 * i + e / 2 % 2 * 8, column = c + e / 4 * 8 + e % 2;
        at[i][e] = row < rows && column < columns ? from[row * line + column] : 0.0f;
      }
  }

  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int i = 0; i < MI; ++i)
#pragma unroll
      for (int e = 0; e < REGISTERS; ++e) at[i][e] = finished(at[i][e]);
  }

  __device__ __forceinline__ void add_bias(const element* bias, i64 r, i64 c, i64 rows, i64 columns) {
#pragma unroll
    for (int i = 0; i < MI; ++i)
#pragma unroll
      for (int e = 0; e < REGISTERS; ++e) {
        const i64 n = CROSS ? r + 64 * i + e / 2 % 2 * 8 : c + e / 4 * 8 + e % 2;
        if (n < (CROSS ? rows : columns)) at[i][e] = add(at[i][e], low_of(bias[n]));
      }
  }

  // FP32. The dense axis of out, the rows where CROSS, else the columns, is a multiple of eight elements.
  template <bool WHOLE>
  __device__ __forceinline__ void store_wide(float* out, i64 r, i64 c, i64 rows, i64 columns) const {
    const i64 dense = CROSS ? rows : columns;
    const int rows_left = (int)min(rows - r, (i64)ROWS), columns_left = (int)min(columns - c, (i64)NB);
#pragma unroll
    for (int i = 0; i < MI; ++i) {
      float* to = CROSS ? out + c * dense + r + 64 * i : out + (r + 64 * i) * dense + c;
#pragma unroll
      for (int e = 0; e < REGISTERS; e += 4) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (!WHOLE && (64 * i + 8 * half >= rows_left || e / 4 * 8 >= columns_left)) continue;
          const float low = at[i][e + 2 * half], high = at[i][e + 2 * half + 1];
          if constexpr (CROSS) {
            to[8 * half] = low;
            if (WHOLE || e / 4 * 8 + 1 < columns_left) to[dense + 8 * half] = high;
          } else {
            *reinterpret_cast<float2*>(to + 8 * half * dense + e / 4 * 8) = make_float2(low, high);
          }
        }
        if constexpr (CROSS) to += 8 * dense;
      }
    }
  }

  // One rounding. A quad turns what it has, so that each of its threads stores eight elements of the dense axis.
  template <bool WHOLE>
  __device__ __forceinline__ void store(element* out, i64 r, i64 c, i64 rows, i64 columns) const {
    const int quad = threadIdx.x % 4, lane = threadIdx.x / 4 % 8;
    const i64 dense = CROSS ? rows : columns;
    if constexpr (CROSS) {
      r += quad % 2 * 8 - lane, c += lane + quad / 2 * 8 - 2 * quad;
    } else {
      c += 6 * quad;
    }
    const int rows_left = (int)min(rows - r, (i64)ROWS), columns_left = (int)min(columns - c, (i64)NB);
#pragma unroll
    for (int i = 0; i < MI; ++i) {
      if constexpr (CROSS) {
        element* to = out + c * dense + r + 64 * i;
#pragma unroll
        for (int e = 0; e < REGISTERS; e += 8) {
          unsigned p[4];
#pragma unroll
          for (int k = 0; k < 4; ++k) p[k] = e + 2 * k < REGISTERS ? transposed(pair_of(at[i][e + 2 * k], at[i][e + 2 * k + 1])) : 0;
          const uint4 eight = turned_in_quad(p);
          const bool there = WHOLE || (64 * i < rows_left && e / 4 * 8 < columns_left);
          if (there && (e + 4 < REGISTERS || quad < 2)) *reinterpret_cast<uint4*>(to) = eight;
          to += 16 * dense;
        }
      } else {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          element* const to = out + (r + 64 * i + 8 * half) * dense + c;
#pragma unroll
          for (int e = 2 * half; e < REGISTERS; e += 16) {
            unsigned p[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) p[k] = pair_of(at[i][e + 4 * k], at[i][e + 4 * k + 1]);
            const uint4 eight = turned_in_quad(p);
            if (WHOLE || (64 * i + 8 * half < rows_left && e / 4 * 8 < columns_left))
              *reinterpret_cast<uint4*>(to + e / 4 * 8) = eight;
          }
        }
      }
    }
  }

  template <bool WHOLE>
  __device__ __forceinline__ void store(void* out, bool wide, i64 r, i64 c, i64 rows, i64 columns) const {
    if (wide)
      store_wide<WHOLE>(static_cast<float*>(out), r, c, rows, columns);
    else
      store<WHOLE>(static_cast<element*>(out), r, c, rows, columns);
  }
};

// `a` (rows, size) and `b` (columns, size) as maps of what is in memory; `bias`, `start`, `wide` and out as in gemm.cu.
extern "C" __global__ void CLUSTER __launch_bounds__(THREADS, 1)
    gemm_wgmma(const __grid_constant__ tma::Map a, const __grid_constant__ tma::Map b, void* out, const element* bias, const float* start,
               i64 start_line, i64 rows, i64 columns, i64 size, i64 wide, i64 band) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const unsigned tiles = (shared_address(shared) + 1023) / 1024 * 1024, full = tiles + STAGES * STAGE, empty = full + 8 * STAGES;
  const int group = threadIdx.x / GROUP;
  const unsigned rank = BLOCKS == 1 ? 0 : tma::cluster_rank();
  const int count = (int)((size + KS - 1) / KS);

  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < STAGES; ++i) {
      tma::init(full + 8 * i, 1);
      tma::init(empty + 8 * i, 2 * BLOCKS);  // each warpgroup that reads what this block fetches
    }
    tma::init_done();
  }
  if (threadIdx.x == 2 * GROUP) tma::prefetch(a), tma::prefetch(b);
  if constexpr (BLOCKS == 1)
    __syncthreads();
  else
    tma::cluster_meet();

  constexpr int UNIT_ROWS = SHARE == 2 ? 2 * ROWS : ROWS, UNIT_COLUMNS = SHARE == 1 ? 2 * NB : NB;
  const Raster raster = {(rows + UNIT_ROWS - 1) / UNIT_ROWS, (columns + UNIT_COLUMNS - 1) / UNIT_COLUMNS, band};
  int stage = 0;
  unsigned parity = 0;  // of the phase in which the stage is filled
  const auto advance = [&]() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  };

  if (group == 2) {
    wgmma::fewer_registers<40>();
    if (threadIdx.x == 2 * GROUP) {
      unsigned turn = 0;  // whose it is to fetch for both
      for (i64 tile = blockIdx.x / BLOCKS; tile < raster.tiles(); tile += gridDim.x / BLOCKS) {
        i64 r0, c0;
        raster.place(tile, rank, r0, c0);
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
          tma::wait_cluster(empty + 8 * stage, parity ^ 1);
          tma::expect(full + 8 * stage, STAGE);
          const unsigned to = tiles + stage * STAGE;
          if (SHARE != 1 || turn == rank) fetch<ROWS, TA>(to, a, full + 8 * stage, (int)r0, i * KS, SHARE == 1);
          if (SHARE != 2 || turn == rank) fetch<NB, TB>(to + BYTES_A, b, full + 8 * stage, (int)c0, i * KS, SHARE == 2);
          turn ^= 1;
          advance();
        }
      }
    }
  } else {
    wgmma::more_registers<232>();
    const int thread = threadIdx.x % GROUP;
    const auto release = [&](int which) {
      if (thread >= BLOCKS) return;
      if constexpr (BLOCKS == 1)
        tma::arrive(empty + 8 * which);
      else
        tma::arrive_at(empty + 8 * which, thread);
    };
    constexpr unsigned STEP_A = TA ? 16 * LINE : 32, STEP_B = TB ? 16 * LINE : 32;
    Sums sums;
    for (i64 tile = blockIdx.x / BLOCKS; tile < raster.tiles(); tile += gridDim.x / BLOCKS) {
      i64 r0, c0;
      raster.place(tile, rank, r0, c0);
      const bool whole = r0 + ROWS <= rows && c0 + NB <= columns;
      r0 += group * 64 * MI + thread / 32 * 16 + thread % 32 / 4, c0 += thread % 4 * 2;
      if constexpr (TA && TB) {
        if (start) sums.start(start, start_line, r0, c0, rows, columns);
      }

      const auto multiply = [&](bool carry) {
        tma::wait(full + 8 * stage, parity);
        const unsigned from_a = tiles + stage * STAGE + group * MI * BOX, from_b = tiles + stage * STAGE + BYTES_A;
        const unsigned long long first_a = TA ? wgmma::mn_major(from_a, BOX) : wgmma::k_major(from_a);
        const unsigned long long first_b = TB ? wgmma::mn_major(from_b, BOX) : wgmma::k_major(from_b);
        wgmma::fence();
#pragma unroll
        for (int step = 0; step < KS / 16; ++step)
#pragma unroll
          for (int i = 0; i < MI; ++i)
            wgmma::add<NB, TA, TB>(sums.at[i], wgmma::moved(first_a, i * BOX + step * STEP_A), wgmma::moved(first_b, step * STEP_B),
                                   carry || step > 0);
        wgmma::commit();
      };
#pragma unroll
      for (int i = 0; i < MI; ++i) wgmma::pin(sums.at[i]);
      multiply(TA && TB && start);
      int before = stage;
      advance();
#pragma unroll 1
      for (int i = 1; i < count; ++i) {
        multiply(true);
        wgmma::wait<1>();
        release(before);  // its products are done
        before = stage;
        advance();
      }
      wgmma::wait<0>();
#pragma unroll
      for (int i = 0; i < MI; ++i) wgmma::pin(sums.at[i]);
      release(before);

      sums.finish();
      if (bias) sums.add_bias(bias, r0, c0, rows, columns);
      if (whole)
        sums.store<true>(out, wide, r0, c0, rows, columns);
      else
        sums.store<false>(out, wide, r0, c0, rows, columns);
    }
  }
  if constexpr (BLOCKS > 1) tma::cluster_meet();  // nobody leaves while the other may still reach for its memory
}
#else
extern "C" __global__ void __launch_bounds__(384, 1)
    gemm_wgmma(const __grid_constant__ tma::Map, const __grid_constant__ tma::Map, void*, const element*, const float*, i64, i64, i64, i64,
               i64, i64) {
  require(false, "samebits: this kernel is built for compute capability 9.0");
}
#endif
