// One step of a tensor core, as samebits.exact.tensor_core states it, in integers: the 16 products and the accumulator are
// aligned to the largest exponent, each truncated to 25 fractional bits, added exactly, and the sum truncated to FP32.
#pragma once
#include <stdint.h>
#include <string.h>

namespace emulate {

struct Bfloat16 {
  static constexpr int FRACTION = 7, BIAS = 127;
  static constexpr const char* INSTRUCTION = "mma.bf16";
};
struct Float16 {
  static constexpr int FRACTION = 10, BIAS = 15;
  static constexpr const char* INSTRUCTION = "mma.f16";
};

// significand * 2^(exponent - FRACTION of its format); zero takes no part in the alignment.
struct Operand {
  int64_t significand;
  int exponent, fraction;
  bool finite;
};

template <typename FORMAT>
Operand operand(unsigned short bits) {
  const int top = (1 << (15 - FORMAT::FRACTION)) - 1;
  const int field = bits >> FORMAT::FRACTION & top, low = bits & ((1 << FORMAT::FRACTION) - 1);
  const int64_t size = field ? low + (1 << FORMAT::FRACTION) : low;
  return {bits & 0x8000 ? -size : size, (field ? field : 1) - FORMAT::BIAS, FORMAT::FRACTION, field != top};
}

inline Operand operand_of(float value) {
  unsigned bits;
  memcpy(&bits, &value, 4);
  const int field = bits >> 23 & 255, low = bits & 0x7fffff;
  const int64_t size = field ? low + (1 << 23) : low;
  return {bits >> 31 ? -size : size, (field ? field : 1) - 127, 23, field != 255};
}

// value * 2^by toward zero.
inline int64_t shifted(int64_t value, int by) {
  if (!value) return 0;  // `by` may be anything
  if (by >= 0) return value * (int64_t(1) << by);
  return by < -62 ? 0 : value / (int64_t(1) << -by);
}

// sum * 2^unit, truncated toward zero to FP32; infinite beyond.
inline float truncated(int64_t sum, int unit) {
  const unsigned sign = sum < 0 ? 1u << 31 : 0;
  uint64_t size = sum < 0 ? -uint64_t(sum) : uint64_t(sum);
  unsigned bits = 0;
  if (size) {
    int last = 63 - __builtin_clzll(size) - 23;     // the bit of `size` that is the last of 24
    if (last + unit < -149) last = -149 - unit;     // no bit below 2^-149
    size = last >= 64 ? 0 : last >= 0 ? size >> last : size << -last;
    const int field = size >> 23 ? last + unit + 150 : 0;
    bits = field >= 255 ? 0x7f800000u : unsigned(field) << 23 | (unsigned(size) & 0x7fffff);
  }
  bits |= sign;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

// `start` + sum over the 16 products a[k] * b[k].
inline float add_group(const Operand (&a)[16], const Operand (&b)[16], float start) {
  constexpr int FRACTION = 25, DEEPEST = -133, NEVER = -4096;
  const Operand acc = operand_of(start);
  int top = acc.significand ? acc.exponent : NEVER;
  bool finite = acc.finite;
  for (int k = 0; k < 16; ++k) {
    const int exponent = a[k].exponent + b[k].exponent;
    if (a[k].significand && b[k].significand && exponent > top) top = exponent;
    finite = finite && a[k].finite && b[k].finite;
  }
  if (!finite) return __builtin_nanf("");  // not finite; which one is not promised
  if (top == NEVER) return 0.0f;
  if (top < DEEPEST) top = DEEPEST;
  int64_t sum = shifted(acc.significand, FRACTION - acc.fraction - (top - acc.exponent));
  for (int k = 0; k < 16; ++k) {
    const int below = top - a[k].exponent - b[k].exponent;
    sum += shifted(a[k].significand * b[k].significand, FRACTION - a[k].fraction - b[k].fraction - below);
  }
  return truncated(sum, top - FRACTION);
}

}  // namespace emulate
