// grad_x of rows, with MODULATED 1 of modulated ones. LANES threads share a row: 128, or 16 up to 128 columns. HOLD is the number
// of vectors of eight columns that a thread keeps in registers; 0 reads the row twice. `own`: grad_x in the element type.
#include "row.cuh"

constexpr int BLOCK_ROWS = 128 / LANES;
constexpr int STEP = LANES / 32;  // groups of 32 vectors that the threads take at once

extern "C" __global__ void __launch_bounds__(128)
    backward_x(const element* grad, i64 grad_row, const element* x, i64 x_row, const element* weight, const element* scale,
               i64 scale_row, const i64* index, i64 index_step, i64 table_rows, const float* rstd, i64 rstd_row, void* grad_x,
               i64 own, i64 rows, i64 size) {
  const int lane = threadIdx.x % LANES, d_end = (int)size;
  const i64 token = (i64)blockIdx.x * BLOCK_ROWS + threadIdx.x / LANES;
  const bool live = token < rows;
  const i64 here = live ? token : rows - 1;
  const element *const grad_of = grad + here * grad_row, *const x_of = x + here * x_row;
#if MODULATED
  const element* const scale_of = scale + checked_index(index[here * index_step], table_rows) * scale_row;
#endif
  const auto weighted = [&](int d, const Raw<8>& raw_grad) {  // u
    Floats<8> u = widened(raw_grad);
#if MODULATED
    u = product(u, factor_of(read<VEC, 8>(scale_of, d, d_end)));
#endif
    return product(read_wide<VEC, 8>(weight, d, d_end), u);
  };
  float dot = 0.0f;
#if HOLD
  Raw<8> raw_grad[HOLD], raw_x[HOLD];
#pragma unroll
  for (int j = 0; j < HOLD; ++j) {
    const int d = (lane + j * LANES) * 8;
    raw_grad[j] = read_once<VEC, 8>(grad_of, d, d_end);
    raw_x[j] = read_once<VEC, 8>(x_of, d, d_end);
  }
  const float r = rstd[here * rstd_row];
  float part[HOLD];
#pragma unroll
  for (int j = 0; j < HOLD; ++j) part[j] = chain_of(weighted((lane + j * LANES) * 8, raw_grad[j]), widened(raw_x[j]));
#pragma unroll
  for (int half = (LANES < 32 ? LANES : 32) / 2; half > 0; half /= 2)
#pragma unroll
    for (int j = 0; j < HOLD; ++j) part[j] = add(part[j], __shfl_xor_sync(0xffffffffu, part[j], half));
#if LANES == 128
  __shared__ float group[HOLD * STEP];
#pragma unroll
  for (int j = 0; j < HOLD; ++j)
    if (lane % 32 == 0) group[lane / 32 + j * STEP] = part[j];
  __syncthreads();
#pragma unroll
  for (int g = 0; g < HOLD * STEP; ++g) dot = add(dot, group[g]);  // groups past the end are +0
#else
  dot = add(dot, part[0]);
#endif
#else
  __shared__ float group[2][STEP];
  const float r = rstd[here * rstd_row];
  for (int base = 0, turn = 0; base < d_end; base += LANES * 8, turn ^= 1) {
    const int d = base + lane * 8;
    const float part = tree_warp(chain_of(weighted(d, read<VEC, 8>(grad_of, d, d_end)), read_wide<VEC, 8>(x_of, d, d_end)));
    if (lane % 32 == 0) group[turn][lane / 32] = part;
    __syncthreads();  // one is enough: the next turn writes elsewhere
#pragma unroll
    for (int g = 0; g < STEP; ++g) dot = add(dot, group[turn][g]);
  }
#endif
  const float coef = coefficient(r, dot, d_end);
  const auto finish = [&](int d, const Raw<8>& g, const Raw<8>& v) {
    const Floats<8> dx = gradient_of(weighted(d, g), widened(v), r, coef);
    if (live) write_gradient<VEC>(grad_x, token, own, d, d_end, dx);
  };
#if HOLD
#pragma unroll
  for (int j = 0; j < HOLD; ++j) finish((lane + j * LANES) * 8, raw_grad[j], raw_x[j]);
#else
  for (int d = lane * 8; d < d_end; d += LANES * 8) finish(d, read<VEC, 8>(grad_of, d, d_end), read<VEC, 8>(x_of, d, d_end));
#endif
}
