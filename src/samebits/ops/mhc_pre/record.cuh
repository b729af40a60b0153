// What backward_controller.cu tells backward_merge.cu of a token: RECORD floats, one token after the other.
// Compile-time choices: OUTPUTS (of the controller, 24 or 4); STREAMS (whether mhc_post has a leg); RMS (how its leg is divided):
// 0 one factor for the row, 1 a division for each element, 2 a product with the reciprocal of a power of two.
#pragma once
#include "vectors.cuh"

constexpr int H = 4, N = OUTPUTS;
constexpr int PRE_AT = N;            // after the N gradients of the projection: pre[4]
constexpr int RMS_AT = PRE_AT + H;   // an RmsRow
constexpr int COMB_AT = RMS_AT + 4;  // comb[4][4]
constexpr int RECORD = COMB_AT + (STREAMS ? H * H : 0);
static_assert(N % 4 == 0, "a record is read 16 bytes at a time");

// The RMS leg of an element x is factor * x (RMS 0), grad_r * ((factor * x) / divisor) (RMS 1), or that with a product in
// place of the division (RMS 2: `divisor` is the reciprocal). A row without such a leg has +0, 1 and +0, and a mask that
// clears x; otherwise the mask keeps all bits.
struct __align__(16) RmsRow {
  float factor, divisor, grad_r;
  unsigned mask;
};
