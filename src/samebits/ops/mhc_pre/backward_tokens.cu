// grad_gain and grad_bias alone, a block for each chain: see chain.cuh.
#include "chain.cuh"

extern "C" __global__ void __launch_bounds__(32)
    backward_tokens(const float* terms, i64 pitch, const float* start_gain, const float* start_bias, float* grad_gain,
                    float* grad_bias, i64 rows, i64 outputs, i64 first_chain) {
  __shared__ __align__(16) float held[CHAIN_FLOATS];
  fold_chain({terms, pitch, start_gain, start_bias, grad_gain, grad_bias, rows, outputs}, first_chain + blockIdx.x, held);
}
