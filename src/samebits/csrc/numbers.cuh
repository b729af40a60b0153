// BF16 and FP32 values, one rounding per written operation. No header of the toolkit is needed.
#pragma once

typedef unsigned short bf16;
typedef long long i64;

__device__ __forceinline__ float mul(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float sub(float a, float b) { return __fsub_rn(a, b); }

// BF16 is the upper half of an FP32, so widening is exact and costs one integer instruction.
__device__ __forceinline__ float widen(bf16 h) { return __uint_as_float((unsigned)h << 16); }
__device__ __forceinline__ float widen_low(unsigned pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float widen_high(unsigned pair) { return __uint_as_float(pair & 0xffff0000u); }

// Round to nearest even; NaN becomes 0x7fff, as torch does on the GPU.
__device__ __forceinline__ bf16 narrow(float value) {
  bf16 h;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(value));
  return h;
}
__device__ __forceinline__ unsigned narrow_pair(float low, float high) {
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// sum / count with the count of a row. For a power of two the product with the exact reciprocal has the same bits.
__device__ __forceinline__ float divide_by_count(float sum, int count) {
  return (count & (count - 1)) == 0 ? mul(sum, 1.0f / (float)count) : __fdiv_rn(sum, (float)count);
}
