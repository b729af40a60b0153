// The gradient of weight: left folds of the partials of all tiles from +0, a thread per column and a block for eight of them. The
// block reads CHUNK tiles at a time, the next ones while these are added. `own`: the element type, else FP32.
#include "elements.cuh"

constexpr int THREADS = 256, CHUNK = 512, AHEAD = 8;
constexpr int EACH = CHUNK * 2 / THREADS;  // vectors of four that a thread reads of a chunk

extern "C" __global__ void __launch_bounds__(THREADS)
    fold_weight(const float* partials, void* grad_weight, i64 own, i64 tiles, i64 columns, i64 size) {
  __shared__ __align__(16) float held[2][8][CHUNK + 4];  // so that the two halves are in other banks
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
    for (int i = 0; i < EACH; ++i) {
      float* const to = &held[stage][half * 4][(i * THREADS + threadIdx.x) / 2];
      to[0] = next.at[i].x, to[CHUNK + 4] = next.at[i].y, to[2 * (CHUNK + 4)] = next.at[i].z, to[3 * (CHUNK + 4)] = next.at[i].w;
    }
    if (base + CHUNK < tiles) next = fetch(base + CHUNK);
    __syncthreads();  // one is enough: the next turn writes elsewhere
    if (threadIdx.x < 8) {
      const float4* const terms = reinterpret_cast<const float4*>(held[stage][threadIdx.x]);
      const int count = (int)(tiles - base < CHUNK ? tiles - base : CHUNK);
      float4 ready[AHEAD];
#pragma unroll
      for (int k = 0; k < AHEAD; ++k) ready[k] = terms[k];
#pragma unroll 1
      for (int i = AHEAD; i * 4 < count + AHEAD * 4; i += AHEAD) {
        float4 later[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) later[k] = terms[min(i, CHUNK / 4 - AHEAD) + k];
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) {  // +0 past the end changes no sum that began at +0
          acc = add(add(add(add(acc, ready[k].x), ready[k].y), ready[k].z), ready[k].w);
          ready[k] = later[k];
        }
      }
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
