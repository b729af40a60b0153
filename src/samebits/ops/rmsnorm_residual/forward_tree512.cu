// Forward, contract "tree512". HOLD is the number of vectors of a row that a thread keeps in registers; 0 reads the row twice.
#include "formulas.cuh"
#include "tree512.cuh"

extern "C" __global__ void __launch_bounds__(TREE_THREADS)
    forward_tree512(const bf16* x, i64 x_row, const float* gamma, bf16* y, bf16* residual, float* rstd, i64 rows, i64 size,
                            float eps) {
  const int lane = threadIdx.x % LANES, d_end = (int)size;
  const i64 token = (i64)blockIdx.x * BLOCK_ROWS + threadIdx.x / LANES;
  if (token >= rows) return;  // a whole warp leaves together, and rows share no barrier
  const bf16* row = x + token * x_row;
  float p[PARTIALS] = {};
#if HOLD
  uint4 raw[HOLD];
#pragma unroll
  for (int j = 0; j < HOLD; ++j) raw[j] = load8_raw<VEC>(row, (lane + j * LANES) * 8, d_end);
#if HOLD <= 2  // a single row waits for memory once, not twice; more vectors would cost too many registers
  Float8 g[HOLD];
#pragma unroll
  for (int j = 0; j < HOLD; ++j) g[j] = load<VEC, 8>(gamma, (lane + j * LANES) * 8, d_end);
#endif
#pragma unroll
  for (int j = 0; j < HOLD; ++j) p[j % PARTIALS] = fold8(p[j % PARTIALS], square8(raw[j]));
#else
  for (int d = lane * 8; d < d_end; d += 512 * 8)
#pragma unroll
    for (int i = 0; i < PARTIALS; ++i) p[i] = fold8(p[i], square8(load8_raw<VEC>(row, d + i * LANES * 8, d_end)));
#endif
  const float r = rstd_of(tree512(p), d_end, eps);
  if (lane == 0) rstd[token] = r;
#if HOLD
#pragma unroll
  for (int j = 0; j < HOLD; ++j) {
    const int d = (lane + j * LANES) * 8;
    store8_raw<VEC>(residual + token * size, d, d_end, raw[j]);
#if HOLD <= 2
    store8_raw<VEC>(y + token * size, d, d_end, normalised(raw[j], r, g[j]));
#else
    store8_raw<VEC>(y + token * size, d, d_end, normalised(raw[j], r, load<VEC, 8>(gamma, d, d_end)));
#endif
  }
#else
  for (int d = lane * 8; d < d_end; d += LANES * 8) {
    const uint4 raw = load8_raw<VEC>(row, d, d_end);
    store8_raw<VEC>(residual + token * size, d, d_end, raw);
    store8_raw<VEC>(y + token * size, d, d_end, normalised(raw, r, load<VEC, 8>(gamma, d, d_end)));
  }
#endif
}
