// Results of a warp: 16 rows of an accumulator of wgmma.cuh, each value rounded once, as whole lines.
//
// They pass through shared memory that the warp alone uses: two (D / 64) runs of 16 lines of 128 bytes, BOX_ROWS lines apart, whose
// 16-byte piece p of line l lies at p ^ l % 8, which keeps the banks apart.
#pragma once
#include "elements.cuh"

// `value(i)` is what becomes of c[i]. Row r goes to out + r * stride where r < rows. `scratch` is a multiple of 1024 plus 2048 w.
template <int BOX_ROWS, class Value>
__device__ __forceinline__ void store_rows(unsigned scratch, element* out, i64 stride, int rows, Value value) {
  const int lane = threadIdx.x % 32, quad = lane % 4;
  auto piece = [&](int line, int p) { return scratch + p / 8 * BOX_ROWS * 128 + line * 128 + (p % 8 ^ line % 8) * 16; };
#pragma unroll
  for (int i = 0; i < D / 4; ++i)
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(piece(lane / 4 + i % 2 * 8, i / 2) + quad * 4), "r"(pair_of(value(2 * i), value(2 * i + 1)))
                 : "memory");
  __syncwarp();
#pragma unroll
  for (int i = 0; i < D / 16; ++i) {
    const int line = (i * 32 + lane) / (D / 8), p = (i * 32 + lane) % (D / 8);
    uint4 eight;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(eight.x), "=r"(eight.y), "=r"(eight.z), "=r"(eight.w)
                 : "r"(piece(line, p))
                 : "memory");
    if (line < rows) *reinterpret_cast<uint4*>(out + line * stride + p * 8) = eight;
  }
}
