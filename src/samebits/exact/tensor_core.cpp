// The chain of samebits.exact.tensor_core on a CPU, LANES outputs of a row at a time.
//
// The quick step adds in FP32 what the model adds in integers. A product of two BF16 or FP16 fits an FP32, and so does its multiple
// by a power of two; the conversion to an integer truncates toward zero. That holds while the largest exponent is between LOWEST
// and HIGHEST: then no product that counts is below the normal FP32, and none is beyond. Everything else, and what does not
// give a normal FP32 or zero, goes through the model itself (tensor_core.h), output by output.
#include "tensor_core.h"

#define INLINE inline __attribute__((always_inline))

namespace {

#ifdef __AVX512F__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
constexpr int GROUP = 16, FRACTION = 25, LOWEST = -96, HIGHEST = 125;
constexpr int COLUMNS = 256;  // of b that are unpacked at a time
constexpr int NEVER = -2048, SPECIAL = 8192;  // exponents: of a zero; of what the quick step must not see

typedef int ints __attribute__((vector_size(4 * LANES)));
typedef float floats __attribute__((vector_size(4 * LANES)));

INLINE ints bits_of(floats f) { return (ints)f; }
INLINE floats floats_of(ints i) { return (floats)i; }
INLINE ints larger(ints a, ints b) { return a > b ? a : b; }

struct Value {
  float value;
  int exponent;
};

INLINE float power_of_two(int exponent) {
  const int bits = (exponent + 127) << 23;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

template <typename FORMAT>
INLINE Value unpacked(unsigned short bits) {
  const int top = (1 << (15 - FORMAT::FRACTION)) - 1, field = bits >> FORMAT::FRACTION & top;
  Value v;
  if (FORMAT::FRACTION == 7) {  // BF16 is the upper half of an FP32, also where both are subnormal
    const unsigned word = unsigned(bits) << 16;
    memcpy(&v.value, &word, 4);
    v.exponent = bits & 0x7fff ? field && field != top ? field - FORMAT::BIAS : SPECIAL : NEVER;
  } else {
    const int low = bits & ((1 << FORMAT::FRACTION) - 1), size = field ? low | 1 << FORMAT::FRACTION : low;
    const int exponent = (field ? field : 1) - FORMAT::BIAS;
    v.value = float(bits & 0x8000 ? -size : size) * power_of_two(exponent - FORMAT::FRACTION);
    v.exponent = field == top ? SPECIAL : size ? exponent : NEVER;
  }
  return v;
}

struct Columns {
  floats value[COLUMNS];
  ints exponent[COLUMNS];
};

// Columns k0 ... of LANES rows of b; zeros beyond rows and columns.
template <typename FORMAT>
INLINE void unpack(Columns& to, const unsigned short* b, long long rows, long long size, long long k0) {
  for (int lane = 0; lane < LANES; ++lane)
    for (int k = 0; k < COLUMNS; ++k) {
      const bool here = lane < rows && k0 + k < size;
      const Value v = unpacked<FORMAT>(here ? b[lane * size + k0 + k] : 0);
      to.value[k][lane] = v.value, to.exponent[k][lane] = v.exponent;
    }
}

// One group of one row and LANES outputs. `left` gets a bit per output that the model itself must compute.
INLINE floats quick_step(const Value* a, const floats* b, const ints* b_exponent, floats acc, unsigned& left) {
  const ints acc_bits = bits_of(acc), acc_field = acc_bits >> 23 & 255;
  const ints zero = {}, none = zero + NEVER;
  ints top = acc_field == 0 ? ((acc_bits & 0x7fffff) == 0 ? none : zero - 126) : acc_field - 127;
  for (int k = 0; k < GROUP; ++k) top = larger(top, b_exponent[k] + a[k].exponent);
  ints slow = (top > HIGHEST) | ((top < LOWEST) & (top > NEVER / 2));
  const ints held = top > HIGHEST ? zero + HIGHEST : larger(top, zero + LOWEST);
  const floats scale = floats_of((FRACTION + 127 - held) << 23);
  ints first = {}, second = __builtin_convertvector(acc * scale, ints);
  for (int k = 0; k < GROUP / 2; ++k) first += __builtin_convertvector(b[k] * a[k].value * scale, ints);
  for (int k = GROUP / 2; k < GROUP; ++k) second += __builtin_convertvector(b[k] * a[k].value * scale, ints);
  const ints sum = first + second, sign = sum >> 31, size = (sum ^ sign) - sign;
  slow |= (~(first ^ second) & (first ^ sum)) >> 31 | size >> 31;  // more than 31 bits
  // Where `size` has e bits more than 24, size >> 24 has e, the first of them set: without these the rest is below half a unit,
  // and the conversion rounds it off.
  const ints kept = bits_of(__builtin_convertvector(size & ~(size >> 24), floats)), field = (kept >> 23) + (held - FRACTION);
  slow |= (size != 0) & ((field < 1) | (field > 254));
  left = 0;
  for (int lane = 0; lane < LANES; ++lane) left |= unsigned(slow[lane]);
  if (left) {
    left = 0;
    for (int lane = 0; lane < LANES; ++lane) left |= slow[lane] ? 1u << lane : 0u;
  }
  return floats_of(size == 0 ? zero : (kept + ((held - FRACTION) << 23)) | (sign & int(1u << 31)));
}

template <typename FORMAT>
float exact_step(const unsigned short* a, const unsigned short* b, long long left, float acc) {
  if (!emulate::operand_of(acc).finite) return acc;
  emulate::Operand one[GROUP], other[GROUP];
  for (int k = 0; k < GROUP; ++k) {
    one[k] = emulate::operand<FORMAT>(k < left ? a[k] : 0);
    other[k] = emulate::operand<FORMAT>(k < left ? b[k] : 0);
  }
  return emulate::add_group(one, other, acc);
}

template <typename FORMAT>
INLINE void chains(float* out, const unsigned short* a, const unsigned short* b, long long m,
                                                  long long n, long long size, long long first, long long last) {
  static thread_local Columns columns;
  Value row[COLUMNS];
  for (long long n0 = first; n0 < last; n0 += LANES) {
    const long long here = last - n0 < LANES ? last - n0 : LANES;
    for (long long k0 = 0; k0 < size; k0 += COLUMNS) {
      unpack<FORMAT>(columns, b + n0 * size, here, size, k0);
      const int count = size - k0 < COLUMNS ? int(size - k0) : COLUMNS;
      for (long long r = 0; r < m; ++r) {
        const unsigned short* const from = a + r * size + k0;
        for (int k = 0; k < COLUMNS; ++k) row[k] = unpacked<FORMAT>(k < count ? from[k] : 0);
        floats acc = {};
        for (int lane = 0; lane < here; ++lane) acc[lane] = out[r * n + n0 + lane];
        for (int k = 0; k < count; k += GROUP) {
          unsigned left;
          const floats before = acc;
          acc = quick_step(row + k, columns.value + k, columns.exponent + k, acc, left);
          for (; left; left &= left - 1) {
            const int lane = __builtin_ctz(left);
            const unsigned short* const other = lane < here ? b + (n0 + lane) * size + k0 + k : from + k;
            acc[lane] = lane < here ? exact_step<FORMAT>(from + k, other, count - k, before[lane]) : 0.0f;
          }
        }
        for (int lane = 0; lane < here; ++lane) out[r * n + n0 + lane] = acc[lane];
      }
    }
  }
}

}  // namespace

// out (m, n) FP32, which holds the starts, += a (m, size) b (n, size)^T for the outputs first .. last-1; all contiguous.
extern "C" void chain_bfloat16(float* out, const unsigned short* a, const unsigned short* b, long long m, long long n, long long size,
                                 long long first, long long last) {
  chains<emulate::Bfloat16>(out, a, b, m, n, size, first, last);
}
extern "C" void chain_float16(float* out, const unsigned short* a, const unsigned short* b, long long m, long long n, long long size,
                                long long first, long long last) {
  chains<emulate::Float16>(out, a, b, m, n, size, first, last);
}
