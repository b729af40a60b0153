// Value and gate of a row to the gated value and back, eight columns at a time; rd rounds to the element type.
//
//   y       = rd(value * rd(silu(gate)))                    silu(g) = g / (1 + exp(-g))
//   d_value = rd(grad * rd(silu(gate)))
//   d_gate  = rd((rd(grad * value) * s) * fma(gate, 1 - s, 1))    s = 1 / (1 + exp(-gate))
//
// The fused multiply-add is that of torch's own kernel for the derivative of SiLU, which is compiled with contraction.
#pragma once
#include "elements.cuh"

// Which row of how many columns, and where this thread starts in it; `stride` columns lie between its vectors.
struct Place {
  i64 row;
  int first, stride, size;
};

// `lanes` threads share a slab of a row, `blockIdx.y` counts slabs.
__device__ __forceinline__ Place place_of(i64 size, i64 lanes, int hold) {
  const int width = (int)lanes, lane = threadIdx.x % width;
  const i64 row = (i64)blockIdx.x * (blockDim.x / width) + threadIdx.x / width;
  return {row, ((int)blockIdx.y * hold * width + lane) * 8, width * 8, (int)size};
}

__device__ __forceinline__ Floats<8> product(Floats<8> a, const Floats<8>& b) {
#pragma unroll
  for (int e = 0; e < 8; ++e) a.at[e] = mul(a.at[e], b.at[e]);
  return a;
}

// 1 + exp(-gate)
__device__ __forceinline__ Floats<8> below_the_gate(Floats<8> gate) {
#pragma unroll
  for (int e = 0; e < 8; ++e) gate.at[e] = add(1.0f, expf(-gate.at[e]));
  return gate;
}

// rd(silu(gate))
__device__ __forceinline__ Floats<8> silu(Floats<8> gate, const Floats<8>& below) {
#pragma unroll
  for (int e = 0; e < 8; ++e) gate.at[e] = __fdiv_rn(gate.at[e], below.at[e]);
  return rounded(gate);
}

// (grad * s) * fma(gate, 1 - s, 1)
__device__ __forceinline__ Floats<8> through_silu(Floats<8> grad, const Floats<8>& gate, const Floats<8>& below) {
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const float s = __fdiv_rn(1.0f, below.at[e]);
    grad.at[e] = mul(mul(grad.at[e], s), __fmaf_rn(gate.at[e], sub(1.0f, s), 1.0f));
  }
  return grad;
}
