// grad_bias (N) FP32: start, then the fold over ascending rows of grad_y. A block is one warp and has 32 outputs, one of each lane.
//
// VEC 8: the warp copies eight rows of 64 bytes at a time into shared memory, STAGES - 1 stages of ROWS rows ahead, so that a lane
// waits for its own last addition and seldom for memory. VEC 1: a lane reads its column from memory, ROWS rows at a time.
// Compile-time choices: ELEMENT of grad_y; VEC; ROWS, STAGES.
#include "async.cuh"
#include "elements.cuh"

constexpr int COLUMNS = 32, PIECES = COLUMNS / 8, LINES = 32 / PIECES;  // of a copy: 16 bytes a lane

// N terms of a column, of which `here` are there and the others +0, which changes no sum that began at +0. Every load is made: those
// that might be left out would wait for each other.
template <int N, bool WHOLE>
__device__ __forceinline__ float fold(float acc, const element* column, i64 stride, i64 here) {
  element term[N];
#pragma unroll
  for (int i = 0; i < N; ++i) term[i] = column[(WHOLE || i < here ? i : 0) * stride];
#pragma unroll
  for (int i = 0; i < N; ++i) acc = add(acc, WHOLE || i < here ? low_of(term[i]) : 0.0f);
  return acc;
}

extern "C" __global__ void __launch_bounds__(32)
    grad_bias(float* out, const element* grad, i64 grad_row, const float* start, i64 rows, i64 outputs) {
  const int lane = threadIdx.x;
  const i64 n0 = (i64)blockIdx.x * COLUMNS, n = n0 + lane;
  float acc = start && n < outputs ? add(0.0f, start[n]) : 0.0f;
  if constexpr (VEC == 1) {
    const element* column = grad + min(n, outputs - 1);
    i64 left = rows;
#pragma unroll 1
    for (; left >= ROWS; left -= ROWS, column += ROWS * grad_row) acc = fold<ROWS, true>(acc, column, grad_row, ROWS);
    if (left > 0) acc = fold<ROWS, false>(acc, column, grad_row, left);
  } else {
    extern __shared__ __align__(16) element shared[];  // [STAGES][ROWS][COLUMNS]
    const int line = lane / PIECES, piece = lane % PIECES * 8;
    const bool inside = n0 + piece < outputs;
    const element* from = grad + line * grad_row + (inside ? n0 + piece : 0);
    i64 left = rows;  // of those to be copied
    int to = 0, at = 0;
    const auto fetch = [&]() {
      element* const stage = shared + (to * ROWS + line) * COLUMNS + piece;
      const bool whole = left >= ROWS;
      if (whole) {
#pragma unroll
        for (int i = 0; i < ROWS; i += LINES, from += LINES * grad_row) copy8_async<8>(stage + i * COLUMNS, from, 0, inside);
      } else {
#pragma unroll
        for (int i = 0; i < ROWS; i += LINES, from += LINES * grad_row) {
          const bool here = i + line < left;
          copy8_async<8>(stage + i * COLUMNS, here ? from : grad, 0, here && inside);
        }
      }
      left -= ROWS;
      copies_commit();
      to = to + 1 < STAGES ? to + 1 : 0;
    };
#pragma unroll 1
    for (int s = 0; s < STAGES - 1; ++s) fetch();
#pragma unroll 1
    for (i64 t = 0; t < rows; t += ROWS) {
      copies_wait<STAGES - 2>();
      __syncwarp();  // the copies of all lanes are there, and the stage before, which is filled now, is done with
      fetch();
      acc = fold<ROWS, true>(acc, shared + at * ROWS * COLUMNS + lane, COLUMNS, ROWS);
      at = at + 1 < STAGES ? at + 1 : 0;
    }
  }
  if (n < outputs) out[n] = acc;
}
