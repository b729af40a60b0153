// The device language of our kernels, as C++ for a CPU: what a kernel's source finds without including anything.
#pragma once
#include <utility>

#include "ptx.h"

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __restrict__
#define __shared__ static __attribute__((section("samebits_shared")))
#define __builtin_assume(condition) \
  do { \
    if (!(condition)) emulate::fail("%s:%d: assumed, but not so: %s", __FILE__, __LINE__, #condition); \
  } while (0)
#define __CUDA_ARCH__ 900

#define threadIdx emulate::thread_index
#define blockIdx emulate::block_index
#define blockDim emulate::block_size
#define gridDim emulate::grid_size

// --- vectors ----------------------------------------------------------------------------------------------------------

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// --- arithmetic: IEEE, to nearest even, nothing contracted ------------------------------------------------------------

inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline unsigned __float_as_uint(float f) { return emulate::bits_of(f); }
inline float __uint_as_float(unsigned u) { return emulate::float_of(u); }
inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
#define fabsf __builtin_fabsf

// The elementary functions of a device are its own; here they are the correctly rounded ones, and the reference takes the same.
#define rsqrtf emulate::rounded_rsqrt
#define expf emulate::rounded_exp
inline void sincosf(float x, float* sine, float* cosine) { *sine = emulate::rounded_sin(x), *cosine = emulate::rounded_cos(x); }

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline long long max(long long a, long long b) { return a > b ? a : b; }

// Byte i of the result is byte (selector >> 4 i) % 8 of b:a.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const unsigned long long both = (unsigned long long)b << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= unsigned(both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return result;
}

// --- memory -----------------------------------------------------------------------------------------------------------

template <typename T>
T __ldcs(const T* from) {
  return *from;
}
inline size_t __cvta_generic_to_shared(const void* pointer) { return emulate::shared_address(pointer); }

// --- threads that meet ------------------------------------------------------------------------------------------------

inline void __syncthreads() { emulate::barrier(0, 0); }

namespace emulate {
inline const unsigned* meet_all(unsigned mask, const char* instruction, Meeting meeting) {
  if (mask != 0xffffffffu) fail("%s is emulated for whole warps, not for the lanes %08x", instruction, mask);
  return meet(instruction, meeting);
}
template <int FROM(int lane, int by)>
float shuffle(unsigned mask, float value, int by, const char* instruction) {
  unsigned* const mine = my_warp().in[lane];
  mine[0] = bits_of(value), mine[1] = unsigned(by);
  return float_of(*meet_all(mask, instruction, [](Warp& warp) {
    for (int l = 0; l < WARP; ++l) warp.out[l][0] = warp.in[FROM(l, int(warp.in[l][1])) % WARP][0];
  }));
}
inline int across(int lane, int by) { return lane ^ by; }
inline int further(int lane, int by) { return lane + by < WARP ? lane + by : lane; }
}  // namespace emulate

inline float __shfl_xor_sync(unsigned mask, float value, int lanes) {
  return emulate::shuffle<emulate::across>(mask, value, lanes, "__shfl_xor_sync");
}
inline float __shfl_down_sync(unsigned mask, float value, int lanes) {
  return emulate::shuffle<emulate::further>(mask, value, lanes, "__shfl_down_sync");
}
inline unsigned __shfl_sync(unsigned mask, unsigned value, int from, int width) {
  unsigned* const mine = emulate::my_warp().in[emulate::lane];
  mine[0] = value, mine[1] = unsigned(from % width + emulate::lane / width * width);
  return *emulate::meet_all(mask, "__shfl_sync", [](emulate::Warp& warp) {
    for (int l = 0; l < emulate::WARP; ++l) warp.out[l][0] = warp.in[warp.in[l][1]][0];
  });
}
inline unsigned __ballot_sync(unsigned mask, bool holds) {
  emulate::my_warp().in[emulate::lane][0] = holds;
  return *emulate::meet_all(mask, "__ballot_sync", [](emulate::Warp& warp) {
    unsigned all = 0;
    for (int l = 0; l < emulate::WARP; ++l) all |= (warp.in[l][0] & 1) << l;
    for (auto& out : warp.out) out[0] = all;
  });
}
inline void __syncwarp(unsigned mask = 0xffffffffu) {
  emulate::meet_all(mask, "__syncwarp", [](emulate::Warp&) {});
}

// --- a kernel, to be called -------------------------------------------------------------------------------------------

namespace emulate {

// What an argument must be: a pointer, an integer or a float, and of how many bytes.
struct Parameter {
  char kind;
  int size;
};
template <typename T>
struct Described {
  static constexpr Parameter value = {T(0.5f) == T(0) ? 'i' : 'f', sizeof(T)};
};
template <typename T>
struct Described<T*> {
  static constexpr Parameter value = {'p', sizeof(T*)};
};

template <typename>
struct Kernel;
template <typename... A>
struct Kernel<void(A...)> {
  static constexpr int COUNT = sizeof...(A);
  static constexpr Parameter PARAMETERS[COUNT] = {Described<A>::value...};
  template <void CODE(A...), size_t... I>
  static void call(void** given, std::index_sequence<I...>) {
    CODE(*static_cast<A*>(given[I])...);
  }
  template <void CODE(A...)>
  static void body(void** given) {
    call<CODE>(given, std::make_index_sequence<COUNT>());
  }
};

struct Entry {
  Body body;
  const Parameter* parameters;
  int count, most_threads;
  char *static_begin, *static_end;
};

constexpr int first_of(int first, int = 0, int = 0) { return first; }

}  // namespace emulate

extern "C" __attribute__((weak, visibility("hidden"))) char __start_samebits_shared[], __stop_samebits_shared[];

#define SAMEBITS_ENTRY(code, threads) \
  extern "C" const emulate::Entry samebits_entry = { \
      emulate::Kernel<decltype(code)>::body<code>, emulate::Kernel<decltype(code)>::PARAMETERS, emulate::Kernel<decltype(code)>::COUNT, \
      threads, __start_samebits_shared, __stop_samebits_shared}
