// Copies of table rows: a warp takes one chunk of one position. UNIT bytes at a time: 16 where that is legal everywhere, else one
// element. Blocks go chunk by chunk, so that the rows which run at the same time share few bytes of the table, and find them in L1.
// A result that nobody wants is null.
#include "guard.cuh"

#if UNIT == 16
typedef uint4 unit;
#elif UNIT == 4
typedef unsigned unit;
#else
typedef unsigned short unit;
#endif

constexpr int AHEAD = 7;  // units of a lane on their way: 5376 columns of 16 bits are 3 times 7 times 32 units
constexpr int WARPS = 8;

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    forward(const unit* table, i64 table_row, i64 table_chunk, const i64* index, i64 index_step, i64 table_rows, unit* out0,
            unit* out1, unit* out2, unit* out3, unit* out4, unit* out5, i64 rows, i64 width, i64 row_blocks) {
  const int lane = threadIdx.x % 32, chunk = (int)(blockIdx.x / row_blocks);
  const i64 row = blockIdx.x % row_blocks * WARPS + threadIdx.x / 32;
  if (row >= rows) return;
  unit* const results[6] = {out0, out1, out2, out3, out4, out5};
  unit* out = nullptr;
#pragma unroll
  for (int c = 0; c < 6; ++c)
    if (c == chunk) out = results[c];
  if (!out) return;
  const unit* const from = table + checked_index(index[row * index_step], table_rows) * table_row + chunk * table_chunk;
  unit* const to = out + row * width;
  for (i64 base = lane; base < width; base += 32 * AHEAD) {
    unit held[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
      if (base + i * 32 < width) held[i] = from[base + i * 32];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
      if (base + i * 32 < width) to[base + i * 32] = held[i];
  }
}
