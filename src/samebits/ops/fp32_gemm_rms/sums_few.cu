// Contract "ascending" for few tokens: the same left folds as sums_ascending.cu, arranged so that a folding lane does nothing
// but add. A block takes one token and CHAINS of its N + 1 chains (the last one is the sum of squares): warp 0 folds, a lane
// per chain, while the other PRODUCERS threads load a tile ahead and put the products of the next tile into shared memory,
// double-buffered. A tile never crosses the end of a stream, and what is past it is +0, which changes no sum that started
// at +0. Compile-time choices: CHAINS, PRODUCERS, VEC, X_BF16.
#include "fold.cuh"

#if X_BF16
typedef bf16 element;
#else
typedef float element;
#endif

constexpr int TILE = PRODUCERS * 4;
constexpr int PITCH = TILE + 4;  // the folding lanes read different banks

struct Columns {
  decltype(load4_raw<VEC>((const element*)nullptr, 0, 0)) x;
  Floats<4> w[CHAINS];
};

extern "C" __global__ void __launch_bounds__(32 + PRODUCERS)
    sums_few(const element* x, i64 x_row, i64 x_stream, const float* weight, i64 weight_row, float* parts, i64 rows, i64 streams,
             i64 width, i64 outputs) {
  extern __shared__ __align__(16) float shared[];
  float(*const terms)[CHAINS][PITCH] = reinterpret_cast<float(*)[CHAINS][PITCH]>(shared);  // two tiles
  const i64 token = blockIdx.x;
  const int chain0 = blockIdx.y * CHAINS, chains = min(CHAINS, (int)outputs + 1 - chain0), squares = (int)outputs - chain0;
  const int size = (int)width, per_stream = (size + TILE - 1) / TILE, tiles = per_stream * (int)streams;

  if (threadIdx.x < 32) {
    float acc = 0.0f;
    int left = size;
    for (int k = 0; k < tiles; ++k) {
      __syncthreads();  // the products of tile k are complete
      if (threadIdx.x < chains) acc = fold<16>(acc, terms[k % 2][threadIdx.x], min(TILE, padded(left, 16)));
      left = left > TILE ? left - TILE : size;
    }
    if (threadIdx.x < chains) parts[token * (outputs + 1) + chain0 + threadIdx.x] = acc;
    return;
  }

  const int column = (threadIdx.x - 32) * 4;
  const element* from = x + token * x_row;
  const float* w = weight + chain0 * weight_row;
  int first = 0, tile = 0;  // of the tile to load next
  const auto load_next = [&] {
    Columns c = {};
    if (tile < tiles) {
      c.x = load4_raw<VEC>(from, first + column, size);
#pragma unroll
      for (int i = 0; i < CHAINS; ++i)
        if (i < chains && i != squares) c.w[i] = load<VEC, 4>(w + i * weight_row, first + column, size);
      ++tile, first += TILE;
      if (first >= size) first = 0, from += x_stream, w += width;
    }
    return c;
  };
  Columns coming = load_next();
  for (int k = 0; k < tiles; ++k) {
    const Columns now = coming;
    coming = load_next();
    const Floats<4> xs = widen4(now.x);
#pragma unroll
    for (int i = 0; i < CHAINS; ++i) {
      Floats<4> product;
#pragma unroll
      for (int e = 0; e < 4; ++e) product.at[e] = mul(xs.at[e], i == squares ? xs.at[e] : now.w[i].at[e]);
      store<8, 4>(&terms[k % 2][i][column], 0, 4, product);
    }
    __syncthreads();
  }
}
