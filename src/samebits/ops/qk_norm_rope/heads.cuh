// Rows of heads, (position, head) by at most 256 columns: LANES threads share one, 16 up to 128 columns, else 32, and each has
// eight columns. FULL 1: there are LANES * 8 columns, with VEC 8.
//
//   y[j]        = rd(rd(x[j] * c[j]) - rd(x[j + half] * s[j]))                 j < half = rotated / 2
//   y[j + half] = rd(rd(x[j + half] * c[j + half]) + rd(x[j] * s[j + half]))   columns from `rotated` on pass as they are
//
// and for gradients (BACK 1), with what autograd's own additions of zeros do to a minus zero in every column
//
//   d[j]        = rd(rd(g[j] * c[j]) + rd(g[j + half] * s[j + half])) + 0
//   d[j + half] = rd(rd(g[j + half] * c[j + half]) - rd(g[j] * s[j])) + 0
//
// c and s are the angles rounded to the element type; rd rounds to it.
#pragma once
#include "row.cuh"

constexpr int COLUMNS = LANES * 8;  // of a row, with what pads it

// weight * (rstd * x), not yet rounded to the element type.
__device__ __forceinline__ Floats<8> weighted(Floats<8> x, float rstd, const Floats<8>& weight) {
#pragma unroll
  for (int e = 0; e < 8; ++e) x.at[e] = mul(weight.at[e], mul(rstd, x.at[e]));
  return x;
}

// --- element by element, each rounded once ----------------------------------------------------------------------------
//
// A pair of 16-bit numbers in one instruction has the bits of FP32 arithmetic that is then rounded. Products are exact in FP32, but
// for what a product of BF16 has below 2^-149, which is then less than half of the smallest BF16. Sums are rounded to 24 bits in
// between, and from 2 * 11 + 2 bits on such a rounding changes no later one.

#if ELEMENT == 1
constexpr unsigned ONES = 0x3f803f80u, MINUS_ZEROS = 0x80008000u;
__device__ __forceinline__ unsigned fused_pair(unsigned a, unsigned b, unsigned c) {
  unsigned to;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(to) : "r"(a), "r"(b), "r"(c));
  return to;
}
#elif ELEMENT == 2
constexpr unsigned ONES = 0x3c003c00u, MINUS_ZEROS = 0x80008000u;
__device__ __forceinline__ unsigned fused_pair(unsigned a, unsigned b, unsigned c) {
  unsigned to;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(to) : "r"(a), "r"(b), "r"(c));
  return to;
}
#endif

// rd(a * b) and rd(a + b).
__device__ __forceinline__ Raw<8> times(const Raw<8>& a, const Raw<8>& b) {
  Raw<8> to;
#pragma unroll
  for (int w = 0; w < Raw<8>::WORDS; ++w)
#if ELEMENT == 0
    to.at[w] = __float_as_uint(mul(__uint_as_float(a.at[w]), __uint_as_float(b.at[w])));
#else
    to.at[w] = fused_pair(a.at[w], b.at[w], MINUS_ZEROS);  // which changes no product
#endif
  return to;
}

__device__ __forceinline__ Raw<8> plus(const Raw<8>& a, const Raw<8>& b) {
  Raw<8> to;
#pragma unroll
  for (int w = 0; w < Raw<8>::WORDS; ++w)
#if ELEMENT == 0
    to.at[w] = __float_as_uint(add(__uint_as_float(a.at[w]), __uint_as_float(b.at[w])));
#else
    to.at[w] = fused_pair(a.at[w], ONES, b.at[w]);
#endif
  return to;
}

// --- the rotation -----------------------------------------------------------------------------------------------------

// What a column is rotated with. A column that passes is its own partner.
struct Rotation {
  int half, rotated;
  __device__ __forceinline__ int partner(int d) const { return d < half ? d + half : d < rotated ? d - half : d; }
};

// Cosine and signed sine of a thread's columns, rounded. The sign goes through every rounding unchanged.
struct Angles {
  Raw<8> cosine, sine;
};

template <bool Back>
__device__ __forceinline__ Angles read_angles(const float* cosine, const float* sine, int d, const Rotation& by) {
  struct {
    Floats<8> cosine, sine;
  } a = {};
#if VEC == 8  // eight columns are of one kind
  const bool minus = Back ? d >= by.half : d < by.half;
  if (d < by.rotated) {
    a.cosine = load<8, 8>(cosine, d, by.rotated);
    a.sine = load<8, 8>(sine, Back ? by.partner(d) : d, by.rotated);
#pragma unroll
    for (int e = 0; e < 8; ++e) a.sine.at[e] = minus ? -a.sine.at[e] : a.sine.at[e];
  }
#else
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const int column = d + e;
    if (column >= by.rotated) continue;
    a.cosine.at[e] = cosine[column];
    const float s = sine[Back ? by.partner(column) : column];
    a.sine.at[e] = (Back ? column >= by.half : column < by.half) ? -s : s;
  }
#endif
  return {narrowed(a.cosine), narrowed(a.sine)};
}

// Element e of eight, and the bits that it has in its word.
constexpr int BITS = 8 * (int)sizeof(element);
__device__ __forceinline__ unsigned mask_of(int e) { return BITS == 32 ? 0xffffffffu : 0xffffu << (e * BITS % 32); }

// What other threads of a row have of the columns that those of this one are rotated with. The whole warp is here;
// where vectors of eight columns are not rotated alike, `own` is room for the row in shared memory.
__device__ __forceinline__ Raw<8> partners(element* own, const Raw<8>& raw, int d, const Rotation& by) {
  Raw<8> other = {};
#if VEC == 8
#pragma unroll
  for (int w = 0; w < Raw<8>::WORDS; ++w) other.at[w] = __shfl_sync(0xffffffffu, raw.at[w], by.partner(d) / 8, LANES);
#else
  __syncwarp();  // the row before has been read
  write_words(own + d, raw.at);
  __syncwarp();
#pragma unroll
  for (int e = 0; e < 8; ++e) other.at[e * BITS / 32] |= bits_of(own[by.partner(d + e)]) << (e * BITS % 32);
#endif
  return other;
}

// Eight rotated columns, of which `raw` are this thread's.
template <bool Back>
__device__ __forceinline__ Raw<8> rotated(element* own, const Raw<8>& raw, const Angles& a, int d, const Rotation& by) {
  Raw<8> out = plus(times(raw, a.cosine), times(partners(own, raw, d, by), a.sine));
#if VEC == 8
  const bool passes = d >= by.rotated;
#pragma unroll
  for (int w = 0; w < Raw<8>::WORDS; ++w) out.at[w] = passes ? raw.at[w] : out.at[w];
#else
#pragma unroll
  for (int e = 0; e < 8; ++e)
    if (d + e >= by.rotated) out.at[e * BITS / 32] = (out.at[e * BITS / 32] & ~mask_of(e)) | (raw.at[e * BITS / 32] & mask_of(e));
#endif
  return Back ? plus(out, {}) : out;
}
