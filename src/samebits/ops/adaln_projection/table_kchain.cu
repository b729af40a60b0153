// Contract "kchain": table (T, N) on the tensor cores. Every element is one chain from +0 over ascending d, 16 at a time, the
// accumulator carried through every instruction; then NaN where it is not finite, + 0, + bias, one rounding.
//
// The weight is the A side of the instruction (16 of its rows), the activation the B side (8 timesteps), so that few timesteps
// waste nothing: the weight is read once, in 16-byte copies that run STAGES - 1 ahead through shared memory. A block takes
// OUTPUTS rows of the weight and STEPS timesteps; blocks that share rows of the weight run next to each other and find them in
// the L2 cache. Within a step of 16 the tensor core adds exactly before it truncates, so tiles change no bit.
// Compile-time choices: ELEMENT (1 BF16, 2 FP16), MT, NT (a warp takes 16 MT outputs and 8 NT timesteps), WARPS, STAGES, VEC.
#include "async.cuh"
#include "mma.cuh"
#include "scalars.cuh"

constexpr int OUTPUTS = 16 * MT * WARPS, STEPS = 8 * NT, THREADS = 32 * WARPS;
constexpr int KS = 64, PIECES = KS / 8;  // columns of a stage: rows of 128 bytes, in pieces of 16
constexpr int COPY_ROWS = THREADS / PIECES, COPIES = OUTPUTS / COPY_ROWS;
constexpr int PITCH = OUTPUTS + 8;  // of the results in shared memory
static_assert(OUTPUTS % COPY_ROWS == 0 && COPY_ROWS % 8 == 0, "a thread keeps its column, also in the place of its rows");

struct Stage {
  element weight[OUTPUTS * KS];
  element act[STEPS * KS];
};
static_assert(sizeof(Stage) >= STEPS * PITCH * sizeof(element), "the results fit where the first stage was");

// Where a piece of a row lies: eight rows of one column are in different banks. Rows eight apart lie alike.
__device__ __forceinline__ int place(int row, int piece) { return row * KS + 8 * (piece ^ row % 8); }

__device__ __forceinline__ void copy16(element* shared, const element* from, bool here) {
  const int bytes = here ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void multiply_add(FragmentC& c, const FragmentA& a, const FragmentB& b) {
#if ELEMENT == 1
  mma(c, a, b);
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c.at[0]), "+f"(c.at[1]), "+f"(c.at[2]), "+f"(c.at[3])
      : "r"(a.at[0]), "r"(a.at[1]), "r"(a.at[2]), "r"(a.at[3]), "r"(b.at[0]), "r"(b.at[1]));
#endif
}

struct Chains {
  FragmentC at[MT][NT];
};

// One stage: four steps of every chain. A piece has an even number plus `odd`, and XOR with the row's bits moves it.
__device__ __forceinline__ void multiply(Chains& chains, const Stage& stage, int warp, int lane) {
  const int moved = lane % 8;
  const unsigned weight = shared_address(stage.weight + (warp * MT * 16 + lane % 16) * KS), weight_odd = (lane / 16 ^ moved) * 16;
  const unsigned act = shared_address(stage.act + moved * KS), act_odd = (lane / 8 % 2 ^ moved) * 16;
#pragma unroll
  for (int step = 0; step < KS / 16; ++step) {
    FragmentA a[MT];
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) a[mt] = load_a(weight + mt * 16 * KS * 2 + (32 * step ^ weight_odd));
#pragma unroll
    for (int tile = 0; tile < NT; tile += 2) {  // a load brings both halves of two tiles, or of one twice
      const int second = tile + 1 < NT ? lane / 16 : 0;
      const FragmentA two = load_a(act + (tile + second) * 8 * KS * 2 + (32 * step ^ act_odd));
#pragma unroll
      for (int i = 0; i < 2 && tile + i < NT; ++i) {
        const FragmentB b = {{two.at[2 * i], two.at[2 * i + 1]}};
#pragma unroll
        for (int mt = 0; mt < MT; ++mt) multiply_add(chains.at[mt][tile + i], a[mt], b);
      }
    }
  }
}

// The infinities of a tensor core are nobody's promise, nor is the sign of its zero.
__device__ __forceinline__ float finished(float sum, float bias) {
  const float canonical = fabsf(sum) <= 3.402823466e38f ? sum : __uint_as_float(0x7fc00000u);
  return add(add(canonical, 0.0f), bias);
}

// act is (padded rows, pitch), rows padded to a multiple of STEPS and columns to one of KS.
extern "C" __global__ void __launch_bounds__(THREADS)
    table_kchain(element* table, const element* act, i64 pitch, const element* weight, i64 weight_row, const element* bias,
                 i64 rows, i64 outputs, i64 size) {
  extern __shared__ __align__(128) unsigned char shared[];
  Stage* const stages = reinterpret_cast<Stage*>(shared);  // [STAGES]
  element* const results = reinterpret_cast<element*>(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int piece = threadIdx.x % PIECES, row0 = threadIdx.x / PIECES, place0 = place(row0, piece), width = (int)size;
  const i64 step_tiles = (rows + STEPS - 1) / STEPS, tiles = step_tiles * ((outputs + OUTPUTS - 1) / OUTPUTS);
  const int count = (int)(pitch / KS);  // stages of a tile

#pragma unroll 1
  for (i64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const i64 n0 = tile / step_tiles * OUTPUTS, t0 = tile % step_tiles * STEPS;
    const element* const own = weight + (n0 + row0) * weight_row;
    const element* const own_act = act + (t0 + row0) * pitch + 8 * piece;
    const int own_rows = (int)min(outputs - n0, (i64)OUTPUTS) - row0;  // copy i is of a row of it if i * COPY_ROWS < own_rows

    const auto fetch = [&](int number) {
      if (number < count) {
        Stage& to = stages[number % STAGES];
        const int d = number * KS + 8 * piece, rows_here = d < width ? own_rows : 0;
        const element* from = own + d;
#pragma unroll
        for (int i = 0; i < COPIES; ++i) {
          const bool here = i * COPY_ROWS < rows_here;
          element* const target = to.weight + place0 + i * COPY_ROWS * KS;
          if constexpr (VEC == 8)
            copy16(target, here ? from : weight, here);
          else
            *reinterpret_cast<uint4*>(target) = load8_raw<1>(from, 0, here ? width - d : 0);
          from += COPY_ROWS * weight_row;
        }
#pragma unroll
        for (int row = 0; row < STEPS; row += COPY_ROWS)
          if (row0 + row < STEPS) copy16(to.act + place0 + row * KS, own_act + row * pitch + number * KS, true);
      }
      copies_commit();
    };

#pragma unroll
    for (int number = 0; number < STAGES - 1; ++number) fetch(number);
    Chains chains = {};
#pragma unroll 1
    for (int number = 0; number < count; ++number) {
      copies_wait<STAGES - 2>();
      __syncthreads();  // the stage is there, and nobody reads the one before any more
      fetch(number + STAGES - 1);
      multiply(chains, stages[number % STAGES], warp, lane);
    }
    copies_wait<0>();
    __syncthreads();  // the stages are free

#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int n = (warp * MT + mt) * 16 + half * 8 + lane / 4;
        const float b = n0 + n < outputs ? to_float(bias[n0 + n]) : 0.0f;
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            results[(8 * nt + lane % 4 * 2 + e) * PITCH + n] = to_element(finished(chains.at[mt][nt].at[2 * half + e], b));
      }
    __syncthreads();
    for (int i = threadIdx.x; i < STEPS * OUTPUTS; i += THREADS) {
      const int t = i / OUTPUTS, n = i % OUTPUTS;
      if (t0 + t < rows && n0 + n < outputs) table[(t0 + t) * outputs + n0 + n] = results[t * PITCH + n];
    }
    __syncthreads();  // the results are out before the next tile is copied over them
  }
}
