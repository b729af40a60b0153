// One operand of a product, on its way through shared memory to the tensor cores.
//
// An operand has ROWS rows in a tile and a reduction axis s of KS in a stage. In memory either the reduction axis is dense
// (TURNED = false: stored [row][s]) or the rows are (TURNED = true: stored [s][row]); both come in 16-byte pieces of eight
// elements and stay as they are stored, and ldmatrix turns what must be turned.
#pragma once
#include "async.cuh"
#include "elements.cuh"
#include "mma.cuh"

constexpr int KS = 64;  // reduction indices of a stage: four steps of the unit

__device__ __forceinline__ void copy16(element* shared, const element* from, bool here) {
  const int bytes = here ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(from), "r"(bytes) : "memory");
}

template <int ROWS, bool TURNED, int THREADS>
struct Side {
  static constexpr int LINES = TURNED ? KS : ROWS, PIECES = (TURNED ? ROWS : KS) / 8, ELEMENTS = ROWS * KS;
  static constexpr int COPY_LINES = THREADS / PIECES;
  static_assert(PIECES >= 4 && (PIECES & (PIECES - 1)) == 0 && THREADS % PIECES == 0, "a thread keeps its piece of a line");
  static_assert(LINES % COPY_LINES == 0 || LINES < COPY_LINES, "all threads copy the same number of lines, or one at most");
  static_assert(COPY_LINES % (PIECES >= 8 ? 8 : 16) == 0, "all lines of a thread are placed alike");

  // Where a piece lies: eight lines of one piece are in different banks.
  __device__ static __forceinline__ int place(int line, int piece) {
    if constexpr (PIECES >= 8) {
      return 8 * (line * PIECES + (piece ^ line % 8));
    } else {  // two lines share 128 bytes
      const int pair = line / 2;
      return 64 * pair + 8 * ((line % 2 * 4 + piece) ^ pair % 8);
    }
  }

  const element* base;  // some address that may be read, for what is not there
  const element* own;   // this thread's first piece of the stage that is fetched next
  i64 stride, left;     // of a line; reduction indices from that stage on
  int rows;             // of the operand in this tile

  // Rows first ... of an operand of `count` rows and `size` reduction indices.
  __device__ __forceinline__ void open(const element* from, i64 line_stride, i64 first, i64 count, i64 size) {
    const int line = threadIdx.x / PIECES, piece = threadIdx.x % PIECES;
    base = from, stride = line_stride, left = size, rows = (int)min(count - first, (i64)ROWS);
    own = TURNED ? from + line * stride + first + 8 * piece : from + (first + line) * stride + 8 * piece;
  }

  // Whether all rows of this tile are there and are copied in the wide way.
  __device__ __forceinline__ bool whole() const { return VEC == 8 && LINES >= COPY_LINES && rows == ROWS; }

  // Begin the copy of the next stage, all of which is there.
  __device__ __forceinline__ void fetch_whole(element* tile) {
    const element* from = own;
    element* const to = tile + place(threadIdx.x / PIECES, threadIdx.x % PIECES);
#pragma unroll
    for (int i = 0; i < LINES; i += COPY_LINES) {
      copy16(to + i * PIECES * 8, from, true);
      from += COPY_LINES * stride;
    }
    advance();
  }

  // Begin the copy of the next stage; rows and reduction indices that are not there become +0.
  __device__ __forceinline__ void fetch(element* tile) {
    const int line0 = threadIdx.x / PIECES, piece = threadIdx.x % PIECES, here = (int)min(left, (i64)KS);
    const int lines = TURNED ? here : rows, columns = (TURNED ? rows : here) - 8 * piece;
    const element* from = own;
    element* const to = tile + place(line0, piece);
#pragma unroll
    for (int i = 0; i < LINES; i += COPY_LINES) {
      if (LINES >= COPY_LINES || line0 < LINES) {
        const bool there = line0 + i < lines && columns > 0;
        if constexpr (VEC == 8)
          copy16(to + i * PIECES * 8, there ? from : base, there);
        else
          *reinterpret_cast<uint4*>(to + i * PIECES * 8) = load8_raw<1>(there ? from : base, 0, there ? columns : 0);
      }
      from += COPY_LINES * stride;
    }
    advance();
  }

  __device__ __forceinline__ void advance() {
    own += TURNED ? KS * stride : KS;
    left -= KS;
  }

  // 16 rows from `row` on and 16 reduction indices of step `step`, as the A of the instruction.
  __device__ static __forceinline__ FragmentA a(unsigned tile, int row, int step) {
    const int lane = threadIdx.x % 32;
    if constexpr (TURNED)
      return load_a_transposed(tile + 2 * place(16 * step + lane % 8 + lane / 16 * 8, row / 8 + lane / 8 % 2));
    else
      return load_a(tile + 2 * place(row + lane % 16, 2 * step + lane / 16));
  }

  // 16 rows from `row` on as two B: at[0], at[1] of the first eight rows, then of the next. `second` false: twice the first eight.
  __device__ static __forceinline__ FragmentA b(unsigned tile, int row, int step, bool second) {
    const int lane = threadIdx.x % 32, next = second ? lane / 16 : 0;
    if constexpr (TURNED)
      return load_a_transposed(tile + 2 * place(16 * step + lane % 16, row / 8 + next));
    else
      return load_a(tile + 2 * place(row + next * 8 + lane % 8, 2 * step + lane / 8 % 2));
  }
};
