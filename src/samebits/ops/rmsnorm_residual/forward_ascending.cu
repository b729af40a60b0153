// Forward, contract "ascending".
// A block takes `block_rows` rows into shared memory, `chunk` columns at a time (all of them unless the row is too long);
// lane i of warp 0 folds row i. Rows lie `chunk + 8` apart, so that the folding lanes read different banks.
// WITHOUT_COPY: x is kept elsewhere (mhc_pre_norm), and residual is not written.
#include "formulas.cuh"

constexpr int PARTS = 4;  // a chunk arrives in four parts, and the fold of a part does not wait for the next

extern "C" __global__ void __launch_bounds__(256, 3)
    forward_ascending(const bf16* x, i64 x_row, const float* gamma, bf16* y, bf16* residual, float* rstd, i64 rows, i64 size,
                      i64 block_rows, i64 chunk, float eps) {
  extern __shared__ __align__(16) bf16 held[];
  __shared__ float rstd_held[32];
  const int pitch = (int)chunk + 8, part = (int)chunk / PARTS, d_end = (int)size;
  const i64 first = blockIdx.x * block_rows;
  const int count = (int)min(block_rows, rows - first);
  float acc = 0.0f;
  for (int base = 0; base < d_end; base += (int)chunk) {
    if (base > 0) __syncthreads();  // the previous chunk has been folded
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
      for (int row = 0; row < count; ++row)
        for (int c = p * part + threadIdx.x * 8; c < (p + 1) * part; c += blockDim.x * 8)
          copy8_async<VEC>(held + row * pitch + c, x + (first + row) * x_row, base + c, d_end);
      copies_commit();
    }
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
      if (p == 0) copies_wait<3>();
      if (p == 1) copies_wait<2>();
      if (p == 2) copies_wait<1>();
      if (p == 3) copies_wait<0>();
      __syncthreads();
      const int here = min(part, d_end - base - p * part);
      if (threadIdx.x < count && here > 0)
        acc = fold<32>(acc, held + threadIdx.x * pitch + p * part, padded(here, 32));
    }
  }
  if (threadIdx.x < count) rstd[first + threadIdx.x] = rstd_held[threadIdx.x] = rstd_of(acc, d_end, eps);
  __syncthreads();
  const bool whole = d_end <= chunk;
  for (int d = threadIdx.x * 8; d < d_end; d += blockDim.x * 8) {
    const Float8 g = load<VEC, 8>(gamma, d, d_end);
#pragma unroll 4
    for (int row = 0; row < count; ++row) {
      const uint4 raw = whole ? *reinterpret_cast<const uint4*>(held + row * pitch + d) : load8_raw<VEC>(x + (first + row) * x_row, d, d_end);
#if !WITHOUT_COPY
      store8_raw<VEC>(residual + (first + row) * size, d, d_end, raw);
#endif
      store8_raw<VEC>(y + (first + row) * size, d, d_end, normalised(raw, rstd_held[row], g));
    }
  }
}
