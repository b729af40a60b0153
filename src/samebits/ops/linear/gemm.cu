// All products of this operator: out (r, c) = start + sum over s of A(r, s) B(c, s), every element one chain over ascending s, 16
// at a time, the FP32 accumulator carried through every instruction; then NaN where it is not finite, + 0, + bias, one rounding.
//
// A block takes 16 MT WM rows of A and 8 NT WN rows of B, a warp 16 MT and 8 NT of them. Stages of 64 reduction indices are copied
// STAGES - 1 ahead; where there are registers for it, the fragments of a step are loaded while the one before is multiplied.
// Within a step of 16 the unit adds exactly before it truncates, and a step of zeros changes no sum, so tiles change no bit.
//
//                        A, stored             B, stored             out
//   forward              x [m][k]              weight [n][k]         y [m][n]
//   forward, few rows    weight [n][k]         x [m][k]              y [m][n], crosswise: the weight takes the large side
//   grad_x               grad_y [m][n]         weight [n][k] turned  grad_x [m][k]
//   grad_x, few rows     weight [n][k] turned  grad_y [m][n]         grad_x [m][k], crosswise
//   grad_weight          grad_y [m][n] turned  x [m][k] turned       grad_weight [n][k]
// Compile-time choices: ELEMENT (1 BF16, 2 FP16), TA and TB (turned), CROSS, MT, NT, WM, WN, STAGES, BLOCKS (that share a
// multiprocessor), VEC.
#include "finish.cuh"
#include "side.cuh"

constexpr int ROWS = 16 * MT * WM, COLUMNS = 8 * NT * WN, THREADS = 32 * WM * WN, STEPS = KS / 16;
constexpr int AHEAD = BLOCKS * THREADS <= 384;  // steps whose fragments wait in registers: there are 168 for a thread then, else 128
typedef Side<ROWS, TA, THREADS> SideA;
typedef Side<COLUMNS, TB, THREADS> SideB;
constexpr int STAGE = SideA::ELEMENTS + SideB::ELEMENTS;
static_assert(!TB || NT % 2 == 0, "a turned B comes in pairs of tiles");

__device__ __forceinline__ void multiply_add(FragmentC& c, const FragmentA& a, const FragmentB& b) {
#if ELEMENT == 1
  mma(c, a, b);
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c.at[0]), "+f"(c.at[1]), "+f"(c.at[2]), "+f"(c.at[3])
      : "r"(a.at[0]), "r"(a.at[1]), "r"(a.at[2]), "r"(a.at[3]), "r"(b.at[0]), "r"(b.at[1]));
#endif
}

struct Step {
  FragmentA a[MT];
  FragmentA b[(NT + 1) / 2];  // two B each

  __device__ __forceinline__ void load(unsigned tile, int row, int column, int step) {
#pragma unroll
    for (int i = 0; i < MT; ++i) a[i] = SideA::a(tile, row + 16 * i, step);
#pragma unroll
    for (int i = 0; i < (NT + 1) / 2; ++i)
      b[i] = SideB::b(tile + 2 * SideA::ELEMENTS, column + 16 * i, step, 2 * i + 1 < NT);
  }
};

struct Chains {
  FragmentC at[MT][NT];

  __device__ __forceinline__ void add_step(const Step& step) {
#pragma unroll
    for (int i = 0; i < MT; ++i)
#pragma unroll
      for (int j = 0; j < NT; ++j) {
        const FragmentB b = {{step.b[j / 2].at[j % 2 * 2], step.b[j / 2].at[j % 2 * 2 + 1]}};
        multiply_add(at[i][j], step.a[i], b);
      }
  }

  // `meanwhile` is done beside the first products.
  template <typename WORK>
  __device__ __forceinline__ void add_stage(unsigned tile, int row, int column, const WORK& meanwhile) {
    Step steps[AHEAD + 1];
    steps[0].load(tile, row, column, 0);
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      if (AHEAD && i + 1 < STEPS) steps[(i + 1) % (AHEAD + 1)].load(tile, row, column, i + 1);
      if (i == 0) meanwhile();
      add_step(steps[i % (AHEAD + 1)]);
      if (!AHEAD && i + 1 < STEPS) steps[0].load(tile, row, column, i + 1);
    }
  }
};

// Two results that lie side by side, or the first of them alone.
__device__ __forceinline__ void store(void* out, bool wide, i64 at, bool both, bool pairs, float low, float high) {
  if (wide) {
    float* const to = static_cast<float*>(out) + at;
    if (both && pairs) {
      *reinterpret_cast<float2*>(to) = make_float2(low, high);
    } else {
      to[0] = low;
      if (both) to[1] = high;
    }
  } else {
    element* const to = static_cast<element*>(out) + at;
    const unsigned pair = pair_of(low, high);
    if (both && pairs) {
      *reinterpret_cast<unsigned*>(to) = pair;
    } else {
      to[0] = (element)pair;
      if (both) to[1] = (element)(pair >> 16);
    }
  }
}

// `bias` belongs to the dense axis of out, `start` is FP32 (rows, columns); both may be absent. Tiles run in bands of `band` tiles of A, so
// that blocks at work at one time share operands in the L2 cache.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    gemm(void* out, const element* a, i64 a_line, const element* b, i64 b_line, const element* bias, const float* start, i64 start_line,
         i64 rows, i64 columns, i64 size, i64 wide, i64 band) {
  extern __shared__ __align__(128) unsigned char shared[];
  element* const stages = reinterpret_cast<element*>(shared);  // [STAGES][STAGE]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row0 = warp / WN * MT * 16, column0 = warp % WN * NT * 8;
  const i64 row_tiles = (rows + ROWS - 1) / ROWS, column_tiles = (columns + COLUMNS - 1) / COLUMNS;
  const int count = (int)((size + KS - 1) / KS);

#pragma unroll 1
  for (i64 tile = blockIdx.x; tile < row_tiles * column_tiles; tile += gridDim.x) {
    const i64 first = tile / (band * column_tiles) * band, within = tile % (band * column_tiles);
    const i64 height = min(row_tiles - first, band);
    const i64 r0 = (first + within % height) * ROWS, c0 = within / height * COLUMNS;

    SideA from_a;
    SideB from_b;
    from_a.open(a, a_line, r0, rows, size);
    from_b.open(b, b_line, c0, columns, size);
    int filled = 0, fetched = 0;  // the place of the stage that is fetched next, and how many were
    const auto next_place = [&]() {
      ++fetched;
      filled = filled + 1 < STAGES ? filled + 1 : 0;
      copies_commit();
    };
    const auto fetch = [&]() {
      if (fetched < count) {
        from_a.fetch(stages + filled * STAGE);
        from_b.fetch(stages + filled * STAGE + SideA::ELEMENTS);
      }
      next_place();
    };
    const auto fetch_whole = [&]() {
      from_a.fetch_whole(stages + filled * STAGE);
      from_b.fetch_whole(stages + filled * STAGE + SideA::ELEMENTS);
      next_place();
    };
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; ++i) fetch();

    Chains chains = {};
    if constexpr (TA && TB) {
      if (start) {
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
          for (int j = 0; j < NT; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const i64 r = r0 + row0 + 16 * i + lane / 4 + e / 2 * 8, c = c0 + column0 + 8 * j + lane % 4 * 2 + e % 2;
              if (r < rows && c < columns) chains.at[i][j].at[e] = start[r * start_line + c];
            }
      }
    }

    int used = 0, done = 0;
    const auto use = [&](const auto& meanwhile) {
      copies_wait<STAGES - 2>();
      __syncthreads();  // the stage is there, and nobody reads the one before any more
      chains.add_stage(shared_address(stages + used * STAGE), row0, column0, meanwhile);
      used = used + 1 < STAGES ? used + 1 : 0;
      ++done;
    };
    if (from_a.whole() && from_b.whole()) {  // no branch between copies and products while whole stages are fetched
#pragma unroll 1
      for (const int whole = (int)(size / KS) - (STAGES - 1); done < whole;) use(fetch_whole);
    }
#pragma unroll 1
    while (done < count) use(fetch);
    copies_wait<0>();
    __syncthreads();  // the stages are free

#pragma unroll
    for (int i = 0; i < MT; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const i64 r = r0 + row0 + 16 * i + 8 * half + lane / 4;
        if (r >= rows) continue;
#pragma unroll
        for (int j = 0; j < NT; ++j) {
          const i64 c = c0 + column0 + 8 * j + lane % 4 * 2;
          if (c >= columns) continue;
          const bool both = c + 1 < columns;
          float low = finished(chains.at[i][j].at[2 * half]), high = finished(chains.at[i][j].at[2 * half + 1]);
          if constexpr (CROSS) {
            if (bias) low = add(low, low_of(bias[r])), high = add(high, low_of(bias[r]));
            store(out, wide, c * rows + r, false, false, low, 0.0f);
            if (both) store(out, wide, (c + 1) * rows + r, false, false, high, 0.0f);
          } else {
            if (bias) low = add(low, low_of(bias[c])), high = both ? add(high, low_of(bias[c + 1])) : 0.0f;
            store(out, wide, r * columns + c, both, columns % 2 == 0, low, high);
          }
        }
      }
  }
}
