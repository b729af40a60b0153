// The dtypes of a timestep: DTYPE 0 FP32, 1 BF16, 2 FP16. Widening is exact.
#pragma once
#include "numbers.cuh"

#if DTYPE == 0
typedef float timestep_t;
__device__ __forceinline__ float widen_timestep(float t) { return t; }
#else
typedef unsigned short timestep_t;
__device__ __forceinline__ float widen_timestep(unsigned short t) {
#if DTYPE == 1
  return widen(t);
#else
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(t));
  return wide;
#endif
}
#endif
