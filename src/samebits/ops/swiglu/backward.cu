// The gradients of value and gate, side by side as the two stand in x. Threads as in forward.cu.
#include "activation.cuh"

extern "C" __global__ void __launch_bounds__(256)
    backward(const element* grad, i64 grad_row, const element* x, i64 x_row, i64 x_half, element* grad_x, i64 rows, i64 size,
             i64 lanes) {
  const Place at = place_of(size, lanes, HOLD);
  if (at.row >= rows) return;
  const element* const upstream = grad + at.row * grad_row;
  const element* const value = x + at.row * x_row;
  const element* const gate = value + x_half;
  element* const grad_value = grad_x + at.row * 2 * size;
  Raw<8> raw_grad[HOLD], raw_value[HOLD], raw_gate[HOLD];
#pragma unroll
  for (int j = 0; j < HOLD; ++j) {
    const int d = at.first + j * at.stride;
    raw_gate[j] = read_once<VEC, 8>(gate, d, at.size);
    raw_grad[j] = read_once<VEC, 8>(upstream, d, at.size);
    raw_value[j] = read_once<VEC, 8>(value, d, at.size);
  }
#pragma unroll
  for (int j = 0; j < HOLD; ++j) {
    const int d = at.first + j * at.stride;
    const Floats<8> g = widened(raw_gate[j]), below = below_the_gate(g), u = widened(raw_grad[j]);
    write<VEC>(grad_value, d, at.size, narrowed(product(u, silu(g, below))));
    const Floats<8> of_silu = rounded(product(u, widened(raw_value[j])));
    write<VEC>(grad_value + size, d, at.size, narrowed(through_silu(of_silu, g, below)));
  }
}
