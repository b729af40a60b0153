// The mixing weights of a hyper-connection and their gradient. One thread owns one token and holds its 4x4 matrix in
// registers: m[i][j] leads from stream i to stream j. Threads exchange nothing, so the order of every sum is on the page:
// the 4-tree (a0 + a1) + (a2 + a3).
//
// A column step divides by the sums over i, a row step by the sums over j, each plus eps. 20 column and 19 row steps
// alternate, columns first and last. They depend on each other, so a token is a chain: what matters is how few cycles and
// instructions a step has, and nearly all of both are divisions.
#pragma once
#include "numbers.cuh"

namespace sinkhorn {

constexpr float EPS = 1e-6f;
constexpr int ROW_STEPS = 19;  // each between two column steps

struct Matrix {
  float at[4][4];
};

// --- division ---------------------------------------------------------------------------------------------------------

// IEEE division, with the instructions that the compiler itself uses for operands far from overflow and underflow, but the
// reciprocal once for all quotients with the same divisor: an estimate within one unit in the last place, one Newton step,
// and a quotient that its exact remainder corrects. The remainder is taken with the sign that keeps -0 / b = -0.
struct Divisor {
  float value, reciprocal;
};

__device__ __forceinline__ Divisor divisor(float b) {
  float estimate;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(estimate) : "f"(b));
  return {b, __fmaf_rn(estimate, __fmaf_rn(-b, estimate, 1.0f), estimate)};
}

// a / b in every bit where a is zero or `ordinary`, and b and the quotient are at least 2^-100 and at most 2^120.
__device__ __forceinline__ float quotient(float a, const Divisor& b) {
  const float q = mul(a, b.reciprocal);
  return __fmaf_rn(-b.reciprocal, __fmaf_rn(b.value, q, -a), q);
}

// Bit 30 of the sum over a group is set where all of its members are ordinary: 2^-63 <= |a| < 2^65, neither zero nor NaN.
// The addition moves the 64 exponents on either side of 1 to the upper half of the range.
constexpr unsigned ORDINARY = 1u << 30;
__device__ __forceinline__ unsigned ordinary(float a) { return __float_as_uint(a) + (64u << 23); }
__device__ __forceinline__ unsigned ordinary_or_zero(float a) { return a == 0.0f ? ORDINARY : ordinary(a); }

__device__ __forceinline__ bool can_divide(const Matrix& m, const float (&v)[4]) {
  unsigned all = ORDINARY;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    all &= ordinary(v[i]);
#pragma unroll
    for (int j = 0; j < 4; ++j) all &= ordinary(m.at[i][j]);
  }
  if (all) return true;
  all = ORDINARY;  // exact zeros are rarer, and need more instructions
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    all &= ordinary_or_zero(v[i]);
#pragma unroll
    for (int j = 0; j < 4; ++j) all &= ordinary_or_zero(m.at[i][j]);
  }
  return all;
}

// --- steps ------------------------------------------------------------------------------------------------------------

enum Axis { COLUMNS, ROWS };

// Member n of column k or of row k.
template <Axis A>
__device__ __forceinline__ float& member(Matrix& m, int k, int n) {
  return A == COLUMNS ? m.at[n][k] : m.at[k][n];
}
template <Axis A>
__device__ __forceinline__ float member(const Matrix& m, int k, int n) {
  return A == COLUMNS ? m.at[n][k] : m.at[k][n];
}

__device__ __forceinline__ float tree4(float a0, float a1, float a2, float a3) { return add(add(a0, a1), add(a2, a3)); }

template <Axis A>
__device__ __forceinline__ float sum(const Matrix& m, int k) {
  return tree4(member<A>(m, k, 0), member<A>(m, k, 1), member<A>(m, k, 2), member<A>(m, k, 3));
}

template <Axis A>
__device__ __forceinline__ float dot(const Matrix& a, const Matrix& b, int k) {
  return tree4(mul(member<A>(a, k, 0), member<A>(b, k, 0)), mul(member<A>(a, k, 1), member<A>(b, k, 1)),
               mul(member<A>(a, k, 2), member<A>(b, k, 2)), mul(member<A>(a, k, 3), member<A>(b, k, 3)));
}

struct Divisors {
  Divisor at[4];
};

// The denominators of a step, eps included. An element is positive, at most 1 + eps, and never less than a quarter of what
// it was a step before, which began at eps: all of them lie within 2^-99 and 2, all denominators within 2^-20 and 4.1. So
// `quotient` needs no check here. A token with a NaN stays NaN.
template <Axis A>
__device__ __forceinline__ Divisors denominators(const Matrix& m) {
  Divisors d;
#pragma unroll
  for (int k = 0; k < 4; ++k) d.at[k] = divisor(add(sum<A>(m, k), EPS));
  return d;
}

template <Axis A>
__device__ __forceinline__ Matrix normalised(const Matrix& m, const Divisors& d) {
  Matrix out;
#pragma unroll
  for (int k = 0; k < 4; ++k)
#pragma unroll
    for (int n = 0; n < 4; ++n) member<A>(out, k, n) = quotient(member<A>(m, k, n), d.at[k]);
  return out;
}

template <Axis A>
__device__ __forceinline__ Matrix normalised(const Matrix& m) {
  return normalised<A>(m, denominators<A>(m));
}

// The gradient of a step: g / c - dot(g, m) / (c * c), m the matrix before the step and c its denominators.
template <Axis A>
__device__ __forceinline__ Matrix step_backward(const Matrix& g, const Matrix& m, const Divisors& c) {
  Matrix out;
  float along[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) along[k] = dot<A>(g, m, k);
  if (can_divide(g, along)) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float shared = quotient(along[k], divisor(mul(c.at[k].value, c.at[k].value)));
#pragma unroll
      for (int n = 0; n < 4; ++n) member<A>(out, k, n) = sub(quotient(member<A>(g, k, n), c.at[k]), shared);
    }
  } else {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float value = c.at[k].value, shared = __fdiv_rn(along[k], mul(value, value));
#pragma unroll
      for (int n = 0; n < 4; ++n) member<A>(out, k, n) = sub(__fdiv_rn(member<A>(g, k, n), value), shared);
    }
  }
  return out;
}

// --- what comes before the steps --------------------------------------------------------------------------------------

// 1 / (1 + exp(-x)), as torch computes it on the GPU.
__device__ __forceinline__ void sigmoid(const float (&x)[8], float (&out)[8]) {
  float below[8];
  unsigned all = ORDINARY;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    below[i] = add(1.0f, expf(-x[i]));
    all &= ordinary(below[i]);
  }
  if (all) {
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i] = quotient(1.0f, divisor(below[i]));
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i] = __fdiv_rn(1.0f, below[i]);
  }
}

// The larger one, NaN if either is. Which zero it is of two does not matter: it is only subtracted.
__device__ __forceinline__ float larger(float a, float b) {
  float c;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}

// Over j: exp(x - max) / sum.
__device__ __forceinline__ Matrix softmax(const Matrix& x) {
  Matrix e, out;
  float total[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float most = larger(larger(x.at[i][0], x.at[i][1]), larger(x.at[i][2], x.at[i][3]));
#pragma unroll
    for (int j = 0; j < 4; ++j) e.at[i][j] = expf(sub(x.at[i][j], most));
    total[i] = sum<ROWS>(e, i);
  }
  if (can_divide(e, total)) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Divisor d = divisor(total[i]);
#pragma unroll
      for (int j = 0; j < 4; ++j) out.at[i][j] = quotient(e.at[i][j], d);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) out.at[i][j] = __fdiv_rn(e.at[i][j], total[i]);
  }
  return out;
}

__device__ __forceinline__ Matrix plus_eps(const Matrix& s) {
  Matrix m;
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) m.at[i][j] = add(s.at[i][j], EPS);
  return m;
}

// --- a token ----------------------------------------------------------------------------------------------------------

// The 24 controller outputs of a token: 4 for pre, 4 for post, 16 for comb.
struct Logits {
  float weights[8];
  Matrix comb;
};

struct Split {
  float pre[4], post[4];
  Matrix comb;
};

__device__ __forceinline__ Split forward(const Logits& x) {
  Split out;
  float s[8];
  sigmoid(x.weights, s);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out.pre[i] = add(s[i], EPS);
    out.post[i] = mul(2.0f, s[4 + i]);
  }
  Matrix m = normalised<COLUMNS>(plus_eps(softmax(x.comb)));
#pragma unroll 1
  for (int n = 0; n < ROW_STEPS; ++n) m = normalised<COLUMNS>(normalised<ROWS>(m));
  out.comb = m;
  return out;
}

// The matrices before the row steps, which the backward needs in reverse: 19 times four float4, STRIDE apart, so that
// neighbouring threads are 16 bytes apart in shared memory. Those before the column steps follow from them in one step.
template <int STRIDE>
struct Trace {
  float4* at;
  __device__ __forceinline__ void keep(int n, const Matrix& m) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) at[(n * 4 + i) * STRIDE] = make_float4(m.at[i][0], m.at[i][1], m.at[i][2], m.at[i][3]);
  }
  __device__ __forceinline__ Matrix kept(int n) const {
    Matrix m;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 row = at[(n * 4 + i) * STRIDE];
      m.at[i][0] = row.x, m.at[i][1] = row.y, m.at[i][2] = row.z, m.at[i][3] = row.w;
    }
    return m;
  }
};

// The gradient of the logits; `g` is that of the results, and `trace` is memory of this thread for 19 matrices.
template <int STRIDE>
__device__ __forceinline__ Logits backward(const Split& g, const Logits& x, const Trace<STRIDE>& trace) {
  Logits out;
  float s[8];
  sigmoid(x.weights, s);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out.weights[i] = mul(g.pre[i], mul(s[i], sub(1.0f, s[i])));
    out.weights[4 + i] = mul(g.post[i], mul(2.0f, mul(s[4 + i], sub(1.0f, s[4 + i]))));
  }

  const Matrix probabilities = softmax(x.comb);
  const Matrix start = plus_eps(probabilities);
  const Divisors first = denominators<COLUMNS>(start);
  Matrix m = normalised<COLUMNS>(start);
#pragma unroll 1
  for (int n = 0;; ++n) {
    trace.keep(n, m);
    if (n == ROW_STEPS - 1) break;
    m = normalised<COLUMNS>(normalised<ROWS>(m));
  }
  Matrix grad = g.comb;
#pragma unroll 1
  for (int n = ROW_STEPS - 1; n >= 0; --n) {
    const Matrix before_row = trace.kept(n);
    const Divisors row = denominators<ROWS>(before_row);
    const Matrix before_column = normalised<ROWS>(before_row, row);
    grad = step_backward<COLUMNS>(grad, before_column, denominators<COLUMNS>(before_column));
    grad = step_backward<ROWS>(grad, before_row, row);
  }
  grad = step_backward<COLUMNS>(grad, start, first);

#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float inner = dot<ROWS>(grad, probabilities, i);
#pragma unroll
    for (int j = 0; j < 4; ++j) out.comb.at[i][j] = mul(probabilities.at[i][j], sub(grad.at[i][j], inner));
  }
  return out;
}

}  // namespace sinkhorn
