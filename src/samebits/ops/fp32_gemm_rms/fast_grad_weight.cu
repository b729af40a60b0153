// Contracts "fast": grad_weight (N, K) = fold over ascending rows of grad_proj[t, n] * x[t, k], on the tensor cores. The order:
//   chunk  256 rows. For each BF16 piece of grad_proj a zero-start tensor-core chain over ascending rows; high + (middle + low)
//   fold   left fold of the chunks from +0 + start
// What is not finite becomes the canonical NaN at the end.
//
// The rows of the product are columns of x, so x is transposed on its way to the tensor cores. A block takes COLUMNS columns,
// OUTPUTS outputs and all rows. Its TEAMS teams of WARPS warps take different chunks at the same time; a warp takes MT * 16
// columns and all outputs of the block. A stage is KS rows of x and of grad_proj (FP32, cut into pieces by the lane that
// feeds them to the tensor core), copied STAGES - 1 ahead, for each team. The running fold waits in shared memory.
// Compile-time choices: MT, NT (8 * NT outputs), WARPS, TEAMS, KS, STAGES, VEC; BLOCKS that share a multiprocessor.
#include "controller.cuh"
#include "fast_tiles.cuh"

constexpr int COLUMNS = 16 * MT * WARPS, OUTPUTS = 8 * NT;
constexpr int TEAM = 32 * WARPS, THREADS = TEAM * TEAMS;
constexpr int STEPS = CHUNK / KS;                           // stages of a chunk
constexpr int G_PITCH = OUTPUTS + 4;                          // floats; rows two apart lie eight banks apart
constexpr int X_PIECES = COLUMNS / 8, G_PIECES = OUTPUTS / 4;  // of a row
constexpr int X_ROWS = TEAM / X_PIECES, X_COPIES = KS / X_ROWS;
constexpr int VALUES = 4 * MT * NT;                           // that a thread keeps
constexpr int LEVEL = VALUES * TEAM;
static_assert(CHUNK % KS == 0 && TEAM % X_PIECES == 0 && KS % X_ROWS == 0, "a thread keeps its columns");

struct Stage {
  bf16 x[KS * COLUMNS];
  float g[KS * G_PITCH];
};

struct Problem {
  const float* g;
  i64 g_row;
  int outputs;
  bool g_vec;
  const bf16* x;  // column 0 of the thread's piece, in row 0
  i64 x_row, gap;
  int columns, left, width;  // of the thread's piece: how many there are, how many its stream still has, width of a stream
  i64 rows;
};

// --- copying ----------------------------------------------------------------------------------------------------------

// Rows row .. row + KS of the columns and outputs of the block. What is past the end of anything is +0.
__device__ __forceinline__ void copy_stage(Stage& to, const Problem& p, i64 row, int output0, int thread) {
  const int piece = thread % X_PIECES, row0 = thread / X_PIECES;
  const int here = (int)min(p.rows - row, (i64)KS);
  const int place0 = place<COLUMNS>(row0, piece);
  const bf16* from = p.x + (row + row0) * p.x_row;
#pragma unroll
  for (int i = 0; i < X_COPIES; ++i) {
    const bool there = row0 + i * X_ROWS < here && p.columns > 0;
    const int moved = place0 ^ place<COLUMNS>(i * X_ROWS, 0);  // row0 and i * X_ROWS have no bit in common
    bf16* const target = to.x + (row0 + i * X_ROWS) * COLUMNS + 8 * moved;
    if constexpr (VEC == 8)
      copy8(target, there ? from : p.x, there);
    else
      *reinterpret_cast<uint4*>(target) = gather8(from, there ? p.columns : 0, p.left, p.width, p.gap);
    from += X_ROWS * p.x_row;
  }
  for (int i = thread; i < KS * G_PIECES; i += TEAM) {
    const int t = i / G_PIECES, column = i % G_PIECES * 4, n = output0 + column;
    const bool there = t < here && n < p.outputs;
    copy4(to.g + t * G_PITCH + column, p.g + (there ? (row + t) * p.g_row + n : 0), there ? p.outputs - n : 0, p.g_vec);
  }
}

// --- one chunk ---------------------------------------------------------------------------------------------------------

struct Chains {
  FragmentC piece[3][MT][NT];
};

// Sixteen rows: one step of every chain.
__device__ __forceinline__ void multiply(Chains& chains, const Stage& stage, int step, int warp, int lane) {
  FragmentA a[MT];
  const int g = lane / 4, q = lane % 4;
  const int t = 16 * step + lane % 8 + lane / 16 * 8;
#pragma unroll
  for (int mt = 0; mt < MT; ++mt)
    a[mt] = load_a_transposed(shared_address(stage.x + t * COLUMNS + 8 * place<COLUMNS>(t, 2 * (warp * MT + mt) + lane / 8 % 2)));
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    const float* const column = stage.g + (16 * step + 2 * q) * G_PITCH + 8 * j + g;
    const Pieces b = pieces_of(make_float2(column[0], column[G_PITCH]), make_float2(column[8 * G_PITCH], column[9 * G_PITCH]));
#pragma unroll
    for (int piece = 0; piece < 3; ++piece)
#pragma unroll
      for (int mt = 0; mt < MT; ++mt) mma(chains.piece[piece][mt][j], a[mt], b.at[piece]);
  }
}

// Value v of a thread: element v % 4 of the fragment of columns v / 4 / NT and outputs v / 4 % NT.
template <typename Use>
__device__ __forceinline__ void for_each_value(const Chains& chains, const Use& use) {
#pragma unroll
  for (int mt = 0; mt < MT; ++mt)
#pragma unroll
    for (int j = 0; j < NT; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float high = chains.piece[0][mt][j].at[e], middle = chains.piece[1][mt][j].at[e], low = chains.piece[2][mt][j].at[e];
        use((mt * NT + j) * 4 + e, chunk_sum(high, middle, low));
      }
}

// Where column k, output n of the block is among the values.
__device__ __forceinline__ int value_of(int k, int n) {
  const int tile = k / 16, mt = tile % MT, half = k % 16 / 8, g = k % 8;
  return ((mt * NT + n / 8) * 4 + half * 2 + n % 2) * TEAM + tile / MT * 32 + 4 * g + n % 8 / 2;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    fast_grad_weight(float* grad_weight, const float* grad_proj, i64 grad_row, const bf16* x, i64 x_row, i64 x_stream,
                     const float* start, i64 start_row, i64 rows, i64 width, i64 size, i64 outputs) {
  extern __shared__ __align__(128) unsigned char shared[];
  Stage* const stages = reinterpret_cast<Stage*>(shared);                 // [TEAMS][STAGES]
  float* const fold = reinterpret_cast<float*>(stages + TEAMS * STAGES);  // [LEVEL]
  float* const meeting = fold + LEVEL;                                    // [TEAMS][LEVEL], where there are several
  const int team = TEAMS == 1 ? 0 : threadIdx.x / TEAM, thread = TEAMS == 1 ? threadIdx.x : threadIdx.x % TEAM;
  Stage* const own = stages + team * STAGES;
  const int k0 = blockIdx.x * COLUMNS, output0 = blockIdx.y * OUTPUTS;

  const int first = k0 + thread % X_PIECES * 8;
  const Column column(first, (int)width);
  const bool inside = first < (int)size;
  const Problem problem = {grad_proj,
                           grad_row,
                           (int)outputs,
                           outputs % 4 == 0 && grad_row % 4 == 0 && (unsigned long long)grad_proj % 16 == 0,
                           inside ? x + column.stream * x_stream + column.d : x,
                           x_row,
                           x_stream - width,
                           inside ? (int)size - first : 0,
                           (int)(width - column.d),
                           (int)width,
                           rows};

  for (int i = threadIdx.x; i < COLUMNS * OUTPUTS; i += THREADS) {
    const int k = i % COLUMNS, n = i / COLUMNS;
    const bool there = start != nullptr && k0 + k < size && output0 + n < outputs;
    fold[value_of(k, n)] = add(0.0f, there ? start[(output0 + n) * start_row + k0 + k] : 0.0f);
  }
  __syncthreads();

  // Stage i of a team: the first row of it; the end of all rows where there is nothing for the team.
  const i64 rounds = ((rows + CHUNK - 1) / CHUNK + TEAMS - 1) / TEAMS, total = rounds * STEPS;
  const auto row_of = [&](i64 i) { return min((i / STEPS * TEAMS + team) * CHUNK + i % STEPS * KS, rows); };
  i64 ahead = 0;
  const auto fetch = [&](int slot) {
    const i64 row = ahead < total ? row_of(ahead) : rows;
    if (row < rows) copy_stage(own[slot], problem, row, output0, thread);
    copies_commit();
    ++ahead;
  };
#pragma unroll
  for (int slot = 0; slot < STAGES - 1; ++slot) fetch(slot);
  int slot = 0, free = STAGES - 1;
#pragma unroll 1
  for (i64 round = 0; round < rounds; ++round) {
    Chains chains = {};
#pragma unroll 1
    for (int step = 0; step < STEPS; ++step) {
      copies_wait<STAGES - 2>();
      team_sync<TEAMS, WARPS>(team);  // the stage is there, and nobody reads the one before any more
      fetch(free);
      if (row_of(round * STEPS + step) < rows) {
#pragma unroll
        for (int i = 0; i < KS / 16; ++i) multiply(chains, own[slot], i, thread / 32, thread % 32);
      }
      slot = slot + 1 == STAGES ? 0 : slot + 1;
      free = free + 1 == STAGES ? 0 : free + 1;
    }
    if constexpr (TEAMS == 1) {  // a thread meets only its own values
      for_each_value(chains, [&](int v, float value) {
        float* const sum = fold + v * TEAM + thread;
        *sum = add(*sum, value);
      });
    } else {
      for_each_value(chains, [&](int v, float value) { meeting[team * LEVEL + v * TEAM + thread] = value; });
      __syncthreads();
      for (int v = threadIdx.x; v < LEVEL; v += THREADS) {
        float sum = fold[v];
#pragma unroll
        for (int other = 0; other < TEAMS; ++other) sum = add(sum, meeting[other * LEVEL + v]);  // a blank chunk is +0
        fold[v] = sum;
      }
      __syncthreads();
    }
  }
  copies_wait<0>();
  __syncthreads();
  for (int i = threadIdx.x; i < COLUMNS * OUTPUTS; i += THREADS) {
    const int k = i % COLUMNS, n = i / COLUMNS;
    if (k0 + k < size && output0 + n < outputs) grad_weight[(output0 + n) * size + k0 + k] = canonical<true>(fold[value_of(k, n)]);
  }
}
