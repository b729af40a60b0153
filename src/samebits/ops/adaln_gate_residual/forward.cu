// out = rd(residual + rd(gate * y)), row by row, with the row of the gate table that each row names. With ADD 0 the gradient
// rd(gate * y), where y is the upstream gradient; `own` says whether it is rounded to the element type or stays FP32.
// `lanes` threads share a row.
#include "elements.cuh"
#include "guard.cuh"

constexpr int HOLD = 3;  // vectors of eight columns that a thread has on their way

extern "C" __global__ void __launch_bounds__(256)
    forward(const element* residual, i64 residual_row, const element* y, i64 y_row, const element* gate, i64 gate_row,
            const i64* index, i64 index_step, i64 table_rows, void* out, i64 own, i64 rows, i64 size, i64 lanes) {
  const int width = (int)lanes, lane = threadIdx.x % width, d_end = (int)size;
  const i64 row = (i64)blockIdx.x * (blockDim.x / width) + threadIdx.x / width;
  if (row >= rows) return;
  const element* const gate_of = gate + checked_index(index[row * index_step], table_rows) * gate_row;
  for (int base = lane * 8; base < d_end; base += HOLD * width * 8) {
    Raw<8> raw_y[HOLD], raw_gate[HOLD];
#if ADD
    Raw<8> raw_residual[HOLD];
#endif
#pragma unroll
    for (int j = 0; j < HOLD; ++j) {
      const int d = base + j * width * 8;
      raw_y[j] = read_once<VEC, 8>(y + row * y_row, d, d_end);
      raw_gate[j] = read<VEC, 8>(gate_of, d, d_end);
#if ADD
      raw_residual[j] = read_once<VEC, 8>(residual + row * residual_row, d, d_end);
#endif
    }
#pragma unroll
    for (int j = 0; j < HOLD; ++j) {
      const int d = base + j * width * 8;
      Floats<8> p = widened(raw_y[j]);
      const Floats<8> g = widened(raw_gate[j]);
#pragma unroll
      for (int e = 0; e < 8; ++e) p.at[e] = mul(g.at[e], p.at[e]);
#if ADD
      p = rounded(p);
      const Floats<8> r = widened(raw_residual[j]);
#pragma unroll
      for (int e = 0; e < 8; ++e) p.at[e] = add(r.at[e], p.at[e]);
#endif
      write_gradient<VEC>(out, row, own, d, d_end, p);
    }
  }
}
