// grad_x, contract "ascending". A block takes `block_rows` rows of grad_y and x into shared memory, `chunk` columns at a time
// (all of them unless the row is too long). Warp 0 folds, lane i the row i; the other warps turn the rows into terms, one tile
// of TERMS columns ahead of the fold.
#include "formulas.cuh"

constexpr int TERMS = 256;
constexpr int TERMS_PITCH = TERMS + 4;  // the folding lanes read different banks
constexpr int GROUP = 4;                // rows whose loads are in flight together in the output pass

extern "C" __global__ void __launch_bounds__(256, 3)
    backward_x_ascending(const bf16* dy, i64 dy_row, const bf16* skip, i64 skip_row, const bf16* x, i64 x_row, const float* gamma,
                         const float* rstd, i64 rstd_row, grad_out* dx, i64 rows, i64 size, i64 block_rows, i64 chunk) {
  extern __shared__ __align__(16) bf16 held[];
  __shared__ float sum_held[32], rstd_held[32];
  const int pitch = (int)chunk + 8, d_end = (int)size;
  bf16* const dy_held = held;
  bf16* const x_held = held + block_rows * pitch;
  float* const terms = reinterpret_cast<float*>(held + 2 * block_rows * pitch);  // [2][block_rows][TERMS_PITCH]
  const i64 first = blockIdx.x * block_rows;
  const int count = (int)min(block_rows, rows - first);
  const int producers = blockDim.x - 32, producer = threadIdx.x - 32;
  const int column = producer % (TERMS / 8) * 8;  // of every task of this thread: producers is a multiple of TERMS / 8
  float acc = 0.0f;
  for (int base = 0; base < d_end; base += (int)chunk) {
    if (base > 0) __syncthreads();  // the previous chunk has been folded
    const int here = min((int)chunk, d_end - base), tiles = (here + TERMS - 1) / TERMS;
    for (int row = 0; row < count; ++row)
      for (int c = threadIdx.x * 8; c < chunk; c += blockDim.x * 8) {
        copy8_async<VEC>(dy_held + row * pitch + c, dy + (first + row) * dy_row, base + c, d_end);
        copy8_async<VEC>(x_held + row * pitch + c, x + (first + row) * x_row, base + c, d_end);
        if (HAS_RESIDUAL && base + c < d_end) prefetch_l2(skip + (first + row) * skip_row + base + c);  // needed after the fold
      }
    copies_commit();
    copies_wait<0>();
    __syncthreads();
    for (int k = 0; k <= tiles; ++k) {
      if (threadIdx.x >= 32 && k < tiles) {
        const int d = k * TERMS + column;
        const Float8 g = load<VEC, 8>(gamma, base + d, d_end);
        for (int row = producer / (TERMS / 8); row < count && d < chunk; row += producers / (TERMS / 8))
          store<8, 8>(terms + (k % 2 * (int)block_rows + row) * TERMS_PITCH + column, 0, 8,
                      inner_terms(*reinterpret_cast<const uint4*>(dy_held + row * pitch + d),
                                  *reinterpret_cast<const uint4*>(x_held + row * pitch + d), g));
      }
      if (threadIdx.x < count && k > 0)
        acc = fold<16>(acc, terms + ((k - 1) % 2 * (int)block_rows + threadIdx.x) * TERMS_PITCH,
                       padded(min(TERMS, here - (k - 1) * TERMS), 16));
      __syncthreads();
    }
  }
  if (threadIdx.x < count) {
    sum_held[threadIdx.x] = acc;
    rstd_held[threadIdx.x] = rstd[(first + threadIdx.x) * rstd_row];
  }
  __syncthreads();
  // The outer loop goes over columns, so that gamma is read once and the loads of several rows are in flight together.
  const bool whole = d_end <= chunk;
  for (int d = threadIdx.x * 8; d < d_end; d += blockDim.x * 8) {
    const Float8 g = load<VEC, 8>(gamma, d, d_end);
    for (int row0 = 0; row0 < count; row0 += GROUP) {
      uint4 s[GROUP];
#pragma unroll
      for (int i = 0; i < GROUP; ++i)
        if (row0 + i < count) s[i] = skip_raw(skip + (first + row0 + i) * skip_row, d, d_end);
#pragma unroll
      for (int i = 0; i < GROUP; ++i) {
        const int row = row0 + i;
        if (row >= count) break;
        const i64 token = first + row;
        const uint4 dy_raw = whole ? *reinterpret_cast<const uint4*>(dy_held + row * pitch + d) : load8_raw<VEC>(dy + token * dy_row, d, d_end);
        const uint4 x_raw = whole ? *reinterpret_cast<const uint4*>(x_held + row * pitch + d) : load8_raw<VEC>(x + token * x_row, d, d_end);
        store<VEC, 8>(dx + token * size, d, d_end, gradient(dy_raw, x_raw, g, s[i], rstd_held[row], sum_held[row], d_end));
      }
    }
  }
}
