// grad_x, contract "tree512". HOLD as in the forward.
#include "formulas.cuh"
#include "tree512.cuh"

extern "C" __global__ void __launch_bounds__(TREE_THREADS)
    backward_x_tree512(const bf16* dy, i64 dy_row, const bf16* skip, i64 skip_row, const bf16* x, i64 x_row,
                               const float* gamma, const float* rstd, i64 rstd_row, grad_out* dx, i64 rows, i64 size) {
  const int lane = threadIdx.x % LANES, d_end = (int)size;
  const i64 token = (i64)blockIdx.x * BLOCK_ROWS + threadIdx.x / LANES;
  if (token >= rows) return;
  const bf16 *dy_of = dy + token * dy_row, *x_of = x + token * x_row;
  const float r = rstd[token * rstd_row];
  float p[PARTIALS] = {};
#if HOLD
  uint4 dy_raw[HOLD], x_raw[HOLD];
#pragma unroll
  for (int j = 0; j < HOLD; ++j) {
    const int d = (lane + j * LANES) * 8;
    dy_raw[j] = load8_raw<VEC>(dy_of, d, d_end);
    x_raw[j] = load8_raw<VEC>(x_of, d, d_end);
  }
#pragma unroll
  for (int j = 0; j < HOLD; ++j)
    p[j % PARTIALS] = fold8(p[j % PARTIALS], inner_terms(dy_raw[j], x_raw[j], load<VEC, 8>(gamma, (lane + j * LANES) * 8, d_end)));
#else
  for (int base = lane * 8; base < d_end; base += 512 * 8)
#pragma unroll
    for (int i = 0; i < PARTIALS; ++i) {
      const int d = base + i * LANES * 8;
      p[i] = fold8(p[i], inner_terms(load8_raw<VEC>(dy_of, d, d_end), load8_raw<VEC>(x_of, d, d_end), load<VEC, 8>(gamma, d, d_end)));
    }
#endif
  const float sum = tree512(p);
  const auto finish = [&](int d, uint4 dy_here, uint4 x_here) {
    const uint4 s = skip_raw(skip + token * skip_row, d, d_end);
    store<VEC, 8>(dx + token * size, d, d_end, gradient(dy_here, x_here, load<VEC, 8>(gamma, d, d_end), s, r, sum, d_end));
  };
#if HOLD
#pragma unroll
  for (int j = 0; j < HOLD; ++j) finish((lane + j * LANES) * 8, dy_raw[j], x_raw[j]);
#else
  for (int d = lane * 8; d < d_end; d += LANES * 8) finish(d, load8_raw<VEC>(dy_of, d, d_end), load8_raw<VEC>(x_of, d, d_end));
#endif
}
