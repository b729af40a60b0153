// Contract "fast": a block of 128 threads per token. Thread u is partial u of all 20 chains: it folds columns 4u .. 4u+3 of
// every round of 512, ascending, so every access of a warp is contiguous and nothing is read twice. Then the halving tree
// inside each warp (32 partials) and over the four warps. With UNROLL rounds in flight. Results that are null are not wanted.
#include "mix.cuh"

constexpr int THREADS = 128, ROUND = THREADS * 4, CHAINS = H * H + H;  // chain 4i+j is grad_comb[i, j], 16+j is grad_post[j]

struct Columns {
  decltype(load4_raw<VEC>((const grad_in*)nullptr, 0, 0)) g[H];
  uint2 r[H], y;
};

// One step of the halving tree for N sums at once: of the two lanes that add a pair, each does half of the sums. A lane is
// left with (N + 1) / 2 of them, from `first` on; `count` tells how many of those are real.
template <int N>
__device__ __forceinline__ void tree_step(float (&sum)[CHAINS], int lanes, int& first, int& count) {
  constexpr int KEPT = (N + 1) / 2;
  const bool upper = threadIdx.x & lanes;
#pragma unroll
  for (int n = 0; n < KEPT; ++n) {
    const float low = sum[n], high = n + KEPT < N ? sum[n + KEPT] : 0.0f;
    const float theirs = __shfl_xor_sync(0xffffffffu, upper ? low : high, lanes);
    sum[n] = add(upper ? high : low, theirs);
  }
  first += upper ? KEPT : 0;
  count = upper ? count - KEPT : min(count, KEPT);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    backward_fast(const grad_in* grad, i64 grad_row, i64 grad_stream, const bf16* residual, i64 residual_row, i64 residual_stream,
                  const bf16* sublayer, i64 sublayer_row, const float* comb, i64 comb_row, i64 comb_stream, const float* post,
                  i64 post_row, grad_out* grad_residual, grad_out* grad_sublayer, float* grad_comb, float* grad_post, i64 size) {
  const i64 token = blockIdx.x;
  const int d_end = (int)size, r_end = grad_comb != nullptr ? d_end : 0, y_end = grad_post != nullptr ? d_end : 0;
  const grad_in* g_rows = grad + token * grad_row;
  const bf16* r_rows = residual + token * residual_row;
  const bf16* y_row = sublayer + token * sublayer_row;
  Weights c[H] = {}, p = {};
  if (WANT_RESIDUAL) {
#pragma unroll
    for (int i = 0; i < H; ++i) c[i] = weights(comb + token * comb_row + i * comb_stream);
  }
  if (grad_sublayer != nullptr) p = weights(post + token * post_row);

  float sum[CHAINS] = {};
  for (int base = threadIdx.x * 4; base < d_end; base += ROUND * UNROLL) {
    Columns raw[UNROLL];
#pragma unroll
    for (int n = 0; n < UNROLL; ++n) {
      const int d = base + n * ROUND;
#pragma unroll
      for (int j = 0; j < H; ++j) raw[n].g[j] = load4_raw<VEC>(g_rows + j * grad_stream, d, d_end);
#pragma unroll
      for (int i = 0; i < H; ++i) raw[n].r[i] = load4_raw<VEC>(r_rows + i * residual_stream, d, r_end);
      raw[n].y = load4_raw<VEC>(y_row, d, y_end);
    }
#pragma unroll
    for (int n = 0; n < UNROLL; ++n) {
      const int d = base + n * ROUND;
      Floats<4> g[H];
#pragma unroll
      for (int j = 0; j < H; ++j) g[j] = widen4(raw[n].g[j]);
#pragma unroll
      for (int i = 0; i <= H; ++i) {
        const Floats<4> left = widen4(i < H ? raw[n].r[i % H] : raw[n].y);
#pragma unroll
        for (int j = 0; j < H; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) sum[i * H + j] = add(sum[i * H + j], mul(left.at[e], g[j].at[e]));
      }
      if (WANT_RESIDUAL) {
#pragma unroll
        for (int i = 0; i < H; ++i) store<VEC, 4>(grad_residual + (token * H + i) * size, d, d_end, tree4(c[i], g));
      }
      if (grad_sublayer != nullptr) store<VEC, 4>(grad_sublayer + token * size, d, d_end, tree4(p, g));
    }
  }

  __shared__ float groups[THREADS / 32][CHAINS];
  int first = 0, count = CHAINS;
  tree_step<20>(sum, 16, first, count);
  tree_step<10>(sum, 8, first, count);
  tree_step<5>(sum, 4, first, count);
  tree_step<3>(sum, 2, first, count);
  tree_step<2>(sum, 1, first, count);
  if (count > 0) groups[threadIdx.x / 32][first] = sum[0];
  __syncthreads();
  const int chain = threadIdx.x;
  if (chain >= CHAINS) return;
  const float total = add(add(groups[0][chain], groups[2][chain]), add(groups[1][chain], groups[3][chain]));
  if (chain < H * H && grad_comb != nullptr) grad_comb[token * (H * H) + chain] = total;
  if (chain >= H * H && grad_post != nullptr) grad_post[token * H + chain - H * H] = total;
}
