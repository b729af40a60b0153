// Eight consecutive elements at a time: 16-byte accesses where the caller says everything is aligned, else one by one.
// V (8 or 1) is that promise; the values, and so the bits, do not depend on it.
#pragma once
#include "numbers.cuh"

struct Float8 {
  float at[8];
};

__device__ __forceinline__ Float8 widen8(uint4 raw) {
  Float8 f;
  const unsigned pair[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    f.at[2 * i] = widen_low(pair[i]);
    f.at[2 * i + 1] = widen_high(pair[i]);
  }
  return f;
}

__device__ __forceinline__ uint4 narrow8(const Float8& f) {
  return make_uint4(narrow_pair(f.at[0], f.at[1]), narrow_pair(f.at[2], f.at[3]), narrow_pair(f.at[4], f.at[5]),
                    narrow_pair(f.at[6], f.at[7]));
}

// Elements first .. first+7 of a row of `size`; those past the end are +0.
template <int V>
__device__ __forceinline__ uint4 load8_raw(const bf16* row, int first, int size) {
  if constexpr (V == 8) {
    return first < size ? *reinterpret_cast<const uint4*>(row + first) : make_uint4(0, 0, 0, 0);
  } else {
    unsigned pair[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const unsigned low = first + 2 * i < size ? row[first + 2 * i] : 0;
      const unsigned high = first + 2 * i + 1 < size ? row[first + 2 * i + 1] : 0;
      pair[i] = low | high << 16;
    }
    return make_uint4(pair[0], pair[1], pair[2], pair[3]);
  }
}

template <int V>
__device__ __forceinline__ Float8 load8(const bf16* row, int first, int size) {
  return widen8(load8_raw<V>(row, first, size));
}

template <int V>
__device__ __forceinline__ Float8 load8(const float* row, int first, int size) {
  Float8 f = {};
  if constexpr (V == 8) {
    if (first < size) {
      const float4 a = *reinterpret_cast<const float4*>(row + first);
      const float4 b = *reinterpret_cast<const float4*>(row + first + 4);
      f = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) f.at[i] = first + i < size ? row[first + i] : 0.0f;
  }
  return f;
}

template <int V>
__device__ __forceinline__ void store8_raw(bf16* row, int first, int size, uint4 raw) {
  if constexpr (V == 8) {
    if (first < size) *reinterpret_cast<uint4*>(row + first) = raw;
  } else {
    const unsigned pair[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (first + i < size) row[first + i] = (bf16)(pair[i / 2] >> (i % 2 * 16));
  }
}

template <int V>
__device__ __forceinline__ void store8(bf16* row, int first, int size, const Float8& f) {
  store8_raw<V>(row, first, size, narrow8(f));
}

template <int V>
__device__ __forceinline__ void store8(float* row, int first, int size, const Float8& f) {
  if constexpr (V == 8) {
    if (first < size) {
      *reinterpret_cast<float4*>(row + first) = make_float4(f.at[0], f.at[1], f.at[2], f.at[3]);
      *reinterpret_cast<float4*>(row + first + 4) = make_float4(f.at[4], f.at[5], f.at[6], f.at[7]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (first + i < size) row[first + i] = f.at[i];
  }
}
