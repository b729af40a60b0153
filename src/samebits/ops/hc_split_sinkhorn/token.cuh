// Reading the tensors of one token. VEC 8 promises that 16-byte accesses are legal, 1 goes element by element.
#pragma once
#include "sinkhorn.cuh"
#include "vectors.cuh"

__device__ __forceinline__ sinkhorn::Matrix matrix_at(const float* rows, i64 row) {
  sinkhorn::Matrix m;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const Floats<4> r = load<VEC, 4>(rows + i * row, 0, 4);
#pragma unroll
    for (int j = 0; j < 4; ++j) m.at[i][j] = r.at[j];
  }
  return m;
}

__device__ __forceinline__ sinkhorn::Logits logits_at(const float* logits) {
  sinkhorn::Logits x;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Floats<4> w = load<VEC, 4>(logits + 4 * half, 0, 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) x.weights[4 * half + i] = w.at[i];
  }
  x.comb = matrix_at(logits + 8, 4);
  return x;
}

// Results are contiguous and start on 16 bytes.
__device__ __forceinline__ void put(float* at, const float (&v)[4]) { *reinterpret_cast<float4*>(at) = make_float4(v[0], v[1], v[2], v[3]); }
