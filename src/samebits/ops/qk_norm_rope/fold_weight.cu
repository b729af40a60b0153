// The gradient of weight: left folds of the partials of all tiles from +0, a thread per column and a block for eight of them. The
// block reads CHUNK tiles at a time, the next ones while these are added. `own`: the element type, else FP32.
#include "elements.cuh"

constexpr int THREADS = 256, CHUNK = 512, AHEAD = 32;
constexpr int EACH = CHUNK * 2 / THREADS;  // vectors of four that a thread reads of a chunk

extern "C" __global__ void __launch_bounds__(THREADS)
    fold_weight(const float* partials, void* grad_weight, i64 own, i64 tiles, i64 columns, i64 size) {
  __shared__ __align__(16) float4 held[2][CHUNK][2];
  const int half = threadIdx.x % 2, column = blockIdx.x * 8 + threadIdx.x;
  const float* const mine = partials + blockIdx.x * 8 + half * 4;
  struct Vectors {
    float4 at[EACH];
  };
  const auto fetch = [&](i64 base) {
    Vectors v;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const i64 tile = base + (i * THREADS + threadIdx.x) / 2;
      v.at[i] = tile < tiles ? *reinterpret_cast<const float4*>(mine + tile * columns) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    return v;
  };
  Vectors next = fetch(0);
  float acc = 0.0f;
#pragma unroll 1
  for (i64 base = 0, stage = 0; base < tiles; base += CHUNK, stage ^= 1) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) held[stage][(i * THREADS + threadIdx.x) / 2][half] = next.at[i];
    if (base + CHUNK < tiles) next = fetch(base + CHUNK);
    __syncthreads();  // one is enough: the next turn writes elsewhere
    if (threadIdx.x < 8) {
      const float* const terms = reinterpret_cast<const float*>(held[stage]) + threadIdx.x;
      const int count = (int)(tiles - base < CHUNK ? tiles - base : CHUNK);
#pragma unroll 1
      for (int i = 0; i < count; i += AHEAD)
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) acc = add(acc, terms[(i + k) * 8]);  // +0 past the end changes no sum that began at +0
    }
  }
  if (threadIdx.x >= 8 || column >= size) return;
#if ELEMENT != 0
  if (own) {
    static_cast<element*>(grad_weight)[column] = (element)pair_of(acc, 0.0f);
    return;
  }
#endif
  static_cast<float*>(grad_weight)[column] = acc;
}
