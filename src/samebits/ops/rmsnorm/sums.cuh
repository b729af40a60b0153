// What a position adds to the gradients of weight, shift and scale, W columns at a time. Each product is rounded before it is
// added; `n` is made again as the forward made it.
#pragma once
#include "row.cuh"
#include "segments.cuh"

template <int W>
struct Sums {
  Floats<W> weight;
#if MODULATED
  Floats<W> shift, scale;
#endif
};

// d_n = grad * factor; weight += d_n * (x * rstd), shift += grad, scale += grad * n
template <int W>
__device__ __forceinline__ void add_position(Sums<W>& sums, const Floats<W>& grad, const Floats<W>& x, float rstd,
                                             const Floats<W>& weight, const Floats<W>& factor) {
#if MODULATED
  const Floats<W> n = normed(x, rstd, weight);
#endif
#pragma unroll
  for (int e = 0; e < W; ++e) {
#if MODULATED
    const float d_n = mul(grad.at[e], factor.at[e]);
    sums.shift.at[e] = add(sums.shift.at[e], grad.at[e]);
    sums.scale.at[e] = add(sums.scale.at[e], mul(grad.at[e], n.at[e]));
#else
    const float d_n = grad.at[e];
#endif
    sums.weight.at[e] = add(sums.weight.at[e], mul(d_n, mul(x.at[e], rstd)));
  }
}

// The sums of a tile, FP32 rows of [tiles][size]; null where nobody wants them.
struct Partials {
  float *weight, *shift, *scale;
};

template <int V, int W>
__device__ __forceinline__ void write_sums(const Partials& to, i64 tile, int d, int size, const Sums<W>& sums) {
  if (to.weight) write_float<V>(to.weight + tile * size, d, size, sums.weight);
#if MODULATED
  if (to.shift) write_float<V>(to.shift + tile * size, d, size, sums.shift);
  if (to.scale) write_float<V>(to.scale + tile * size, d, size, sums.scale);
#endif
}

// Without modulation the tiles are the positions as they stand.
__device__ __forceinline__ Tile tile_of_rows(i64 tile, i64 rows) {
  const i64 left = rows - tile * TILE;
  return {0, tile * TILE, (int)(left < 0 ? 0 : left < TILE ? left : TILE)};
}
