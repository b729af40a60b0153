// grad_gain[n] and grad_bias[n]: left folds over ascending tokens of the terms that backward_controller.cu left, from start or
// +0. A chain lies in memory token after token, `pitch` floats from the next one and with +0 up to there: the `outputs` of
// grad_gain first, then those of grad_bias. A warp folds one: its lanes copy tiles ahead, lane 0 adds. It never waits for
// memory, because in the 4 cycles of an addition it needs 4 bytes.
#pragma once
#include "backward_copies.cuh"
#include "fold.cuh"

constexpr int CHAIN_TILE = 256, CHAIN_STAGES = 4;
constexpr int CHAIN_FLOATS = CHAIN_TILE * CHAIN_STAGES;  // what a warp holds in shared memory

struct Chains {
  const float* terms;
  i64 pitch;
  const float *start_gain, *start_bias;
  float *grad_gain, *grad_bias;
  i64 rows, outputs;
};

__device__ __forceinline__ void fold_chain(const Chains& all, i64 chain, float* held) {
  const bool gain = chain < all.outputs;
  const i64 n = gain ? chain : chain - all.outputs;
  const float* const terms = all.terms + chain * all.pitch;
  const float* const start = gain ? all.start_gain : all.start_bias;
  const int lane = threadIdx.x % 32;
  const auto fetch = [&](i64 tile) {
    float* const to = held + tile % CHAIN_STAGES * CHAIN_TILE;
#pragma unroll
    for (int at = lane * 4; at < CHAIN_TILE; at += 128) copy16_async<8>(to + at, terms, tile * CHAIN_TILE + at, all.rows);
    copies_commit();
  };
#pragma unroll 1
  for (int s = 0; s < CHAIN_STAGES - 1; ++s) fetch(s);
  float acc = start == nullptr ? 0.0f : add(0.0f, start[n]);  // so it is never -0, and +0 behind the last term changes nothing
  for (i64 k = 0; k * CHAIN_TILE < all.rows; ++k) {
    copies_wait<CHAIN_STAGES - 2>();
    __syncwarp();  // tile k is there for lane 0, and lane 0 has finished with the one before it
    fetch(k + CHAIN_STAGES - 1);
    if (lane == 0)
      acc = fold<16>(acc, held + k % CHAIN_STAGES * CHAIN_TILE, padded((int)min((i64)CHAIN_TILE, all.rows - k * CHAIN_TILE), 16));
  }
  copies_wait<0>();
  if (lane == 0) (gain ? all.grad_gain : all.grad_bias)[n] = acc;
}
