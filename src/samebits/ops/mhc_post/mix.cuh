// What the kernels of mhc_post share. Compile-time choices: VEC 8 or 1 (16-byte accesses); in a backward also G_BF16 (dtype
// of grad_streams) and OUT_BF16 (dtype of grad_residual and grad_sublayer).
#pragma once
#include "vectors.cuh"

constexpr int H = 4;  // streams, old (index i) and new (index j)

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

// Four numbers that a whole token shares.
typedef Floats<H> Weights;
__device__ __forceinline__ Weights weights(const float* row) { return load<VEC, H>(row, 0, H); }

// (w0*v0 + w1*v1) + (w2*v2 + w3*v3)
__device__ __forceinline__ float tree4(const Weights& w, float v0, float v1, float v2, float v3) {
  return add(add(mul(w.at[0], v0), mul(w.at[1], v1)), add(mul(w.at[2], v2), mul(w.at[3], v3)));
}

template <int W>
__device__ __forceinline__ Floats<W> tree4(const Weights& w, const Floats<W> (&v)[H]) {
  Floats<W> sum;
#pragma unroll
  for (int e = 0; e < W; ++e) sum.at[e] = tree4(w, v[0].at[e], v[1].at[e], v[2].at[e], v[3].at[e]);
  return sum;
}

// W columns of a row, widened.
template <int W>
__device__ __forceinline__ Floats<W> columns(const grad_in* row, int d, int size) {
  if constexpr (W == 4) {
    return widen4(load4_raw<VEC>(row, d, size));
  } else {
    return load<VEC, W>(row, d, size);
  }
}
