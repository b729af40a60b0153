// What the kernels are told the dtype of when they run: the upstream gradient, and what the activation is rounded to.
#pragma once
#include "numbers.cuh"

enum Dtype { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };  // as ELEMENT of elements.cuh, and DTYPES of cuda.py

__device__ __forceinline__ float widen_as(unsigned short h, int dtype) {
  if (dtype == BFLOAT16) return widen(h);
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(h));
  return value;
}

__device__ __forceinline__ unsigned short narrow_as(float value, int dtype) {
  if (dtype == BFLOAT16) return narrow(value);
  unsigned short h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(value));
  return h;
}

__device__ __forceinline__ float value_at(const void* base, i64 at, int dtype) {
  if (dtype == FLOAT32) return static_cast<const float*>(base)[at];
  return widen_as(static_cast<const unsigned short*>(base)[at], dtype);
}
