// W consecutive elements at a time, in the widest accesses that V allows: V = 8 promises that 16-byte accesses are legal,
// V = 1 goes element by element. The values, and so the bits, depend on neither.
#pragma once
#include "numbers.cuh"

template <int W>
struct Floats {
  float at[W];
};
typedef Floats<8> Float8;

__device__ __forceinline__ Float8 widen8(uint4 raw) {
  return {widen_low(raw.x), widen_high(raw.x), widen_low(raw.y), widen_high(raw.y),
          widen_low(raw.z), widen_high(raw.z), widen_low(raw.w), widen_high(raw.w)};
}

__device__ __forceinline__ uint4 narrow8(const Float8& f) {
  return make_uint4(narrow_pair(f.at[0], f.at[1]), narrow_pair(f.at[2], f.at[3]), narrow_pair(f.at[4], f.at[5]),
                    narrow_pair(f.at[6], f.at[7]));
}

// Elements first .. first+7 of a row of `size`, unconverted; those past the end are +0.
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

// Elements first .. first+W-1 as FP32; those past the end are +0.
template <int V, int W>
__device__ __forceinline__ Floats<W> load(const bf16* row, int first, int size) {
  if constexpr (V == 8 && W == 8) {
    return widen8(load8_raw<8>(row, first, size));
  } else {
    static_assert(V == 1, "use load4_raw");
    Floats<W> f;
#pragma unroll
    for (int i = 0; i < W; ++i) f.at[i] = first + i < size ? widen(row[first + i]) : 0.0f;
    return f;
  }
}

template <int V, int W>
__device__ __forceinline__ Floats<W> load(const float* row, int first, int size) {
  Floats<W> f = {};
#pragma unroll
  for (int i = 0; i < W; i += 4) {
    if constexpr (V == 8) {
      if (first < size) {
        const float4 four = *reinterpret_cast<const float4*>(row + first + i);
        f.at[i] = four.x, f.at[i + 1] = four.y, f.at[i + 2] = four.z, f.at[i + 3] = four.w;
      }
    } else {
#pragma unroll
      for (int j = i; j < i + 4; ++j)
        if (first + j < size) f.at[j] = row[first + j];
    }
  }
  return f;
}

// Four elements as stored, to be widened when they are used: what is on its way from memory takes few registers.
__device__ __forceinline__ Floats<4> widen4(uint2 raw) {
  return {widen_low(raw.x), widen_high(raw.x), widen_low(raw.y), widen_high(raw.y)};
}
__device__ __forceinline__ Floats<4> widen4(const Floats<4>& f) { return f; }

template <int V>
__device__ __forceinline__ uint2 load4_raw(const bf16* row, int first, int size) {
  if constexpr (V == 8) {
    return first < size ? *reinterpret_cast<const uint2*>(row + first) : make_uint2(0, 0);
  } else {
    unsigned at[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) at[i] = first + i < size ? row[first + i] : 0;
    return make_uint2(at[0] | at[1] << 16, at[2] | at[3] << 16);
  }
}

template <int V>
__device__ __forceinline__ Floats<4> load4_raw(const float* row, int first, int size) {
  return load<V, 4>(row, first, size);
}
template <int V, int W>
__device__ __forceinline__ void store(bf16* row, int first, int size, const Floats<W>& f) {
  if constexpr (V == 8 && W == 8) {
    store8_raw<8>(row, first, size, narrow8(f));
  } else if constexpr (V == 8 && W == 4) {
    if (first < size) *reinterpret_cast<uint2*>(row + first) = make_uint2(narrow_pair(f.at[0], f.at[1]), narrow_pair(f.at[2], f.at[3]));
  } else {
#pragma unroll
    for (int i = 0; i < W; ++i)
      if (first + i < size) row[first + i] = narrow(f.at[i]);
  }
}

template <int V, int W>
__device__ __forceinline__ void store(float* row, int first, int size, const Floats<W>& f) {
#pragma unroll
  for (int i = 0; i < W; i += 4) {
    if constexpr (V == 8) {
      if (first < size) *reinterpret_cast<float4*>(row + first + i) = make_float4(f.at[i], f.at[i + 1], f.at[i + 2], f.at[i + 3]);
    } else {
#pragma unroll
      for (int j = i; j < i + 4; ++j)
        if (first + j < size) row[first + j] = f.at[j];
    }
  }
}
