// The exponential of the special-function unit, and the infinity that makes it +0.
#pragma once
#include "elements.cuh"

#define INFINITE __int_as_float(0x7f800000)

__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
