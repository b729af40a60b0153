// Rows of one element type, fixed for a build by ELEMENT: 0 FP32, 1 BF16, 2 FP16. W consecutive elements at a time; V = 8
// promises that accesses as wide as W elements, at most 16 bytes, are legal, V = 1 goes element by element. Elements past the
// end of a row are +0 when read and are not written. The values, and so the bits, depend on neither V nor W.
#pragma once
#include "vectors.cuh"

#if ELEMENT == 0
typedef float element;
#else
typedef unsigned short element;
#endif

// W elements as stored: what is on its way from memory takes few registers.
template <int W>
struct Raw {
  static constexpr int WORDS = W * (int)sizeof(element) / 4;
  unsigned at[WORDS];
};

// --- conversions ------------------------------------------------------------------------------------------------------

#if ELEMENT == 1
__device__ __forceinline__ float low_of(unsigned pair) { return widen_low(pair); }
__device__ __forceinline__ float high_of(unsigned pair) { return widen_high(pair); }
__device__ __forceinline__ unsigned pair_of(float low, float high) { return narrow_pair(low, high); }
#elif ELEMENT == 2
__device__ __forceinline__ float half_to_float(unsigned short h) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(h));
  return value;
}
__device__ __forceinline__ float low_of(unsigned pair) { return half_to_float((unsigned short)pair); }
__device__ __forceinline__ float high_of(unsigned pair) { return half_to_float((unsigned short)(pair >> 16)); }
__device__ __forceinline__ unsigned pair_of(float low, float high) {  // to nearest even; NaN becomes 0x7fff, as torch does on the GPU
  unsigned pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
#endif

template <int W>
__device__ __forceinline__ Floats<W> widened(const Raw<W>& raw) {
  Floats<W> f;
#if ELEMENT == 0
#pragma unroll
  for (int i = 0; i < W; ++i) f.at[i] = __uint_as_float(raw.at[i]);
#else
#pragma unroll
  for (int i = 0; i < W; i += 2) f.at[i] = low_of(raw.at[i / 2]), f.at[i + 1] = high_of(raw.at[i / 2]);
#endif
  return f;
}

template <int W>
__device__ __forceinline__ Raw<W> narrowed(const Floats<W>& f) {
  Raw<W> raw;
#if ELEMENT == 0
#pragma unroll
  for (int i = 0; i < W; ++i) raw.at[i] = __float_as_uint(f.at[i]);
#else
#pragma unroll
  for (int i = 0; i < W; i += 2) raw.at[i / 2] = pair_of(f.at[i], f.at[i + 1]);
#endif
  return raw;
}

// Rounded to the element type, as the model stores it.
template <int W>
__device__ __forceinline__ Floats<W> rounded(const Floats<W>& f) {
#if ELEMENT == 0
  return f;
#else
  return widened(narrowed(f));
#endif
}

// --- memory -----------------------------------------------------------------------------------------------------------

template <int WORDS>
__device__ __forceinline__ void read_words(unsigned (&at)[WORDS], const void* from) {
  if constexpr (WORDS % 4 == 0) {
#pragma unroll
    for (int i = 0; i < WORDS; i += 4) {
      const uint4 four = reinterpret_cast<const uint4*>(from)[i / 4];
      at[i] = four.x, at[i + 1] = four.y, at[i + 2] = four.z, at[i + 3] = four.w;
    }
  } else if constexpr (WORDS == 2) {
    const uint2 two = *reinterpret_cast<const uint2*>(from);
    at[0] = two.x, at[1] = two.y;
  } else {
    at[0] = *reinterpret_cast<const unsigned*>(from);
  }
}

template <int WORDS>
__device__ __forceinline__ void write_words(void* to, const unsigned (&at)[WORDS]) {
  if constexpr (WORDS % 4 == 0) {
#pragma unroll
    for (int i = 0; i < WORDS; i += 4)
      reinterpret_cast<uint4*>(to)[i / 4] = make_uint4(at[i], at[i + 1], at[i + 2], at[i + 3]);
  } else if constexpr (WORDS == 2) {
    *reinterpret_cast<uint2*>(to) = make_uint2(at[0], at[1]);
  } else {
    *reinterpret_cast<unsigned*>(to) = at[0];
  }
}

__device__ __forceinline__ unsigned bits_of(unsigned short h) { return h; }
__device__ __forceinline__ unsigned bits_of(float f) { return __float_as_uint(f); }

// Elements first .. first+W-1 of a row of `size`.
template <int V, int W>
__device__ __forceinline__ Raw<W> read(const element* row, int first, int size) {
  Raw<W> raw = {};
  if constexpr (V == 8) {
    if (first < size) read_words(raw.at, row + first);
  } else {
#pragma unroll
    for (int i = 0; i < W; ++i)
      if (first + i < size) raw.at[i * (int)sizeof(element) / 4] |= bits_of(row[first + i]) << (i * (int)sizeof(element) % 4 * 8);
  }
  return raw;
}

// As `read`, of what is read once: it leaves the room in L1 to what rows share.
template <int V, int W>
__device__ __forceinline__ Raw<W> read_once(const element* row, int first, int size) {
  if constexpr (V == 8 && Raw<W>::WORDS % 4 == 0) {
    Raw<W> raw = {};
    if (first < size) {
#pragma unroll
      for (int i = 0; i < Raw<W>::WORDS; i += 4)
        asm("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
            : "=r"(raw.at[i]), "=r"(raw.at[i + 1]), "=r"(raw.at[i + 2]), "=r"(raw.at[i + 3])
            : "l"(reinterpret_cast<const uint4*>(row + first) + i / 4));
    }
    return raw;
  } else {
    return read<V, W>(row, first, size);
  }
}

template <int V, int W>
__device__ __forceinline__ Floats<W> read_wide(const element* row, int first, int size) {
  return widened(read<V, W>(row, first, size));
}

template <int V, int W>
__device__ __forceinline__ void write(element* row, int first, int size, const Raw<W>& raw) {
  if constexpr (V == 8) {
    if (first < size) write_words(row + first, raw.at);
  } else {
#pragma unroll
    for (int i = 0; i < W; ++i) {
      if (first + i >= size) continue;
#if ELEMENT == 0
      row[first + i] = __uint_as_float(raw.at[i]);
#else
      row[first + i] = (element)(raw.at[i / 2] >> (i % 2 * 16));
#endif
    }
  }
}

template <int V, int W>
__device__ __forceinline__ void write_float(float* row, int first, int size, const Floats<W>& f) {
  if constexpr (V == 8) {
    unsigned at[W];
#pragma unroll
    for (int i = 0; i < W; ++i) at[i] = __float_as_uint(f.at[i]);
    if (first < size) write_words(row + first, at);
  } else {
#pragma unroll
    for (int i = 0; i < W; ++i)
      if (first + i < size) row[first + i] = f.at[i];
  }
}

// A gradient row: FP32, or rounded once to the element type where `own` says so.
template <int V, int W>
__device__ __forceinline__ void write_gradient(void* rows, i64 row, bool own, int first, int size, const Floats<W>& f) {
  if (own)
    write<V>(static_cast<element*>(rows) + row * size, first, size, narrowed(f));
  else
    write_float<V>(static_cast<float*>(rows) + row * size, first, size, f);
}
