// grad_residual[i] = 4-tree over j of comb[i, j]*g_j and grad_sublayer = 4-tree over j of post[j]*g_j, whichever is not null:
// nothing else is wanted, so residual and sublayer are not read. A thread takes COLUMNS columns of one token: eight where both
// sides are BF16, else four, so that the FP32 accesses of a warp are contiguous. blockIdx.x is the token.
#include "mix.cuh"

constexpr int COLUMNS = G_BF16 && OUT_BF16 ? 8 : 4;

extern "C" __global__ void __launch_bounds__(256)
    backward_streams(const grad_in* grad, i64 grad_row, i64 grad_stream, const float* comb, i64 comb_row, i64 comb_stream,
                     const float* post, i64 post_row, grad_out* grad_residual, grad_out* grad_sublayer, i64 size) {
  const i64 token = blockIdx.x;
  const int d = (blockIdx.y * blockDim.x + threadIdx.x) * COLUMNS, d_end = (int)size;
  if (d >= d_end) return;
  const grad_in* upstream = grad + token * grad_row;
  Floats<COLUMNS> g[H];
#pragma unroll
  for (int j = 0; j < H; ++j) g[j] = columns<COLUMNS>(upstream + j * grad_stream, d, d_end);
  if (grad_residual != nullptr) {
#pragma unroll
    for (int i = 0; i < H; ++i) {
      const Weights c = weights(comb + token * comb_row + i * comb_stream);
      store<VEC, COLUMNS>(grad_residual + (token * H + i) * size, d, d_end, tree4(c, g));
    }
  }
  if (grad_sublayer != nullptr) {
    const Weights p = weights(post + token * post_row);
    store<VEC, COLUMNS>(grad_sublayer + token * size, d, d_end, tree4(p, g));
  }
}
