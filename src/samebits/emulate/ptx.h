// One function per PTX instruction that our kernels contain, by its name with underscores; operands in the order of the
// instruction, brackets and braces left out. An instruction that is not here does not compile, and the error names it.
#pragma once
#include <string.h>

#include "runtime.h"
#include "tensor_core.h"

namespace emulate {
inline unsigned bits_of(float f) {
  unsigned u;
  memcpy(&u, &f, 4);
  return u;
}
inline float float_of(unsigned u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}

// To nearest even, NaN to 0x7fff.
inline unsigned short narrowed_to_bf16(float value) {
  if (value != value) return 0x7fff;
  const unsigned u = bits_of(value);
  return (unsigned short)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
inline unsigned short narrowed_to_f16(float value) {
  if (value != value) return 0x7fff;
  const unsigned sign = bits_of(value) >> 16 & 0x8000;
  const float size = __builtin_fabsf(value);
  if (size >= 65520.0f) return (unsigned short)(sign | 0x7c00);
  int exponent = int(bits_of(size) >> 23) - 127;
  if (exponent < -14) exponent = -14;
  const float unit = float_of(unsigned(exponent - 10 + 127) << 23);        // of the last bit that is kept
  const unsigned count = unsigned(__builtin_nearbyintf(size / unit));      // exact but for the rounding to an integer
  return (unsigned short)(sign | (count + (unsigned(exponent + 14) << 10)));  // 1024 and 2048 carry into the exponent
}
inline float widened_from_f16(unsigned short h) {
  const unsigned field = h >> 10 & 31, fraction = h & 1023, sign = unsigned(h & 0x8000) << 16;
  if (field == 31) return float_of(sign | 0x7f800000u | fraction << 13);
  const float size = field ? float(1024 + fraction) * float_of((field - 25 + 127) << 23) : float(fraction) * float_of((127 - 24) << 23);
  return float_of(sign | bits_of(size));
}

// a * b + c, rounded so that a later rounding to fewer bits is the only one that counts: to odd, where it is not exact.
inline float fused_to_odd(float a, float b, float c) {
  const double product = double(a) * double(b);  // exact for numbers of 16 bits
  double sum = product + double(c);
  const double back = sum - product, rest = (product - (sum - back)) + (double(c) - back);
  unsigned long long word;
  memcpy(&word, &sum, 8);
  if (rest != 0 && !(word & 1)) sum = __builtin_nextafter(sum, rest > 0 ? __builtin_inf() : -__builtin_inf());
  const float nearest = float(sum);
  if (double(nearest) == sum || sum != sum || bits_of(nearest) & 1) return nearest;
  return __builtin_nextafterf(nearest, sum > double(nearest) ? __builtin_inff() : -__builtin_inff());
}
}  // namespace emulate

namespace ptx {
using emulate::bits_of;
using emulate::float_of;

// --- conversions and arithmetic ---------------------------------------------------------------------------------------

inline void cvt_rn_bf16_f32(unsigned short& to, float from) { to = emulate::narrowed_to_bf16(from); }
inline void cvt_rn_bf16x2_f32(unsigned& to, float high, float low) {
  to = unsigned(emulate::narrowed_to_bf16(high)) << 16 | emulate::narrowed_to_bf16(low);
}
inline void cvt_f32_f16(float& to, unsigned short from) { to = emulate::widened_from_f16(from); }
inline void cvt_rn_f16_f32(unsigned short& to, float from) { to = emulate::narrowed_to_f16(from); }
inline void cvt_rn_f16x2_f32(unsigned& to, float high, float low) {
  to = unsigned(emulate::narrowed_to_f16(high)) << 16 | emulate::narrowed_to_f16(low);
}
inline void fma_rn_bf16x2(unsigned& to, unsigned a, unsigned b, unsigned c) {
  const auto one = [&](int at) {
    const auto wide = [&](unsigned pair) { return float_of(pair >> at << 16); };
    return unsigned(emulate::narrowed_to_bf16(emulate::fused_to_odd(wide(a), wide(b), wide(c))));
  };
  to = one(16) << 16 | one(0);
}
inline void fma_rn_f16x2(unsigned& to, unsigned a, unsigned b, unsigned c) {
  const auto one = [&](int at) {
    const auto wide = [&](unsigned pair) { return emulate::widened_from_f16((unsigned short)(pair >> at)); };
    return unsigned(emulate::narrowed_to_f16(emulate::fused_to_odd(wide(a), wide(b), wide(c))));
  };
  to = one(16) << 16 | one(0);
}
inline void max_NaN_f32(float& to, float a, float b) { to = a != a || b != b ? float_of(0x7fffffffu) : a > b ? a : b; }

// Within one unit in the last place, as the device's own; subnormals count as zero on both sides.
inline void rcp_approx_ftz_f32(float& to, float from) {
  const float least = float_of(1u << 23);
  const float sign = __builtin_copysignf(1.0f, from);
  const float size = __builtin_fabsf(from);
  const float reciprocal = size < least ? __builtin_inff() : 1.0f / size;
  to = from != from ? float_of(0x7fffffffu) : sign * (reciprocal < least ? 0.0f : reciprocal);
}

// --- memory -----------------------------------------------------------------------------------------------------------

inline void ld_global_L1_no_allocate_v4_u32(unsigned& a, unsigned& b, unsigned& c, unsigned& d, const void* from) {
  if (uintptr_t(from) % 16) emulate::fail("a load of 16 bytes from an address that is not aligned to them");
  const unsigned* const words = static_cast<const unsigned*>(from);
  a = words[0], b = words[1], c = words[2], d = words[3];
}
inline void prefetch_global_L2(const void*) {}
inline void cp_async_cg_shared_global(unsigned to, const void* from, int bytes, int given) {
  emulate::copy_begin(emulate::shared_pointer(to, bytes), static_cast<const char*>(from), bytes, given);
}
inline void cp_async_ca_shared_global(unsigned to, const void* from, int bytes, int given) {
  cp_async_cg_shared_global(to, from, bytes, given);
}
inline void cp_async_commit_group() { emulate::copy_commit(); }
inline void cp_async_wait_group(int pending) { emulate::copy_wait(pending); }

// --- threads that meet ------------------------------------------------------------------------------------------------

inline void bar_sync(int number, int count) { emulate::barrier(number, count); }

template <bool TRANSPOSED>
inline void ldmatrix(unsigned& a, unsigned& b, unsigned& c, unsigned& d, unsigned shared, const char* instruction) {
  emulate::my_warp().in[emulate::lane][0] = shared;
  const unsigned* const mine = emulate::meet(instruction, [](emulate::Warp& warp) {
    unsigned short rows[32][8];
    for (int l = 0; l < 32; ++l) memcpy(rows[l], emulate::shared_pointer(warp.in[l][0], 16), 16);
    for (int l = 0; l < 32; ++l)
      for (int m = 0; m < 4; ++m) {
        const int g = l / 4, q = l % 4;
        const unsigned low = TRANSPOSED ? rows[8 * m + 2 * q][g] : rows[8 * m + g][2 * q];
        const unsigned high = TRANSPOSED ? rows[8 * m + 2 * q + 1][g] : rows[8 * m + g][2 * q + 1];
        warp.out[l][m] = high << 16 | low;
      }
  });
  a = mine[0], b = mine[1], c = mine[2], d = mine[3];
}
inline void ldmatrix_sync_aligned_m8n8_x4_shared_b16(unsigned& a, unsigned& b, unsigned& c, unsigned& d, unsigned shared) {
  ldmatrix<false>(a, b, c, d, shared, "ldmatrix");
}
inline void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(unsigned& a, unsigned& b, unsigned& c, unsigned& d, unsigned shared) {
  ldmatrix<true>(a, b, c, d, shared, "ldmatrix.trans");
}

// D += A B; a lane's words: four of A, two of B, four of C.
template <typename FORMAT>
inline void mma(float& d0, float& d1, float& d2, float& d3, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  unsigned* const in = emulate::my_warp().in[emulate::lane];
  in[0] = a0, in[1] = a1, in[2] = a2, in[3] = a3, in[4] = b0, in[5] = b1;
  in[6] = bits_of(d0), in[7] = bits_of(d1), in[8] = bits_of(d2), in[9] = bits_of(d3);
  const unsigned* const mine = emulate::meet(FORMAT::INSTRUCTION, [](emulate::Warp& warp) {
    emulate::Operand a[16][16], b[8][16];
    for (int l = 0; l < 32; ++l)
      for (int half = 0; half < 2; ++half) {
        const int g = l / 4, k = l % 4 * 2 + half;
        const auto element = [&](int word) { return emulate::operand<FORMAT>((unsigned short)(warp.in[l][word] >> 16 * half)); };
        a[g][k] = element(0), a[g + 8][k] = element(1), a[g][k + 8] = element(2), a[g + 8][k + 8] = element(3);
        b[g][k] = element(4), b[g][k + 8] = element(5);
      }
    for (int l = 0; l < 32; ++l)
      for (int i = 0; i < 4; ++i)
        warp.out[l][i] = bits_of(emulate::add_group(a[l / 4 + i / 2 * 8], b[l % 4 * 2 + i % 2], float_of(warp.in[l][6 + i])));
  });
  d0 = float_of(mine[0]), d1 = float_of(mine[1]), d2 = float_of(mine[2]), d3 = float_of(mine[3]);
}
#define SAMEBITS_MMA(name, format) \
  inline void name(float& d0, float& d1, float& d2, float& d3, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, \
                   unsigned b1, float c0, float c1, float c2, float c3) { \
    d0 = c0, d1 = c1, d2 = c2, d3 = c3; \
    mma<format>(d0, d1, d2, d3, a0, a1, a2, a3, b0, b1); \
  }
SAMEBITS_MMA(mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32, emulate::Bfloat16)
SAMEBITS_MMA(mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32, emulate::Float16)

// The same of 8-bit integers, whose sums are exact; a register holds four of them.
inline void mma_sync_aligned_m16n8k32_row_col_s32_s8_s8_s32(int& d0, int& d1, int& d2, int& d3, unsigned a0, unsigned a1, unsigned a2,
                                                            unsigned a3, unsigned b0, unsigned b1, int c0, int c1, int c2, int c3) {
  unsigned* const in = emulate::my_warp().in[emulate::lane];
  in[0] = a0, in[1] = a1, in[2] = a2, in[3] = a3, in[4] = b0, in[5] = b1;
  in[6] = unsigned(c0), in[7] = unsigned(c1), in[8] = unsigned(c2), in[9] = unsigned(c3);
  const unsigned* const mine = emulate::meet("mma.s8", [](emulate::Warp& warp) {
    const auto element = [&](int l, int word, int k) { return int((signed char)(warp.in[l][word] >> 8 * (k % 4))); };
    for (int l = 0; l < 32; ++l)
      for (int i = 0; i < 4; ++i) {
        unsigned sum = warp.in[l][6 + i];
        for (int k = 0; k < 32; ++k) {
          const int owner = k % 16 / 4, row = 4 * (l / 4) + owner, column = 4 * (l % 4 * 2 + i % 2) + owner;
          sum += unsigned(element(row, k / 16 * 2 + i / 2, k) * element(column, 4 + k / 16, k));
        }
        warp.out[l][i] = sum;
      }
  });
  d0 = int(mine[0]), d1 = int(mine[1]), d2 = int(mine[2]), d3 = int(mine[3]);
}

}  // namespace ptx
