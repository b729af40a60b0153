// Contracts "fast": raw sums of the controller projection on the tensor cores. The order:
//   chunk    256 elements of K. For each BF16 piece of the weight a zero-start tensor-core chain; then high + (middle + low).
//            Squares: lane q of a quad folds elements 16 i + {2q, 2q+1, 2q+8, 2q+9}, fused, from +0; (p0 + p1) + (p2 + p3)
//   segment  left fold of its chunks from +0; 16 segments of ceil(chunks / 16) chunks
//   tree     of neighbours over the segments; a block adds those of its part, the reader of `parts` the rest
//
// A block takes TOKENS tokens, OUTPUTS outputs and 16 / P segments. Its TEAMS teams of WARPS warps take different chunks of a
// segment at the same time; a warp takes MT * 16 tokens and all outputs of the block. A stage is KS columns of x and of the
// weight, copied STAGES - 1 ahead, for each team. The weight is FP32, cut into pieces by the lane that feeds them to the tensor
// core, or (SPLIT, for many tokens and all outputs in one block) already the pieces that split_weight.cu wrote.
// Sums of chunks wait in shared memory, a level of the tree each: registers hold the chains only.
// Compile-time choices: MT, NT (8 * NT outputs), WARPS, TEAMS, KS, STAGES, VEC, SPLIT; BLOCKS that share a multiprocessor.
#include "fast_tiles.cuh"

constexpr int SEGMENTS = 16;
constexpr int TOKENS = 16 * MT * WARPS, OUTPUTS = 8 * NT;
constexpr int TEAM = 32 * WARPS, THREADS = TEAM * TEAMS;
constexpr int STEPS = CHUNK / KS;                              // stages of a chunk
constexpr int X_PIECES = KS / 8, W_PIECES = KS / 4;            // of a row
constexpr int X_ROWS = TEAM / X_PIECES, X_COPIES = TOKENS / X_ROWS;
constexpr int SQUARES = (2 * MT + 3) / 4;                      // sums of squares that a lane keeps
constexpr int VALUES = 4 * MT * NT + SQUARES;                  // that a thread keeps
constexpr int LEVEL = VALUES * TEAM;                           // sums of one level of the tree
static_assert(CHUNK % KS == 0 && TEAM % X_PIECES == 0 && TOKENS % X_ROWS == 0, "a thread keeps its column");

constexpr int TILES = 3 * NT;  // of eight rows each: the pieces of the outputs of a block, high, middle and low

struct Stage {
  bf16 x[TOKENS * KS];
#if SPLIT
  bf16 w[8 * TILES * KS];
#else
  float w[OUTPUTS * KS];
#endif
};

// Where piece `piece` (four FP32) of row `row` of the weight lies in its row: what four rows feed at once is in different banks.
__device__ __forceinline__ int weight_place(int row, int piece) { return piece ^ row % 4 * 2; }

struct Problem {
  const bf16* x;
  i64 x_row, x_stream;
  const float* weight;
  i64 weight_row, rows;
  int width, size, outputs;  // D, K, N
  bool weight_vec;
};

// --- copying ----------------------------------------------------------------------------------------------------------

// Columns k .. k + KS of the tokens and outputs of the block. What is past the end of anything is +0.
__device__ __forceinline__ void copy_stage(Stage& to, const Problem& p, int k, i64 token0, int output0, int thread) {
  const int piece = thread % X_PIECES, row0 = thread / X_PIECES;
  const int first = k + 8 * piece;
  const Column column(first, p.width);
  const int rows = first < p.size ? (int)min(p.rows - token0, (i64)TOKENS) - row0 : 0;  // copy i is of a row if i * X_ROWS < rows
  const int place0 = place<KS>(row0, piece);
  const bf16* from = p.x + (token0 + row0) * p.x_row + column.stream * p.x_stream + column.d;
#pragma unroll
  for (int i = 0; i < X_COPIES; ++i) {
    bf16* const target = to.x + (row0 + i * X_ROWS) * KS + 8 * (place0 ^ place<KS>(i * X_ROWS, 0));  // no bit of row0 in the other
    if constexpr (VEC == 8) {
      copy8(target, from, i * X_ROWS < rows);
    } else {
      const int count = i * X_ROWS < rows ? p.size - first : 0;
      *reinterpret_cast<uint4*>(target) = gather8(from, count, p.width - column.d, p.width, p.x_stream - p.width);
    }
    from += X_ROWS * p.x_row;
  }
#if SPLIT
  const bf16* const pieces = reinterpret_cast<const bf16*>(p.weight);
  for (int i = thread; i < 8 * TILES * X_PIECES; i += TEAM) {
    const int row = i / X_PIECES, piece = i % X_PIECES, at = k + 8 * piece;
    copy8(to.w + row * KS + 8 * place<KS>(row, piece), pieces + row * p.weight_row + (at < p.size ? at : 0), at < p.size);
  }
#else
  for (int i = thread; i < OUTPUTS * W_PIECES; i += TEAM) {
    const int row = i / W_PIECES, piece = i % W_PIECES, n = output0 + row, at = k + 4 * piece;
    const bool here = n < p.outputs && at < p.size;
    copy4(to.w + row * KS + 4 * weight_place(row, piece), p.weight + (here ? n * p.weight_row + at : 0), here ? p.size - at : 0,
          p.weight_vec);
  }
#endif
}

// --- one chunk ---------------------------------------------------------------------------------------------------------

struct Chains {
  FragmentC piece[3][MT][NT];
  float squares[MT][2];  // of tokens g and g + 8
};

__device__ __forceinline__ float squares_of(float acc, unsigned pair) {
  acc = __fmaf_rn(widen_low(pair), widen_low(pair), acc);
  return __fmaf_rn(widen_high(pair), widen_high(pair), acc);
}

// Sixteen columns: one step of every chain.
__device__ __forceinline__ void multiply(Chains& chains, const Stage& stage, int step, int warp, int lane) {
  FragmentA a[MT];
  const int row = warp * 16 * MT + lane % 16;
  const unsigned at = shared_address(stage.x + row * KS + 8 * place<KS>(row, 2 * step + lane / 16));
#pragma unroll
  for (int mt = 0; mt < MT; ++mt) a[mt] = load_a(at + mt * 16 * KS * 2);
#if SPLIT
#pragma unroll
  for (int tile = 0; tile < TILES; tile += 2) {  // a load brings both halves of two tiles
    const int row = min(8 * tile + lane / 16 * 8 + lane % 8, 8 * TILES - 1);
    const FragmentA two = load_a(shared_address(stage.w + row * KS + 8 * place<KS>(row, 2 * step + lane / 8 % 2)));
#pragma unroll
    for (int i = 0; i < 2 && tile + i < TILES; ++i) {
      const FragmentB b = {{two.at[2 * i], two.at[2 * i + 1]}};
#pragma unroll
      for (int mt = 0; mt < MT; ++mt) mma(chains.piece[(tile + i) / NT][mt][(tile + i) % NT], a[mt], b);
    }
  }
#else
  const int q = lane % 4;
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    const int n = 8 * j + lane / 4;
    const float* const w = stage.w + n * KS + 2 * (q % 2);
    const Pieces b = pieces_of(*reinterpret_cast<const float2*>(w + 4 * weight_place(n, 4 * step + q / 2)),
                               *reinterpret_cast<const float2*>(w + 4 * weight_place(n, 4 * step + 2 + q / 2)));
#pragma unroll
    for (int piece = 0; piece < 3; ++piece)
#pragma unroll
      for (int mt = 0; mt < MT; ++mt) mma(chains.piece[piece][mt][j], a[mt], b.at[piece]);
  }
#endif
#pragma unroll
  for (int mt = 0; mt < MT; ++mt)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      chains.squares[mt][half] = squares_of(squares_of(chains.squares[mt][half], a[mt].at[half]), a[mt].at[half + 2]);
}

// Value v of a thread: element v % 4 of the fragment of tokens v / 4 / NT and outputs v / 4 % NT; then the squares of token
// number 4 i + q of the thread's 2 MT, counted as mt, half.
template <typename Use>
__device__ __forceinline__ void for_each_value(const Chains& chains, int lane, const Use& use) {
#pragma unroll
  for (int mt = 0; mt < MT; ++mt)
#pragma unroll
    for (int j = 0; j < NT; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        use((mt * NT + j) * 4 + e, chunk_sum(chains.piece[0][mt][j].at[e], chains.piece[1][mt][j].at[e], chains.piece[2][mt][j].at[e]));
#pragma unroll
  for (int i = 0; i < SQUARES; ++i) {
    float mine = 0.0f;
#pragma unroll
    for (int r = 0; r < 4 && 4 * i + r < 2 * MT; ++r) {
      float s = chains.squares[(4 * i + r) / 2][r % 2];
      s = add(s, __shfl_xor_sync(0xffffffffu, s, 1));  // p0 + p1 and p2 + p3; an addition commutes
      s = add(s, __shfl_xor_sync(0xffffffffu, s, 2));
      if (lane % 4 == r) mine = s;
    }
    use(4 * MT * NT + i, mine);
  }
}

// Where column n of token t (OUTPUTS: its sum of squares) is in a level.
__device__ __forceinline__ int value_of(int t, int n) {
  const int tile = t / 16, mt = tile % MT, half = t % 16 / 8, g = t % 8;
  const int number = 2 * mt + half;
  const int v = n < OUTPUTS ? (mt * NT + n / 8) * 4 + half * 2 + n % 2 : 4 * MT * NT + number / 4;
  const int q = n < OUTPUTS ? n % 8 / 2 : number % 4;
  return v * TEAM + tile / MT * 32 + 4 * g + q;
}

// What a team reads, stage by stage: the columns of its chunks of every segment of the part.
struct Cursor {
  int chunk0, length, rounds, team;  // first chunk of the part, chunks of a segment, how many of them a team takes at most
  int segment, round, step;

  // The first column of the stage; the end of K where there is nothing for this team.
  __device__ __forceinline__ int column(int size) const {
    const int within = round * TEAMS + team;
    return within < length ? min((chunk0 + segment * length + within) * CHUNK + step * KS, size) : size;
  }
  __device__ __forceinline__ void advance() {
    if (++step == STEPS) {
      step = 0;
      if (++round == rounds) round = 0, ++segment;
    }
  }
};

__device__ __forceinline__ int after(int slot) { return slot + 1 == STAGES ? 0 : slot + 1; }

// Adds the chunks that the teams have finished to the open segment, in the order of K.
__device__ __forceinline__ void close_chunks(float* levels, float* meeting, const Chains& chains, bool first, int team, int thread) {
  if constexpr (TEAMS == 1) {  // a thread meets only its own values
    for_each_value(chains, thread % 32, [&](int v, float value) {
      float* const open = levels + v * TEAM + thread;
      *open = add(first ? 0.0f : *open, value);
    });
  } else {
    for_each_value(chains, thread % 32, [&](int v, float value) { meeting[team * LEVEL + v * TEAM + thread] = value; });
    __syncthreads();
    for (int v = threadIdx.x; v < LEVEL; v += THREADS) {
      float open = first ? 0.0f : levels[v];
#pragma unroll
      for (int other = 0; other < TEAMS; ++other) open = add(open, meeting[other * LEVEL + v]);  // a blank chunk is +0
      levels[v] = open;
    }
    __syncthreads();
  }
}

// The open segment is complete. Its number has a one for every subtree that waits on its left; empty segments on the right of
// the last one would add +0.
__device__ __forceinline__ void close_segment(float* levels, int segment, bool last) {
  for (int v = threadIdx.x; v < LEVEL; v += THREADS) {
    float sum = levels[v];
    int level = 0;
    for (; last ? segment >> level : segment >> level & 1; ++level)
      if (segment >> level & 1) sum = add(levels[(1 + level) * LEVEL + v], sum);
    levels[last ? v : (1 + level) * LEVEL + v] = sum;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    fast_sums(float* parts, const bf16* x, i64 x_row, i64 x_stream, const float* weight, i64 weight_row, i64 rows, i64 width,
              i64 size, i64 outputs, i64 count) {
  extern __shared__ __align__(128) unsigned char shared[];
  Stage* const stages = reinterpret_cast<Stage*>(shared);                   // [TEAMS][STAGES]
  float* const levels = reinterpret_cast<float*>(stages + TEAMS * STAGES);  // the open segment, then the tree, bottom up
  const int team = TEAMS == 1 ? 0 : threadIdx.x / TEAM, thread = TEAMS == 1 ? threadIdx.x : threadIdx.x % TEAM;
  Stage* const own = stages + team * STAGES;
  const bool weight_vec = size % 4 == 0 && weight_row % 4 == 0 && (unsigned long long)weight % 16 == 0;
  const Problem problem = {x, x_row, x_stream, weight, weight_row, rows, (int)width, (int)size, (int)outputs, weight_vec};
  const int groups = ((int)outputs + OUTPUTS - 1) / OUTPUTS;
  const int output0 = blockIdx.y % groups * OUTPUTS, part = blockIdx.y / groups;
  const i64 token0 = (i64)blockIdx.x * TOKENS;

  const int chunks = ((int)size + CHUNK - 1) / CHUNK, length = (chunks + SEGMENTS - 1) / SEGMENTS;
  const int most = SEGMENTS / (int)count, chunk0 = part * most * length;              // segments of this part
  const int segments = min(most, max(0, (chunks - chunk0 + length - 1) / length));  // those of them that are not empty
  float* const meeting = levels + (32 - __clz(most)) * LEVEL;                         // [TEAMS][LEVEL]
  const int rounds = (length + TEAMS - 1) / TEAMS;

  Cursor ahead = {chunk0, length, rounds, team, 0, 0, 0};
  Cursor now = ahead;
  const auto fetch = [&](int slot) {
    const int k = ahead.segment < segments ? ahead.column((int)size) : (int)size;
    if (k < (int)size) copy_stage(own[slot], problem, k, token0, output0, thread);
    copies_commit();
    ahead.advance();
  };
#pragma unroll
  for (int slot = 0; slot < STAGES - 1; ++slot) fetch(slot);
  int slot = 0, free = STAGES - 1;
#pragma unroll 1
  while (now.segment < segments) {
    const int segment = now.segment, round = now.round;
    Chains chains = {};
#pragma unroll 1
    for (int step = 0; step < STEPS; ++step) {
      copies_wait<STAGES - 2>();
      team_sync<TEAMS, WARPS>(team);  // the stage is there, and nobody reads the one before any more
      fetch(free);
      if (now.column((int)size) < (int)size) {
#pragma unroll
        for (int i = 0; i < KS / 16; ++i) multiply(chains, own[slot], i, thread / 32, thread % 32);
      }
      now.advance();
      slot = after(slot), free = after(free);
    }
    close_chunks(levels, meeting, chains, round == 0, team, thread);
    if (now.round == 0) close_segment(levels, segment, segment == segments - 1);
  }
  copies_wait<0>();
  __syncthreads();
  float* const out = parts + ((i64)part * rows + token0) * (outputs + 1);
  const int here = (int)min((i64)TOKENS, rows - token0);
  for (int i = threadIdx.x; i < here * (OUTPUTS + 1); i += THREADS) {
    const int t = i / (OUTPUTS + 1), n = i % (OUTPUTS + 1);
    const float sum = segments == 0 ? 0.0f : levels[value_of(t, n)];
    if (n < OUTPUTS && output0 + n < outputs) out[t * (outputs + 1) + output0 + n] = sum;
    if (n == OUTPUTS && output0 == 0) out[t * (outputs + 1) + outputs] = sum;
  }
}
