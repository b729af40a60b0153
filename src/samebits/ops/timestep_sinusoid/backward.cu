// grad_timestep: a block owns a row. The padded channels c = lane + j * LANES are the registers j of thread `lane`, so the first
// steps of the halving tree are inside a thread, the next between warps, the last in a warp.
// LANES threads share the tree (a power of two up to 256); WIDTH * LANES is the number of channels, padded to a power of two.
#include "tree.cuh"

constexpr int WARPS = LANES < 32 ? 1 : LANES / 32;

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    backward(const float* grad_features, i64 grad_row, const float* frequencies, const float* features, i64 features_row,
             float* grad_timestep, i64 half) {
  const i64 row = blockIdx.x;
  const float* const grad = grad_features + row * grad_row;
  const float* const saved = features + row * features_row;
  const int count = (int)half, lane = threadIdx.x;
  float p[WIDTH];
#pragma unroll
  for (int j = 0; j < WIDTH; ++j) {
    const int c = lane + j * LANES;
    p[j] = 0.0f;
    if (lane < LANES && c < 2 * count) {
      const bool of_cosine = c < count;
      const int k = of_cosine ? c : c - count;
      const float product = mul(grad[c], saved[of_cosine ? count + k : k]);
      p[j] = mul(of_cosine ? -product : product, frequencies[k]);
    }
  }
  float sum = tree_registers(p);
  if constexpr (WARPS > 1) {
    __shared__ float between[WARPS * 32];
    between[lane] = sum;
    __syncthreads();
    float column[WARPS];
#pragma unroll
    for (int w = 0; w < WARPS; ++w) column[w] = between[w * 32 + lane % 32];
    sum = tree_registers(column);
  }
#pragma unroll
  for (int step = (LANES < 32 ? LANES : 32) / 2; step > 0; step /= 2) sum = add(sum, __shfl_xor_sync(0xffffffffu, sum, step));
  if (lane == 0) grad_timestep[row] = sum;
}
