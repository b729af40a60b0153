// Boxes of attention's tensors, as the tensor maps of hopper.py describe them: rows of one head, D / 64 lines of 128 bytes each.
#pragma once
#include "tma.cuh"
#include "wgmma.cuh"

// 80 columns, beside those of wgmma.cuh.
namespace wgmma {
#define WGMMA_R40 WGMMA_R32 ", %32, %33, %34, %35, %36, %37, %38, %39"
WGMMA_PRODUCT(80, WGMMA_R40, 40, 41, 42, 43, 44, 45, 46, WGMMA_C32(0), WGMMA_C8(32))
}  // namespace wgmma

constexpr int LINE = 128;  // bytes of 64 elements: those of a row are as many lines apart as the box has rows

// Whether a step masks keys, as a type, so that each way has code of its own.
struct Yes { static constexpr bool value = true; };
struct No { static constexpr bool value = false; };

// The box that starts at position `row` of a head. One thread asks; the barrier hears of the bytes.
__device__ __forceinline__ void load_box(unsigned to, const tma::Map& map, unsigned barrier, int row, int head, int batch) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %3, %5, %6}], [%2];" ::"r"(
                   to),
               "l"(&map), "r"(barrier), "r"(0), "r"(row), "r"(head), "r"(batch)
               : "memory");
}

// Line `line` (64 elements) of some queries from `row` on, of some heads each: the map of `heads_of` in hopper.py says of how many.
__device__ __forceinline__ void load_heads(unsigned to, const tma::Map& map, unsigned barrier, int line, int row, int head, int batch) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(
                   to),
               "l"(&map), "r"(barrier), "r"(0), "r"(head), "r"(row), "r"(line), "r"(batch)
               : "memory");
}

// Descriptors of wgmma.cuh, of addresses below 2^18, as those of shared memory are: its mask of the address costs instructions.
__device__ __forceinline__ unsigned long long descriptor(unsigned address, unsigned leading, unsigned stride) {
  return (unsigned long long)(address >> 4) | (unsigned long long)(leading >> 4) << 16 | (unsigned long long)(stride >> 4) << 32 | 1ull << 62;
}
__device__ __forceinline__ unsigned long long k_major(unsigned address) { return descriptor(address, 16, 1024); }
__device__ __forceinline__ unsigned long long mn_major(unsigned address, unsigned box) { return descriptor(address, box, 1024); }
