// Boxes of a tensor that travel between global and shared memory by themselves (TMA), the barriers that say when they are there, and
// clusters of blocks (sm_90). Shared memory is named by its 32-bit address (`shared_address` of mma.cuh).
//
// A tensor map is made by runtime/tensor_map.py and is a parameter of the kernel: `const __grid_constant__ tma::Map x`. Coordinates
// count elements, the dense axis first. What lies outside the tensor is +0 when read and is not written; bytes are counted all the
// same. With the 128-byte swizzle a box has lines of 128 bytes, starts at a multiple of 1024, and 16-byte piece p of line l lies at
// piece p ^ l % 8.
#pragma once
#include "numbers.cuh"

namespace tma {

struct alignas(64) Map {
  unsigned long long at[16];
};

// --- barriers ---------------------------------------------------------------------------------------------------------
// A barrier of `count` arrivals and of the bytes that are expected. Phase 0 is the first; `wait(barrier, p)` returns when the phase
// of parity p is over, so on a new barrier wait(barrier, 1) returns at once.

__device__ __forceinline__ void init(unsigned barrier, unsigned count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
// After all inits, before the barrier (of the block, or the cluster) behind which others use them.
__device__ __forceinline__ void init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// One arrival, which also announces so many bytes of boxes.
__device__ __forceinline__ void expect(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// At the barrier of the same name in block `rank` of the cluster.
__device__ __forceinline__ void arrive_at(unsigned barrier, unsigned rank) {
  asm volatile("{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [there];}" ::"r"(
                   barrier),
               "r"(rank)
               : "memory");
}
__device__ __forceinline__ void wait(unsigned barrier, unsigned parity) {
  unsigned over;
  do {
    asm volatile("{.reg .pred over; mbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2; selp.u32 %0, 1, 0, over;}"
                 : "=r"(over)
                 : "r"(barrier), "r"(parity)
                 : "memory");
  } while (!over);
}
// As `wait`, and what other blocks of the cluster did before they arrived is seen.
__device__ __forceinline__ void wait_cluster(unsigned barrier, unsigned parity) {
  unsigned over;
  do {
    asm volatile("{.reg .pred over; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 over, [%1], %2; selp.u32 %0, 1, 0, over;}"
                 : "=r"(over)
                 : "r"(barrier), "r"(parity)
                 : "memory");
  } while (!over);
}

// --- boxes ------------------------------------------------------------------------------------------------------------
// One thread asks. The barrier of this block hears of the bytes.

__device__ __forceinline__ void prefetch(const Map& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

__device__ __forceinline__ void load(unsigned to, const Map& map, unsigned barrier, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
               "l"(&map), "r"(barrier), "r"(x), "r"(y)
               : "memory");
}
__device__ __forceinline__ void load(unsigned to, const Map& map, unsigned barrier, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
               "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z)
               : "memory");
}
__device__ __forceinline__ void load(unsigned to, const Map& map, unsigned barrier, int x, int y, int z, int w) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(
                   to),
               "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
}
// To the same place of every block of the cluster whose bit is set in `blocks`, and to the same barrier of each.
__device__ __forceinline__ void load_to(unsigned to, const Map& map, unsigned barrier, int x, int y, unsigned short blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(
          to),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "h"(blocks)
      : "memory");
}

__device__ __forceinline__ void store(const Map& map, unsigned from, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&map), "r"(from), "r"(x), "r"(y)
               : "memory");
}
__device__ __forceinline__ void store(const Map& map, unsigned from, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map), "r"(from), "r"(x), "r"(y),
               "r"(z)
               : "memory");
}
__device__ __forceinline__ void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until at most PENDING of this thread's groups still read shared memory, or are not yet written.
template <int PENDING>
__device__ __forceinline__ void store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
template <int PENDING>
__device__ __forceinline__ void store_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory");
}
// Each thread that wrote shared memory by ordinary stores, before the barrier behind which a box is stored or multiplied from there.
__device__ __forceinline__ void written_for_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// --- blocks -----------------------------------------------------------------------------------------------------------

// `count` threads (whole warps) of the block meet at barrier `name`, 1 .. 15.
__device__ __forceinline__ void meet(int name, int count) { asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(count) : "memory"); }
// As `meet`, but without waiting for the others.
__device__ __forceinline__ void come(int name, int count) { asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(count) : "memory"); }

__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void cluster_meet() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

}  // namespace tma
