// One element at a time.
#pragma once
#include "elements.cuh"

#if ELEMENT == 0
__device__ __forceinline__ float to_float(element value) { return value; }
__device__ __forceinline__ element to_element(float value) { return value; }
#else
__device__ __forceinline__ float to_float(element value) { return low_of(value); }
__device__ __forceinline__ element to_element(float value) { return (element)pair_of(value, 0.0f); }
#endif
