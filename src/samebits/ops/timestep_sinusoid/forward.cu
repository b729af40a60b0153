// Features of one frequency of one row: its cosine and its sine. DTYPE of timestep: 0 FP32, 1 BF16, 2 FP16.
#include "timestep.cuh"

extern "C" __global__ void __launch_bounds__(128)
    forward(const timestep_t* timestep, i64 timestep_row, const float* frequencies, float* features, i64 half) {
  const i64 row = blockIdx.x, k = (i64)blockIdx.y * 128 + threadIdx.x;
  if (k >= half) return;
  const float t = widen_timestep(timestep[row * timestep_row]);
  const float argument = mul(t, frequencies[k]);
  float cosine = __uint_as_float(0x7fc00000u), sine = cosine;
  if (t >= 0.0f && t <= 1.0f && fabsf(argument) <= 65536.0f) {
    // From 105615 on, sincosf reduces its argument in local memory. Told that there is no such argument, and in the words of its
    // own comparison, the compiler leaves that branch out; the other one is unchanged.
    __builtin_assume(!(fabsf(argument) >= 105615.0f));
    sincosf(argument, &sine, &cosine);
  }
  float* const out = features + row * 2 * half;
  out[k] = cosine;
  out[half + k] = sine;
}
