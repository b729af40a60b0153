// The backward of RMSNorm of heads, with ROPE 1 behind the gradient of their rotary embedding, in one reading. A block walks
// `tile` rows of heads, numbered as they stand: the heads of a position, then those of the next. At each step a group of LANES
// threads has EACH of them, neighbours of one position; as soon as one is in registers the row of the next step is on its way to
// its place in shared memory. With SUMS the terms of the gradient of weight go through shared memory to a thread per two columns,
// which folds them in the order of the rows; they have two stages, so one barrier a step is enough.
#include "async.cuh"
#include "heads.cuh"

constexpr int MOST = FULL ? 768 : 256;  // threads of a block, at least COLUMNS / 2: at most 80 or 255 registers for each
constexpr int PIECES = (int)sizeof(element) / 2;               // of 16 bytes, for eight elements
#if OWN
typedef element gradient;
#else
typedef float gradient;
#endif

// Eight elements; those after `left` are not there, and become +0.
template <int V>
__device__ __forceinline__ void copy_async(element* shared, const element* from, int left) {
#pragma unroll
  for (int i = 0; i < PIECES; ++i)
    copy8_async<V>(reinterpret_cast<bf16*>(shared) + i * 8, reinterpret_cast<const bf16*>(from), i * 8, left * PIECES);
}

__device__ __forceinline__ void write_own(gradient* to, int left, const Floats<8>& f) {
#if OWN
  write<VEC>(to, 0, left, narrowed(f));
#else
  write_float<VEC>(to, 0, left, f);
#endif
}

extern "C" __global__ void __launch_bounds__(MOST)
    backward(const element* grad, i64 grad_row, i64 grad_head, const element* x, i64 x_row, i64 x_head, const element* weight,
             const float* cosine, i64 cosine_row, const float* sine, i64 sine_row, const float* rstd, i64 rstd_row, gradient* grad_x,
             float* partials, i64 rows, i64 head_count, i64 size, i64 rotated_columns, i64 tile, i64 whole, i64 more,
             i64 grad_step, i64 grad_wrap, i64 x_step, i64 x_wrap, i64 rstd_step, i64 rstd_wrap) {
  extern __shared__ __align__(16) element flight[];  // [EACH][grad, x][threads][8], room for a row of each group if VEC 1, then the terms
  const int lane = threadIdx.x % LANES, place = threadIdx.x / LANES * EACH, stride = (int)blockDim.x / LANES * EACH;
  const int d = lane * 8, d_end = FULL ? COLUMNS : (int)size, columns_left = FULL ? 8 : d_end - d, heads = (int)head_count;
  const i64 first = blockIdx.x * tile, left = rows * head_count - first;
  const int count = (int)(left < tile ? left : tile);  // a multiple of EACH, as `first` is
  const Floats<8> gain = read_wide<VEC, 8>(weight, d, d_end);
#if ROPE
  element* const own_row = flight + blockDim.x * (EACH * 16) + threadIdx.x / LANES * COLUMNS;
  const Rotation by = {(int)(rotated_columns / 2), (int)rotated_columns};
  Angles angles;
  bool turned = true;  // the position is another one than that of the angles
#endif
#if SUMS
  float* const terms = reinterpret_cast<float*>(flight + blockDim.x * (EACH * 16 + (VEC == 1 && ROPE ? 8 : 0)));  // [2][stride][2][LANES][4]
  int stage = 0;
  float acc[2] = {};
#endif

  // A group goes `stride` rows on at each step: `whole` positions and `more` heads, which is `step` elements, or, where the heads
  // of the position end before that, one position more and as many heads less, `wrap` elements.
  int token = (int)((first + place) / head_count), head = (int)(first + place - token * head_count);
  const element *grad_at = grad + token * grad_row + head * grad_head + d, *x_at = x + token * x_row + head * x_head + d;
  const float* rstd_at = rstd + token * rstd_row + head;
  gradient* out = grad_x + (first + place) * d_end + d;
  element* const mine = flight + threadIdx.x * 8;  // a thread reads back only what it copied itself, so no barrier is needed
  const int apart = (int)blockDim.x * 8;  // neighbours side by side: copies of a warp that lie apart took half as long again
  const auto copy = [&](int i, bool there) {
    if (there) copy_async<VEC>(mine + i * 2 * apart, grad_at + i * grad_head, columns_left);
    if (there) copy_async<VEC>(mine + (i * 2 + 1) * apart, x_at + i * x_head, columns_left);
    copies_commit();
  };
  float r_next[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    copy(i, place < count);
    r_next[i] = place < count ? rstd_at[i] : 0.0f;
  }
#pragma unroll 1
  for (int base = 0; base < count; base += stride) {
    const bool live = base + place < count, follows = base + stride + place < count;
#if ROPE
    if (live && turned) angles = read_angles<true>(cosine + token * cosine_row, sine + token * sine_row, d, by);
#endif
    const bool wraps = head + (int)more >= heads;
    head += wraps ? (int)more - heads : (int)more;
    token += (int)whole + wraps;
    grad_at += wraps ? grad_wrap : grad_step;
    x_at += wraps ? x_wrap : x_step;
    rstd_at += wraps ? rstd_wrap : rstd_step;
#if ROPE
    turned = whole + wraps != 0;
    if (turned && follows && d < rotated_columns) {
      prefetch_l2(cosine + token * cosine_row + d);
      prefetch_l2(sine + token * sine_row + d);
    }
#endif
    float r_here[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      r_here[i] = r_next[i];
      if (follows) r_next[i] = rstd_at[i];
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      Raw<8> raw_grad, raw_x;
      copies_wait<EACH - 1>();
      read_words(raw_grad.at, mine + i * 2 * apart);
      read_words(raw_x.at, mine + (i * 2 + 1) * apart);
      copy(i, follows);
#if ROPE
      raw_grad = rotated<true>(own_row, raw_grad, angles, d, by);
#endif
      const Floats<8> d_n = widened(raw_grad), v = widened(raw_x);
      const float r = r_here[i];
      if (grad_x) {  // all threads agree
        const Floats<8> u = product(gain, d_n);
        float part = chain_of(u, v);
#pragma unroll
        for (int half = LANES / 2; half > 0; half /= 2) part = add(part, __shfl_xor_sync(0xffffffffu, part, half));
        const float coef = coefficient(r, add(0.0f, part), d_end);
        if (live) write_own(out + i * d_end, columns_left, gradient_of(u, v, r, coef));
      }
#if SUMS
      float* const to = terms + stage + (place + i) * COLUMNS + lane * 4;  // four columns of all lanes, then the other four
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        unsigned term[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) term[e] = __float_as_uint(mul(d_n.at[h * 4 + e], mul(v.at[h * 4 + e], r)));
        write_words(to + h * (COLUMNS / 2), term);
      }
#endif
    }
    out += stride * d_end;
#if SUMS
    __syncthreads();
    if (threadIdx.x < COLUMNS / 2) {
      const int here = min(stride, count - base);
#pragma unroll 8
      for (int i = 0; i < here; ++i) {
        const float2 two = reinterpret_cast<const float2*>(terms + stage + i * COLUMNS)[threadIdx.x];
        acc[0] = add(acc[0], two.x), acc[1] = add(acc[1], two.y);
      }
    }
    stage = stride * COLUMNS - stage;
#endif
  }
#if SUMS
  const int at = threadIdx.x * 2, column = at % (COLUMNS / 2) / 4 * 8 + at / (COLUMNS / 2) * 4 + at % 4;
  if (threadIdx.x < COLUMNS / 2) *reinterpret_cast<float2*>(partials + (i64)blockIdx.x * COLUMNS + column) = make_float2(acc[0], acc[1]);
#endif
}
