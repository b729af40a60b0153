// The products of gemm.cu by Hopper's warpgroup instruction, with the same bits: one chain per element over ascending s.
//
// A block takes ROWS rows of A and NB rows of B at a time. Two warpgroups multiply, with their sums in registers: half of the tile
// each, or, with TURNS, a tile each, so that one stores while the other multiplies. A third warpgroup asks the copy engine for stages
// of 64 reduction indices, as many ahead as there is room. Blocks stay and take one tile after the other.
//
// GROUPS products, with one number of reduction indices, are computed by one launch: their tiles follow one another.
//
// SHARE lets two blocks of a cluster work on neighbouring tiles, where they fetch what both read in turns, each for both: 1 the tiles
// have the rows of A in common, 2 those of B.
// Compile-time choices: ELEMENT, TA, TB, CROSS as in gemm.cu; WIDE: out is FP32; MI blocks of 64 rows of A for a warpgroup; NB, STAGES,
// TURNS, SHARE; GROUPS, 1 or 3; SHARED, the bytes of a block, of which results take what the stages leave. For compute capability
// 9.0 alone: elsewhere the kernel is a refusal.
#include "elements.cuh"
#include "finish.cuh"
#include "guard.cuh"
#include "mma.cuh"
#include "tma.cuh"

// A product, whose tensors are maps of what is in memory: `a` (rows, size), `b` (columns, size), `out`; `bias` as in gemm.cu.
#define PRODUCT(n)                                                                                                             \
  const __grid_constant__ tma::Map a##n, const __grid_constant__ tma::Map b##n, const __grid_constant__ tma::Map out##n,       \
      const element *bias##n, i64 rows##n, i64 columns##n
#if GROUPS == 1
#define PRODUCTS PRODUCT(0)
#else
#define PRODUCTS PRODUCT(0), PRODUCT(1), PRODUCT(2)
#endif

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#include "wgmma.cuh"

#if SHARE
#define CLUSTER __cluster_dims__(2, 1, 1)
#else
#define CLUSTER
#endif

constexpr int KS = 64, ROWS = (TURNS ? 64 : 128) * MI, LINE = 128, BOX = 64 * LINE;  // a box is 64 rows and 64 indices, either way
constexpr int BOXES_B = (NB + 63) / 64, BYTES_A = ROWS * LINE, BYTES_B = TB ? BOXES_B * BOX : NB * LINE, STAGE = BYTES_A + BYTES_B;
constexpr int GROUP = 128, THREADS = 3 * GROUP, BLOCKS = SHARE ? 2 : 1;  // of a warpgroup, a block; in a cluster
constexpr int REGISTERS = NB / 2;
static_assert(BYTES_A % 1024 == 0 && BYTES_B % 1024 == 0, "tiles start where the swizzle does");

// Results leave through shared memory in pieces: 64 rows of A by PIECE rows of B, in lines of 128 bytes along the dense axis of out,
// which are the rows of A where CROSS. The copy engine stores boxes of BOX_LINES lines.
constexpr int DENSE = WIDE ? 32 : 64, HALVES = CROSS && WIDE ? 2 : 1;  // elements of a line; lines beside each other
constexpr int SPACE = (SHARED - 1024 - STAGES * (STAGE + 16)) / 2 / LINE;  // lines that are left for a warpgroup
constexpr int LEAST = WIDE ? 8 : 16, FITTING = SPACE / 2 / HALVES / LEAST * LEAST;
constexpr int PIECE = CROSS ? (FITTING < NB ? FITTING : NB) : DENSE, LINES = CROSS ? HALVES * PIECE : 64;
constexpr int BUFFERS = SPACE / LINES < 4 ? SPACE / LINES : 4, BOX_LINES = CROSS ? 8 : 64;
static_assert(BUFFERS > 1 && NB % (CROSS ? 8 : DENSE) == 0, "a piece is stored while the next is written");

constexpr int UNIT_ROWS = SHARE == 2 ? 2 * ROWS : ROWS, UNIT_COLUMNS = SHARE == 1 ? 2 * NB : NB;  // of a cluster's tile

struct Product {
  const tma::Map *a, *b, *out;
  const element* bias;
  i64 rows, columns;

  __device__ __forceinline__ int row_tiles() const { return (int)((rows + UNIT_ROWS - 1) / UNIT_ROWS); }  // of clusters
  __device__ __forceinline__ int column_tiles() const { return (int)((columns + UNIT_COLUMNS - 1) / UNIT_COLUMNS); }
  __device__ __forceinline__ int tiles() const { return row_tiles() * column_tiles(); }

  // Where a tile lies: they run in bands of `band` along A, so that those at work at one time share operands in the L2 cache. The last
  // one starts where it is whole, since lines outside of a tensor come slowly, all of the GPU's from one place; what two tiles have
  // in common has the same bits in both.
  __device__ __forceinline__ void place(int tile, int band, int rank, int& r0, int& c0) const {
    const int in_band = band * column_tiles(), first = tile / in_band * band, within = tile % in_band;
    const int height = min(row_tiles() - first, band);
    r0 = max(min((first + within % height) * UNIT_ROWS + (SHARE == 2 ? rank * ROWS : 0), (int)rows - ROWS), 0);
    c0 = max(min(within / height * UNIT_COLUMNS + (SHARE == 1 ? rank * NB : 0), (int)columns - NB), 0);
  }
};

// The products of a launch.
struct Products {
  Product all[GROUPS];

  __device__ __forceinline__ int tiles() const {
    int sum = 0;
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) sum += all[i].tiles();
    return sum;
  }
  // The product that a tile belongs to; `tile` becomes its number there.
  __device__ __forceinline__ Product of(int& tile) const {
    Product found = all[0];
    int first = 0, next = 0;
#pragma unroll
    for (int i = 1; i < GROUPS; ++i) {
      next += all[i - 1].tiles();
      if (tile >= next) found = all[i], first = next;
    }
    tile -= first;
    return found;
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

// Matrices of 8 x 8 elements, one register of a warp each, to shared memory as they are or turned; lane 8 m + l names line l of matrix m.
template <bool TURN>
__device__ __forceinline__ void put(unsigned to, unsigned a, unsigned b, unsigned c, unsigned d) {
  if constexpr (TURN)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
  else
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
__device__ __forceinline__ void put_turned(unsigned to, unsigned a, unsigned b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(to), "r"(a), "r"(b) : "memory");
}
__device__ __forceinline__ void put(unsigned to, float a) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(a) : "memory"); }
__device__ __forceinline__ void put(unsigned to, float a, float b) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(a), "f"(b) : "memory");
}
// 16-byte piece `piece` of a line, where a box with the swizzle has it.
__device__ __forceinline__ unsigned in_line(unsigned lines, int line, int piece) { return lines + line * LINE + (piece ^ line % 8) * 16; }

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

  // Eight rows of B, from e on, of block i, to lines `to` of this warpgroup's piece, of which they are rows j .. j + 7.
  __device__ __forceinline__ void put_wide(unsigned to, int i, int e, int j) const {
    const int warp = threadIdx.x / 32 % 4, g = threadIdx.x / 4 % 8, q = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // rows g and g + 8 of the warp's sixteen
      const float low = at[i][e + 2 * half], high = at[i][e + 2 * half + 1];
      if constexpr (CROSS) {
        const int dense = warp % 2 * 16 + 8 * half + g, line = j + 2 * q;
        const unsigned lines = to + warp / 2 * PIECE * LINE;
        put(in_line(lines, line, dense / 4) + dense % 4 * 4, low);
        put(in_line(lines, line + 1, dense / 4) + dense % 4 * 4, high);
      } else {
        put(in_line(to, 16 * warp + 8 * half + g, j / 4 + q / 2) + q % 2 * 8, low, high);
      }
    }
  }

  // One rounding; sixteen rows of B, or eight where `one`.
  __device__ __forceinline__ void put_narrow(unsigned to, int i, int e, int j, bool one) const {
    const int warp = threadIdx.x / 32 % 4, m = threadIdx.x / 8 % 4, line = threadIdx.x % 8;
    const float* c = at[i] + e;
    const unsigned a = pair_of(c[0], c[1]), b = pair_of(c[2], c[3]);  // rows 0 .. 7 and 8 .. 15 of the warp's sixteen
    if constexpr (CROSS) {
      const unsigned place = in_line(to, j + m / 2 * 8 + line, 2 * warp + m % 2);
      if (one)
        put_turned(place, a, b);
      else
        put<true>(place, a, b, pair_of(c[4], c[5]), pair_of(c[6], c[7]));
    } else {
      put<false>(in_line(to, 16 * warp + m % 2 * 8 + line, j / 8 + m / 2), a, b, pair_of(c[4], c[5]), pair_of(c[6], c[7]));
    }
  }

  // The rows of a warpgroup, of which (r, c) is the first. `staging`: BUFFERS pieces; `buffer`: which is next; `name`: of a barrier.
  __device__ __forceinline__ void store(const tma::Map& out, unsigned staging, int& buffer, int name, i64 r, i64 c) const {
    constexpr int BOXES = LINES / BOX_LINES;
    const int thread = threadIdx.x % GROUP, half = thread / (BOXES / HALVES), box = thread % (BOXES / HALVES);
#pragma unroll
    for (int i = 0; i < MI; ++i)
#pragma unroll
      for (int first = 0; first < NB; first += PIECE) {
        const unsigned to = staging + buffer * LINES * LINE;
        if (thread < BOXES) tma::store_wait_read<BUFFERS - 1>();
        tma::meet(name, GROUP);
#pragma unroll
        for (int j = 0; j < PIECE && first + j < NB; j += WIDE ? 8 : 16) {
          if constexpr (WIDE)
            put_wide(to, i, (first + j) / 2, j);
          else
            put_narrow(to, i, (first + j) / 2, j, first + j + 8 == NB);
        }
        tma::written_for_async();
        tma::meet(name, GROUP);
        if (thread < BOXES) {
          const int row = (int)r + 64 * i, column = (int)c + first;
          if (!CROSS)
            tma::store(out, to, column, row);
          else if (first + 8 * box < NB)
            tma::store(out, to + (half * PIECE + 8 * box) * LINE, row + 32 * half, column + 8 * box);
          tma::store_commit();
        }
        buffer = buffer + 1 < BUFFERS ? buffer + 1 : 0;
      }
  }
};

// `start`, of a single product, as in gemm.cu.
extern "C" __global__ void CLUSTER __launch_bounds__(THREADS, 1)
    gemm_wgmma(PRODUCTS, const float* start, i64 start_line, i64 size, i64 band) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const unsigned tiles = (shared_address(shared) + 1023) / 1024 * 1024, staging = tiles + STAGES * STAGE;
  const unsigned full = staging + 2 * BUFFERS * LINES * LINE, empty = full + 8 * STAGES;
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / GROUP, 0);  // so that the compiler knows it for one of the warp
  const unsigned rank = BLOCKS == 1 ? 0 : tma::cluster_rank();
  const int count = (int)((size + KS - 1) / KS);

  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < STAGES; ++i) {
      tma::init(full + 8 * i, 1);
      tma::init(empty + 8 * i, (TURNS ? 1 : 2) * BLOCKS);  // each warpgroup that reads what this block fetches
    }
    tma::init_done();
  }
#if GROUPS == 1
  const Products products = {{{&a0, &b0, &out0, bias0, rows0, columns0}}};
#else
  const Products products = {{{&a0, &b0, &out0, bias0, rows0, columns0},
                              {&a1, &b1, &out1, bias1, rows1, columns1},
                              {&a2, &b2, &out2, bias2, rows2, columns2}}};
#endif
  if (threadIdx.x == 2 * GROUP) {
#pragma unroll
    for (const Product& product : products.all) tma::prefetch(*product.a), tma::prefetch(*product.b), tma::prefetch(*product.out);
  }
  if constexpr (BLOCKS == 1)
    __syncthreads();
  else
    tma::cluster_meet();

  const int all = products.tiles(), unit = blockIdx.x / BLOCKS, units = gridDim.x / BLOCKS;  // of clusters
  int stage = 0;
  unsigned parity = 0;  // of the phase in which the stage is filled
  const auto advance = [&]() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  };
  const auto pass = [&]() {  // the stages of a tile
    stage += count, parity ^= stage / STAGES & 1, stage %= STAGES;
  };

  if (group == 2) {
    wgmma::fewer_registers<40>();
    if (threadIdx.x == 2 * GROUP) {
      for (int tile = unit; tile < all; tile += units) {
        int within = tile, r0, c0;
        const Product product = products.of(within);
        product.place(within, (int)band, rank, r0, c0);
#pragma unroll 1
        for (int s = 0; s < (int)size; s += KS) {
          tma::wait_cluster(empty + 8 * stage, parity ^ 1);
          tma::expect(full + 8 * stage, STAGE);
          const unsigned to = tiles + stage * STAGE, turn = s / KS & 1;  // whose it is to fetch for both
          if (SHARE != 1 || turn == rank) fetch<ROWS, TA>(to, *product.a, full + 8 * stage, r0, s, SHARE == 1);
          if (SHARE != 2 || turn == rank) fetch<NB, TB>(to + BYTES_A, *product.b, full + 8 * stage, c0, s, SHARE == 2);
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
    const int part = TURNS ? 0 : group;  // of a tile
    Sums sums;
    int buffer = 0;
    if (TURNS && group == 1) pass();
    for (int tile = TURNS ? unit + group * units : unit; tile < all; tile += TURNS ? 2 * units : units) {
      int within = tile, r0, c0;
      const Product product = products.of(within);
      product.place(within, (int)band, rank, r0, c0);
      r0 += part * 64 * MI;
      const i64 r = r0 + thread / 32 * 16 + thread % 32 / 4, c = c0 + thread % 4 * 2;  // of this thread's first sum
      if constexpr (TA && TB) {
        if (start) sums.start(start, start_line, r, c, product.rows, product.columns);
      }

      const auto multiply = [&](bool carry) {
        tma::wait(full + 8 * stage, parity);
        const unsigned from_a = tiles + stage * STAGE + part * MI * BOX, from_b = tiles + stage * STAGE + BYTES_A;
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
      if (TURNS && tile != unit) tma::meet(3 + group, 2 * GROUP);
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
      if (TURNS && tile + units < all) tma::come(3 + (group ^ 1), 2 * GROUP);  // its stages follow these
      wgmma::wait<0>();
#pragma unroll
      for (int i = 0; i < MI; ++i) wgmma::pin(sums.at[i]);
      release(before);
      if (TURNS) pass();

      sums.finish();
      if (product.bias) sums.add_bias(product.bias, r, c, product.rows, product.columns);
      sums.store(*product.out, staging + group * BUFFERS * LINES * LINE, buffer, 1 + group, r0, c0);
    }
    tma::store_wait<0>();
  }
  if constexpr (BLOCKS > 1) tma::cluster_meet();  // nobody leaves while the other may still reach for its memory
}
#else
extern "C" __global__ void __launch_bounds__(384, 1) gemm_wgmma(PRODUCTS, const float*, i64, i64, i64) {
  require(false, "samebits: this kernel is built for compute capability 9.0");
}
#endif
