// grad_residual[i, d] = ((pre[i]*grad_hidden[d]) + (projection leg + RMS leg)) + leg of mhc_post, rounded once to the result.
// The projection leg folds grad_proj[n] * weight[n, (i, d)] over ascending n from +0: fused multiply-adds under RMS 0, else
// each product and each sum rounded. The leg of mhc_post is the 4-tree over j of comb[i, j] * grad_streams[j, d].
//
// A block owns TILE columns of the four streams and every n-th group of TOKENS tokens. A thread owns two columns of two
// streams and keeps their 4*N weights in registers, so that a weight is loaded once for all tokens; what changes from token to
// token comes through shared memory, a group ahead (for a group, the warps of a multiprocessor compute about three times as
// long as memory takes to answer).
// The first `chain_blocks` rows of the grid fold grad_gain and grad_bias meanwhile (chain.cuh), a chain per warp.
// Compile-time choices: VEC; G_BF16 (dtype of grad_hidden); OUT_BF16 (dtype of grad_residual); those of record.cuh.
#include "chain.cuh"
#include "record.cuh"

#if G_BF16
typedef bf16 grad_in;
#else
typedef float grad_in;
#endif
#if OUT_BF16
typedef bf16 grad_out;
#else
typedef float grad_out;
#endif

constexpr int THREADS = 128, BLOCKS = VEC == 8 ? (N <= 8 ? 6 : 3) : (N <= 8 ? 4 : 2);  // as registers allow
constexpr int TILE = 128, TOKENS = 8, STAGES = 2;
constexpr int OWN = 2;  // streams of a thread, and its columns

struct Stage {
  bf16 residual[TOKENS][H][TILE];
#if STREAMS
  bf16 grad_streams[TOKENS][H][TILE];
#endif
  grad_in grad_hidden[TOKENS][TILE];
  float record[TOKENS][RECORD];
};

struct Pair {
  float at[OWN];
};
__device__ __forceinline__ Pair widened(unsigned raw) { return {widen_low(raw), widen_high(raw)}; }
__device__ __forceinline__ unsigned raw_pair(const bf16* shared) { return *reinterpret_cast<const unsigned*>(shared); }
__device__ __forceinline__ Pair pair_at(const bf16* shared) { return widened(raw_pair(shared)); }
__device__ __forceinline__ Pair pair_at(const float* row) {
  const float2 raw = *reinterpret_cast<const float2*>(row);
  return {raw.x, raw.y};
}

// Of `inside` columns (at most two).
__device__ __forceinline__ Pair weights_at(const float* row, int inside) {
  if (VEC == 8) return inside > 0 ? pair_at(row) : Pair{};
  return {inside > 0 ? row[0] : 0.0f, inside > 1 ? row[1] : 0.0f};
}
__device__ __forceinline__ void store_pair(bf16* row, int inside, const Pair& p) {
  if (VEC == 8) {
    if (inside > 0) *reinterpret_cast<unsigned*>(row) = narrow_pair(p.at[0], p.at[1]);
  } else {
    if (inside > 0) row[0] = narrow(p.at[0]);
    if (inside > 1) row[1] = narrow(p.at[1]);
  }
}
__device__ __forceinline__ void store_pair(float* row, int inside, const Pair& p) {
  if (VEC == 8) {
    if (inside > 0) *reinterpret_cast<float2*>(row) = make_float2(p.at[0], p.at[1]);
  } else {
    if (inside > 0) row[0] = p.at[0];
    if (inside > 1) row[1] = p.at[1];
  }
}

__device__ __forceinline__ float continued(float sum, float grad_proj, float weight) {
  return RMS == 0 ? __fmaf_rn(grad_proj, weight, sum) : add(sum, mul(grad_proj, weight));
}

__device__ __forceinline__ float rms_leg(const RmsRow& row, float x) {
  const float scaled = mul(row.factor, x);
  if (RMS == 0) return scaled;
  return mul(row.grad_r, RMS == 1 ? __fdiv_rn(scaled, row.divisor) : mul(scaled, row.divisor));
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    backward_merge(const bf16* residual, i64 residual_row, i64 residual_stream, const grad_in* grad_hidden, i64 hidden_row,
                   const bf16* grad_streams, i64 streams_row, i64 streams_stream, const float* weight, i64 weight_row,
                   const float* record, grad_out* grad_residual, const float* terms, i64 pitch, const float* start_gain,
                   const float* start_bias, float* grad_gain, float* grad_bias, i64 rows, i64 size, i64 chain_blocks,
                   i64 first_chain, i64 chains) {
  __shared__ __align__(16) Stage stages[STAGES];
  if (blockIdx.y < chain_blocks) {
    static_assert(sizeof(stages) >= THREADS / 32 * CHAIN_FLOATS * sizeof(float), "every warp holds the tiles of a chain");
    const int warp = threadIdx.x / 32;
    const i64 chain = ((i64)blockIdx.y * gridDim.x + blockIdx.x) * (THREADS / 32) + warp;
    float* const held = reinterpret_cast<float*>(stages) + warp * CHAIN_FLOATS;
    const Chains all = {terms, pitch, start_gain, start_bias, grad_gain, grad_bias, rows, N};
    if (chain < chains) fold_chain(all, first_chain + chain, held);
    return;
  }
  // Groups of tokens from the last to the first: the end of `residual` is what grad_weight may have left in the L2 cache.
  const int column0 = blockIdx.x * TILE, d_end = (int)size;
  const i64 step = (gridDim.y - chain_blocks) * TOKENS;
  const i64 top = ((rows - 1) / TOKENS - (blockIdx.y - chain_blocks)) * TOKENS;

  // What this thread copies of a group, 16 bytes at a time: of one stream every AHEAD-th token, of grad_hidden every
  // HIDDEN_AHEAD-th, and a piece of the records. The sources move on with every group.
  constexpr int AHEAD = THREADS / (TILE / 8) / H, WIDTH = 16 / sizeof(grad_in), HIDDEN_AHEAD = THREADS / (TILE / WIDTH);
  static_assert(TOKENS % HIDDEN_AHEAD == 0 && TOKENS * RECORD / 4 <= THREADS, "each thread has a piece at most");
  const int stream = threadIdx.x / (TILE / 8) % H, stream_token = threadIdx.x / (TILE / 8) / H, c = threadIdx.x % (TILE / 8) * 8;
  const int hidden_token = threadIdx.x / (TILE / WIDTH), hidden_c = threadIdx.x % (TILE / WIDTH) * WIDTH;
  const bf16* residual_from = residual + (top + stream_token) * residual_row + stream * residual_stream;
#if STREAMS
  const bf16* streams_from = grad_streams + (top + stream_token) * streams_row + stream * streams_stream;
#endif
  const grad_in* hidden_from = grad_hidden + (top + hidden_token) * hidden_row;
  const float* record_from = record + top * RECORD;
  const auto tokens_of = [&](i64 group) {
    const i64 token0 = top - group * step;
    return token0 < 0 ? 0 : (int)min((i64)TOKENS, rows - token0);
  };
  const auto fetch = [&](i64 group) {
    Stage& stage = stages[group % STAGES];
    const int count = tokens_of(group);  // past them everything is +0
#pragma unroll
    for (int t = 0; t < TOKENS; t += AHEAD) {
      const int end = t + stream_token < count ? d_end : 0;
      copy16_async<VEC>(&stage.residual[t + stream_token][stream][c], residual_from + t * residual_row, column0 + c, end);
#if STREAMS
      copy16_async<VEC>(&stage.grad_streams[t + stream_token][stream][c], streams_from + t * streams_row, column0 + c, end);
#endif
    }
#pragma unroll
    for (int t = 0; t < TOKENS; t += HIDDEN_AHEAD)
      copy16_async<VEC>(&stage.grad_hidden[t + hidden_token][hidden_c], hidden_from + t * hidden_row, column0 + hidden_c,
                        t + hidden_token < count ? d_end : 0);
    if (threadIdx.x < TOKENS * RECORD / 4)
      copy16_async<8>(&stage.record[0][0] + threadIdx.x * 4, record_from, threadIdx.x * 4, count * RECORD);
    residual_from -= step * residual_row;
#if STREAMS
    streams_from -= step * streams_row;
#endif
    hidden_from -= step * hidden_row;
    record_from -= step * RECORD;
    copies_commit();
  };
#pragma unroll 1
  for (int s = 0; s < STAGES - 1; ++s) fetch(s);

  const int stream0 = threadIdx.x / (TILE / OWN) * OWN, column = threadIdx.x % (TILE / OWN) * OWN;
  const int inside = d_end - column0 - column;
  const i64 own = stream0 * size + column0 + column;
  Pair w[N][OWN];
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int s = 0; s < OWN; ++s) w[n][s] = weights_at(weight + own + n * weight_row + s * size, inside);

  grad_out* out_group = grad_residual + top * H * size + own;
  for (i64 group = 0; top - group * step >= 0; ++group, out_group -= step * H * size) {
    copies_wait<STAGES - 2>();
    __syncthreads();  // the group is there for all, and all have finished with the one before it
    fetch(group + STAGES - 1);
    const Stage& stage = stages[group % STAGES];
    const int count = tokens_of(group);
    grad_out* out = out_group;
#pragma unroll 1
    for (int t = 0; t < count; ++t, out += H * size) {
      const float* const of = stage.record[t];
      float sum[OWN][OWN] = {};
#pragma unroll
      for (int n = 0; n < N; n += 4) {
        const Floats<4> grad_proj = load<8, 4>(of, n, N);
#pragma unroll
        for (int m = 0; m < 4; ++m)
#pragma unroll
          for (int s = 0; s < OWN; ++s)
#pragma unroll
            for (int e = 0; e < OWN; ++e) sum[s][e] = continued(sum[s][e], grad_proj.at[m], w[n + m][s].at[e]);
      }
      __syncwarp();  // nothing of what follows is loaded any earlier: there are no registers for it
      const RmsRow row = *reinterpret_cast<const RmsRow*>(of + RMS_AT);
      const Pair pre = pair_at(of + PRE_AT + stream0), hidden = pair_at(&stage.grad_hidden[t][column]);
#if STREAMS
      Pair upstream[H];
#pragma unroll
      for (int j = 0; j < H; ++j) upstream[j] = pair_at(&stage.grad_streams[t][j][column]);
#endif
#pragma unroll
      for (int s = 0; s < OWN; ++s) {
        const Pair x = widened(raw_pair(&stage.residual[t][stream0 + s][column]) & row.mask);
        Pair merged;
#pragma unroll
        for (int e = 0; e < OWN; ++e)
          merged.at[e] = add(mul(pre.at[s], hidden.at[e]), add(sum[s][e], rms_leg(row, x.at[e])));
#if STREAMS
        const Floats<H> comb = load<8, H>(of + COMB_AT + (stream0 + s) * H, 0, H);
#pragma unroll
        for (int e = 0; e < OWN; ++e) {
          const float even = add(mul(comb.at[0], upstream[0].at[e]), mul(comb.at[1], upstream[1].at[e]));
          const float odd = add(mul(comb.at[2], upstream[2].at[e]), mul(comb.at[3], upstream[3].at[e]));
          merged.at[e] = add(merged.at[e], add(even, odd));
        }
#endif
        store_pair(out + s * size, inside, merged);
      }
    }
  }
  copies_wait<0>();
}
