// The whole backward in one reading, for many rows of at most 5376 columns in a 16-bit type: a block owns a tile of 256
// positions and all columns, a thread eight of them. It walks the positions with STAGES - 1 rows of grad and x on their way
// to shared memory. The dot of the next row is begun before grad_x of this one is made, so that its warps meet at one barrier
// per row and none waits for a tree.
#include "async.cuh"
#include "sums.cuh"

constexpr int STAGES = 6;
constexpr int MOST_WARPS = 21;
constexpr int GROUPS = 24;  // of the dot, one for each warp; the rest stay +0, and p + 0 = p for every sum that began at +0

extern "C" __global__ void __launch_bounds__(MOST_WARPS * 32)
    backward_tile(const element* grad, i64 grad_row, const element* x, i64 x_row, const element* weight, const element* scale,
                  i64 scale_row, const i64* index, i64 index_step, const i64* order, i64 order_step, const i64* bounds,
                  i64 bounds_step, i64 table_rows, const float* rstd, i64 rstd_row, void* grad_x, i64 own, float* weight_sums,
                  float* shift_sums, float* scale_sums, i64 rows, i64 size) {
  extern __shared__ __align__(16) element flight[];  // [STAGES][grad, x][blockDim.x][8]
  __shared__ i64 position_held[TILE];
  __shared__ float rstd_held[TILE];
  __shared__ __align__(16) float group[2][GROUPS];
  const int d_end = (int)size, d = threadIdx.x * 8;
#if MODULATED
  const Segments segments = {index, index_step, order, order_step, bounds, bounds_step, table_rows, rows};
  const Tile tile = tile_at(segments, blockIdx.x);
#else
  const Tile tile = tile_of_rows(blockIdx.x, rows);
#endif
  if (tile.count == 0) return;  // the whole block
  for (int place = threadIdx.x; place < tile.count; place += blockDim.x) {
#if MODULATED
    const i64 position = position_at(segments, tile, place);
#else
    const i64 position = tile.begin + place;
#endif
    position_held[place] = position;
    rstd_held[place] = rstd[position * rstd_row];
  }
  for (int g = threadIdx.x; g < 2 * GROUPS; g += blockDim.x) group[g / GROUPS][g % GROUPS] = 0.0f;
  const Raw<8> raw_weight = read<8, 8>(weight, d, d_end);
#if MODULATED
  const Raw<8> raw_factor = narrowed(factor_of(read<8, 8>(scale + tile.row * scale_row, d, d_end)));
#else
  const Raw<8> raw_factor = {};
#endif
  __syncthreads();

  const auto slot = [&](int place, int which) {
    return flight + ((place % STAGES * 2 + which) * (int)blockDim.x + (int)threadIdx.x) * 8;
  };
  const auto fetch = [&](int place) {  // a thread reads back only what it copied itself, so no barrier is needed
    if (place < tile.count) {
      const i64 position = position_held[place];
      copy8_async<8>(slot(place, 0), grad + position * grad_row, d, d_end);
      copy8_async<8>(slot(place, 1), x + position * x_row, d, d_end);
    }
    copies_commit();
  };
  const auto held = [&](int place, int which) {
    Raw<8> raw;
    read_words(raw.at, slot(place, which));
    return widened(raw);
  };
  const auto weighted = [&](Floats<8> u) {
#if MODULATED
    u = product(u, widened(raw_factor));
#endif
    return product(widened(raw_weight), u);
  };
  const auto begin_dot = [&](int place) {  // a warp has one group of 32 vectors
    const float part = tree_warp(chain_of(weighted(held(place, 0)), held(place, 1)));
    if (threadIdx.x % 32 == 0) group[place % 2][threadIdx.x / 32] = part;
  };

  Sums<8> sums = {};
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) fetch(s);
  copies_wait<STAGES - 2>();
  begin_dot(0);
  __syncthreads();
#pragma unroll 1
  for (int place = 0; place < tile.count; ++place) {
    fetch(place + STAGES - 1);  // into the slot of the row before this one
    if (place + 1 < tile.count) {
      copies_wait<STAGES - 2>();
      begin_dot(place + 1);
    }
    const Floats<8> g = held(place, 0), v = held(place, 1);
    const float r = rstd_held[place];
    add_position(sums, g, v, r, widened(raw_weight), widened(raw_factor));
    float dot = 0.0f;
#pragma unroll 2
    for (int w = 0; w < GROUPS; w += 4) {
      const float4 four = *reinterpret_cast<const float4*>(&group[place % 2][w]);
      dot = add(add(add(add(dot, four.x), four.y), four.z), four.w);
    }
    const float coef = coefficient(r, dot, d_end);
    write_gradient<8>(grad_x, position_held[place], own, d, d_end, gradient_of(weighted(g), v, r, coef));
    __syncthreads();  // the dot of the next row is complete, and that of this one is read
  }
  copies_wait<0>();
  write_sums<8>({weight_sums, shift_sums, scale_sums}, blockIdx.x, d, d_end, sums);
}
