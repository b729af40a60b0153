// The backward of RMSNorm of heads, with ROPE 1 behind the gradient of their rotary embedding, in one reading. A block walks
// `tile` rows of heads, numbered as they stand: the heads of a position, then those of the next. A group of LANES threads has one
// row at a time, and its next one is on its way meanwhile. With SUMS the terms of the gradient of weight go through shared memory to
// a thread per column, which folds them in the order of the rows; two stages, so one barrier a step is enough.
#include "heads.cuh"

constexpr int THREADS = 256, GROUPS = THREADS / LANES;

extern "C" __global__ void __launch_bounds__(THREADS)
    backward(const element* grad, i64 grad_row, i64 grad_head, const element* x, i64 x_row, i64 x_head, const element* weight,
             const float* cosine, i64 cosine_row, const float* sine, i64 sine_row, const float* rstd, i64 rstd_row, void* grad_x,
             i64 own, float* partials, i64 rows, i64 head_count, i64 size, i64 rotated_columns, i64 tile, i64 whole, i64 more,
             i64 grad_step, i64 grad_wrap, i64 x_step, i64 x_wrap, i64 rstd_step, i64 rstd_wrap) {
  const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES, d = lane * 8, d_end = (int)size, heads = (int)head_count;
  const i64 first = blockIdx.x * tile, left = rows * head_count - first;
  const int count = (int)(left < tile ? left : tile);
  const Floats<8> gain = read_wide<VEC, 8>(weight, d, d_end);
#if ROPE
  __shared__ __align__(16) element held[GROUPS][COLUMNS];
  const Rotation by = {(int)(rotated_columns / 2), (int)rotated_columns};
  Angles angles;
  bool turned = true;  // the position is another one than that of the angles
#endif
#if SUMS
  __shared__ __align__(16) float terms[2][GROUPS][COLUMNS];
  float acc = 0.0f;
#endif

  // A group goes GROUPS rows on at each step: `whole` positions and `more` heads, which is `step` elements, or, where the heads of
  // the position end before that, one position more and as many heads less, `wrap` elements.
  i64 token = (first + group) / head_count;
  int head = (int)(first + group - token * head_count);
  const element *grad_at = grad + token * grad_row + head * grad_head, *x_at = x + token * x_row + head * x_head;
  const float* rstd_at = rstd + token * rstd_row + head;
  struct Flight {
    Raw<8> grad, x;
    float rstd;
  };
  const auto fetch = [&](int place) {
    Flight f = {};
    if (place < count) f = {read_once<VEC, 8>(grad_at, d, d_end), read_once<VEC, 8>(x_at, d, d_end), *rstd_at};
    return f;
  };
  Flight next = fetch(group);
#pragma unroll 1
  for (int base = 0, stage = 0; base < count; base += GROUPS, stage ^= 1) {
    const int place = base + group;
    const bool live = place < count;
    const Flight f = next;
#if ROPE
    if (turned && live) angles = read_angles<true>(cosine + token * cosine_row, sine + token * sine_row, d, by);
    const i64 before = token;
#endif
    const bool wraps = head + (int)more >= heads;
    head += wraps ? (int)more - heads : (int)more;
    token += whole + wraps;
    grad_at += wraps ? grad_wrap : grad_step;
    x_at += wraps ? x_wrap : x_step;
    rstd_at += wraps ? rstd_wrap : rstd_step;
    next = fetch(place + GROUPS);
#if ROPE
    turned = token != before;
    __syncwarp();  // the step before has been read
    write_words(held[group] + d, f.grad.at);
    __syncwarp();
    const Floats<8> d_n = widened(rotated<true>(held[group], f.grad, angles, d, by));
#else
    const Floats<8> d_n = widened(f.grad);
#endif
    const Floats<8> v = widened(f.x);
    if (grad_x) {  // all threads agree
      const Floats<8> u = product(gain, d_n);
      float part = chain_of(u, v);
#pragma unroll
      for (int half = LANES / 2; half > 0; half /= 2) part = add(part, __shfl_xor_sync(0xffffffffu, part, half));
      const float coef = coefficient(f.rstd, add(0.0f, part), d_end);
      if (live) write_gradient<VEC>(grad_x, first + place, own, d, d_end, gradient_of(u, v, f.rstd, coef));
    }
#if SUMS
    unsigned term[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) term[e] = __float_as_uint(mul(d_n.at[e], mul(v.at[e], f.rstd)));
    write_words(terms[stage][group] + d, term);
    __syncthreads();
    if (threadIdx.x < COLUMNS) {
      if (base + GROUPS <= count) {
#pragma unroll
        for (int i = 0; i < GROUPS; ++i) acc = add(acc, terms[stage][i][threadIdx.x]);
      } else {
#pragma unroll 1
        for (int i = 0; base + i < count; ++i) acc = add(acc, terms[stage][i][threadIdx.x]);
      }
    }
#endif
  }
#if SUMS
  if (threadIdx.x < COLUMNS) partials[(i64)blockIdx.x * COLUMNS + threadIdx.x] = acc;
#endif
}
