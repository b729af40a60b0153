// y = rd(value * rd(silu(gate))). `lanes` threads share a slab of a row; each has HOLD vectors of both halves on their way.
#include "activation.cuh"

extern "C" __global__ void __launch_bounds__(256)
    forward(const element* x, i64 x_row, i64 x_half, element* y, i64 rows, i64 size, i64 lanes) {
  const Place at = place_of(size, lanes, HOLD);
  if (at.row >= rows) return;
  const element* const value = x + at.row * x_row;
  const element* const gate = value + x_half;
  Raw<8> raw_value[HOLD], raw_gate[HOLD];
#pragma unroll
  for (int j = 0; j < HOLD; ++j) {
    const int d = at.first + j * at.stride;
    raw_value[j] = read_once<VEC, 8>(value, d, at.size);
    raw_gate[j] = read_once<VEC, 8>(gate, d, at.size);
  }
#pragma unroll
  for (int j = 0; j < HOLD; ++j) {
    const Floats<8> g = widened(raw_gate[j]);
    const Floats<8> result = product(widened(raw_value[j]), silu(g, below_the_gate(g)));
    write<VEC>(y + at.row * size, at.first + j * at.stride, at.size, narrowed(result));
  }
}
