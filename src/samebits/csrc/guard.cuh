// Device-side assertions: a value that a kernel is about to read by is checked first, and a wrong one ends the kernel with a
// message that names the check. Nothing is read or written by a wrong value, nothing is clamped.
#pragma once
#include "numbers.cuh"

// The driver's own entry point, which prints the message and ends the kernel; no header of the toolkit is needed.
extern "C" __device__ [[noreturn]] void __assertfail(const char* message, const char* file, unsigned line, const char* function,
                                                    size_t char_size);

__device__ __forceinline__ void require(bool holds, const char* what) {
  if (!holds) __assertfail(what, "samebits", 0, "kernel", 1);
}

// A value of an index, 0 .. limit - 1.
__device__ __forceinline__ i64 checked_index(i64 value, i64 limit) {
  require((unsigned long long)value < (unsigned long long)limit, "samebits: 0 <= index && index < rows of the table");
  return value;
}
