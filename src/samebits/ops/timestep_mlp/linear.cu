// y = x @ weight^T + bias, and behind it SiLU where SILU: then `y` takes the sums with their bias, `act` their SiLU.
//
// A warp computes ROWS x COLS results. Its lanes share the sum over k: lane l takes the vectors l, l + 32, ... of four elements.
// So a vector of the weight is read once for ROWS rows, 512 bytes per warp and instruction. A block has `row_warps` warps over
// rows, the others over columns; what they read together comes from L1. AHEAD vectors of each column are on their way at a time.
// STREAM: the weight is read once, and need not stay in L1, where x should.
#include "silu.cuh"

#if STREAM
constexpr int AHEAD = 4;
typedef i64 step_t;
#else
constexpr int AHEAD = 1;
typedef int step_t;  // the planner sees to it that eight rows are less than 2^31 elements apart
#endif

constexpr int OUTPUTS = ROWS * COLS, HELD = OUTPUTS < 32 ? 1 : OUTPUTS / 32;

// p[u] + p[u + HALF] over the lanes, HALF = 16, 8, 4, 2, 1, for N sums at once. While there are several, a lane keeps half of them
// and gives the other half to its partner, so that all of it takes about N exchanges instead of 5 N. Result f of OUTPUTS ends
// up in lane f * 32 / OUTPUTS (and, where OUTPUTS < 32, in the lanes behind it).
template <int N, int HALF>
__device__ __forceinline__ void tree_scattered(float (&p)[N], float (&total)[HELD]) {
  if constexpr (HALF == 0) {
#pragma unroll
    for (int i = 0; i < HELD; ++i) total[i] = p[i];
  } else if constexpr (N > 1) {
    const bool upper = threadIdx.x & HALF;
    float kept[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const float given = upper ? p[i] : p[i + N / 2];
      kept[i] = add(upper ? p[i + N / 2] : p[i], __shfl_xor_sync(0xffffffffu, given, HALF));
    }
    tree_scattered<N / 2, HALF / 2>(kept, total);
  } else {
    p[0] = add(p[0], __shfl_xor_sync(0xffffffffu, p[0], HALF));
    tree_scattered<1, HALF / 2>(p, total);
  }
}

__device__ __forceinline__ Float4 weight4(const float* row, int k, int size) {
#if STREAM && VEC == 8
  if (k >= size) return {};
  const float4 four = __ldcs(reinterpret_cast<const float4*>(row + k));
  return {four.x, four.y, four.z, four.w};
#else
  return load<VEC, 4>(row, k, size);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS)
    linear(const float* x, i64 x_row, const float* weight, i64 weight_row, const float* bias, float* y, float* act, i64 rows,
           i64 columns, i64 size_of_sum, i64 row_warps) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, across = (int)row_warps, size = (int)size_of_sum;
  const i64 row0 = ((i64)blockIdx.x * across + warp % across) * ROWS;
  const i64 column0 = ((i64)blockIdx.y * (THREADS / 32 / across) + warp / across) * COLS;
  if (row0 >= rows || column0 >= columns) return;  // a whole warp leaves; there is no barrier
  float p[OUTPUTS] = {};
  const float *x_here = x + row0 * x_row, *weight_here = weight + column0 * weight_row;
  // Past the last row or column the last one is read again; what comes of it is not stored.
  int last_row = (int)min(rows - 1 - row0, (i64)ROWS), last_column = (int)min(columns - 1 - column0, (i64)COLS);
  for (int first = 0; first < size; first += 128 * AHEAD) {
#if !STREAM
    asm volatile("" : "+r"(last_row), "+r"(last_column));  // addresses are made when they are needed: registers hold sums
#endif
    const int k = first + lane * 4;
    Float4 w[AHEAD][COLS];
#pragma unroll
    for (int a = 0; a < AHEAD; ++a)
#pragma unroll
      for (int c = 0; c < COLS; ++c)
        w[a][c] = weight4(weight_here + min(c, last_column) * (step_t)weight_row, k + a * 128, size);
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
      if (first + a * 128 >= size) break;
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const Float4 here = load<VEC, 4>(x_here + min(r, last_row) * (step_t)x_row, k + a * 128, size);
#pragma unroll
        for (int c = 0; c < COLS; ++c)
#pragma unroll
          for (int e = 0; e < 4; ++e) p[r * COLS + c] = __fmaf_rn(here.at[e], w[a][c].at[e], p[r * COLS + c]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < OUTPUTS; ++i) p[i] = add(p[i], 0.0f);  // -0 becomes +0, so that vectors past the end may be added or not
  float total[HELD];
  tree_scattered<OUTPUTS, 16>(p, total);
  if (OUTPUTS < 32 && lane % (32 / min(OUTPUTS, 32)) != 0) return;
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    const int at = OUTPUTS < 32 ? lane / (32 / min(OUTPUTS, 32)) : lane * HELD + i;
    const i64 row = row0 + at / COLS, column = column0 + at % COLS;
    if (row >= rows || column >= columns) continue;
    const float value = add(total[i], bias[column]);
    y[row * columns + column] = value;
#if SILU
    act[row * columns + column] = silu(value);
#endif
  }
}
