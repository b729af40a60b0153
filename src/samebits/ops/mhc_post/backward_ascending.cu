// Contract "ascending": 20 chains per token, each a left fold over ascending d. A warp works on TOKENS tokens all by itself,
// without a barrier: it copies chunks of their rows into shared memory as they are stored, STAGES - 1 chunks ahead, and a lane
// folds CHAINS chains whose left factor is the same row, so that this row is read and widened once for both.
//
//   CHAINS = 2: ten lanes per token, three tokens per warp; 7 instructions per column for three tokens. For many tokens.
//   CHAINS = 1: twenty lanes, one token; 4 instructions per column, hardly more than the chain itself takes. For few tokens.
//
// Left rows are r0 .. r3 and y, right rows g0 .. g3. The lanes of a quarter warp that read different rows find them in
// different banks, and those that read the same row share the access. Past the end of a row the factors are +0, and so is
// their product. Results that are null are not wanted: what only they need is not read.
#include "async.cuh"
#include "mix.cuh"

constexpr int CHUNK = 128;
constexpr int LANES = 20 / CHAINS, TOKENS = 32 / LANES;

// Rows of a chunk in shared memory, 16 bytes apart in their banks.
typedef grad_in RightRow[CHUNK + 16 / sizeof(grad_in)];
typedef bf16 LeftRow[CHUNK + 16 / sizeof(bf16)];

struct Stage {
  RightRow right[TOKENS][H];
  LeftRow left[TOKENS][H + 1];
};

struct Shared {
  Stage stage[STAGES];
  Weights comb[TOKENS][H], post[TOKENS];
};

// --- copies -----------------------------------------------------------------------------------------------------------

// How a warp copies a row of T: 16 bytes per lane, ROWS rows at once.
template <typename T>
struct Lanes {
  static constexpr int WIDTH = 16 / sizeof(T), ROWS = 32 * WIDTH / CHUNK;
  static __device__ __forceinline__ int row() { return threadIdx.x % 32 / (32 / ROWS); }
  static __device__ __forceinline__ int column() { return threadIdx.x % (32 / ROWS) * WIDTH; }
  static __device__ __forceinline__ const T* place(const T* rows, i64 stride) { return rows + row() * stride + column(); }
};

// 16 bytes, of which those past the end of the row (columns first .. of `size`) become +0.
template <typename T>
__device__ __forceinline__ void copy16(T* shared, const T* source, int first, int size) {
  if constexpr (VEC == 8) {
    const unsigned target = (unsigned)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(first < size ? 16 : 0) : "memory");
  } else {
#pragma unroll
    for (int n = 0; n < Lanes<T>::WIDTH; ++n) shared[n] = first + n < size ? source[n] : T(0);
  }
}

// Columns d .. d + CHUNK - 1 of four rows; `place` is this lane's in the first of them.
template <typename T, int PITCH>
__device__ __forceinline__ void copy_rows(T (*shared)[PITCH], const T* place, i64 stride, int d, int size) {
  const int row = Lanes<T>::row(), column = Lanes<T>::column();
#pragma unroll
  for (int n = 0; n < H; n += Lanes<T>::ROWS) copy16(&shared[row + n][column], place + n * stride + d, d + column, size);
}

// --- chains -----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint4 eight(const bf16* row) { return *reinterpret_cast<const uint4*>(row); }
__device__ __forceinline__ Float8 eight(const float* row) { return load<8, 8>(row, 0, 8); }
__device__ __forceinline__ Float8 widen8(const Float8& f) { return f; }

// Eight columns of the factors of a lane, as stored: what is on its way to registers while the eight before are folded.
struct Factors {
  uint4 left;
  decltype(eight((const grad_in*)nullptr)) right[CHAINS];
};

__device__ __forceinline__ Factors factors_at(const bf16* left, const RightRow* right, int d) {
  Factors f;
  f.left = eight(left + d);
#pragma unroll
  for (int c = 0; c < CHAINS; ++c) f.right[c] = eight(right[c] + d);
  return f;
}

__device__ __forceinline__ void fold_factors(float (&acc)[CHAINS], const Factors& f) {
  const Float8 left = widen8(f.left);
  Float8 right[CHAINS];
#pragma unroll
  for (int c = 0; c < CHAINS; ++c) right[c] = widen8(f.right[c]);
#pragma unroll
  for (int e = 0; e < 8; ++e)
#pragma unroll
    for (int c = 0; c < CHAINS; ++c) acc[c] = add(acc[c], mul(left.at[e], right[c].at[e]));
}

__device__ __forceinline__ void fold(float (&acc)[CHAINS], const bf16* left, const RightRow* right, int count) {
  Factors even = factors_at(left, right, 0);
#pragma unroll 1
  for (int done = 8;; done += 8) {
    if (done >= count) return fold_factors(acc, even);
    const Factors odd = factors_at(left, right, done);
    fold_factors(acc, even);
    done += 8;
    if (done >= count) return fold_factors(acc, odd);
    even = factors_at(left, right, done);
    fold_factors(acc, odd);
  }
}

// --- kernel -----------------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(128)
    backward_ascending(const grad_in* grad, i64 grad_row, i64 grad_stream, const bf16* residual, i64 residual_row,
                       i64 residual_stream, const bf16* sublayer, i64 sublayer_row, const float* comb, i64 comb_row,
                       i64 comb_stream, const float* post, i64 post_row, grad_out* grad_residual, grad_out* grad_sublayer,
                       float* grad_comb, float* grad_post, i64 size, i64 tokens) {
  extern __shared__ __align__(16) unsigned char shared[];
  Shared& mine = reinterpret_cast<Shared*>(shared)[threadIdx.x / 32];
  const int lane = threadIdx.x % 32;
  const i64 first_token = ((i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) * TOKENS;
  const int here = (int)min((i64)TOKENS, tokens - first_token);  // the last warp may have fewer, or none
  if (here <= 0) return;
  const int d_end = (int)size, chunks = (d_end + CHUNK - 1) / CHUNK;

  const grad_in* right[TOKENS];
  const bf16 *left[TOKENS], *last[TOKENS];  // r0 .. r3, y
#pragma unroll
  for (int t = 0; t < TOKENS; ++t) {
    const i64 token = first_token + min(t, here - 1);
    right[t] = Lanes<grad_in>::place(grad + token * grad_row, grad_stream);
    left[t] = Lanes<bf16>::place(residual + token * residual_row, residual_stream);
    last[t] = Lanes<bf16>::place(sublayer + token * sublayer_row, 0);
  }
  auto copy = [&](int k) {
    Stage& stage = mine.stage[k % STAGES];
    const int d = k * CHUNK, column = Lanes<bf16>::column();
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
      const int end = t < here ? d_end : 0;
      copy_rows(stage.right[t], right[t], grad_stream, d, end);
      if (grad_comb != nullptr) copy_rows(stage.left[t], left[t], residual_stream, d, end);
      if (grad_post != nullptr && Lanes<bf16>::row() == 0) copy16(&stage.left[t][H][column], last[t] + d, d + column, end);
    }
  };

  if (lane < here) {
    const i64 token = first_token + lane;
    if (grad_residual != nullptr) {
#pragma unroll
      for (int i = 0; i < H; ++i) mine.comb[lane][i] = weights(comb + token * comb_row + i * comb_stream);
    }
    if (grad_sublayer != nullptr) mine.post[lane] = weights(post + token * post_row);
  }
#pragma unroll
  for (int k = 0; k < STAGES - 1; ++k) {
    if (k < chunks) copy(k);
    copies_commit();
  }

  const int slot = lane / LANES, row = lane % LANES / (H / CHAINS), column = lane % (H / CHAINS) * CHAINS;
  float acc[CHAINS] = {};
  for (int k = 0; k < chunks; ++k) {
    copies_wait<STAGES - 2>();
    __syncwarp();  // chunk k is there for all lanes, and all lanes are done with chunk k - 1
    if (k + STAGES - 1 < chunks) copy(k + STAGES - 1);
    copies_commit();
    const Stage& stage = mine.stage[k % STAGES];

    const int d = k * CHUNK + lane * 4;
    if ((grad_residual != nullptr || grad_sublayer != nullptr) && d < d_end) {
#pragma unroll
      for (int t = 0; t < TOKENS; ++t) {
        if (t >= here) break;
        const i64 token = first_token + t;
        Floats<4> g[H];
#pragma unroll
        for (int j = 0; j < H; ++j) g[j] = widen4(load4_raw<8>(stage.right[t][j], lane * 4, CHUNK));
        if (grad_residual != nullptr) {
          Weights c[H];
#pragma unroll
          for (int i = 0; i < H; ++i) c[i] = mine.comb[t][i];
#pragma unroll
          for (int i = 0; i < H; ++i) store<VEC, 4>(grad_residual + (token * H + i) * size, d, d_end, tree4(c[i], g));
        }
        if (grad_sublayer != nullptr) store<VEC, 4>(grad_sublayer + token * size, d, d_end, tree4(mine.post[t], g));
      }
    }

    // Idle lanes stay out: their accesses would cost.
    if (slot < TOKENS) fold(acc, stage.left[slot][row], &stage.right[slot][column], min(CHUNK, d_end - k * CHUNK));
  }

  if (slot >= here) return;
  const i64 token = first_token + slot;
#pragma unroll
  for (int c = 0; c < CHAINS; ++c) {
    if (row < H && grad_comb != nullptr) grad_comb[(token * H + row) * H + column + c] = acc[c];
    if (row == H && grad_post != nullptr) grad_post[token * H + column + c] = acc[c];
  }
}
