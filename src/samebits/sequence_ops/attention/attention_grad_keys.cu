// Gradients of keys and values for Hopper (sm_90a): 128 keys of one sequence and one key head, which all queries of all heads of
// their group pass, in ascending order.
//
// A warp copies boxes with TMA: keys and values once, then ROWS queries with their upstream gradients at a time into STAGES places,
// and another writes beside them lse log2 e and delta of each. Two warpgroups own 64 keys each. A step: s = k q^T and dp = v grad_out^T;
// p = ex2(s c - lse log2 e) while dp still runs; ds = p (dp - delta); grad_v += p grad_out and grad_k += ds q. p and ds, rounded, are
// left operands from registers. One chain over heads and queries for each gradient. The warpgroups take turns in asking, each for the
// last two products of a step and the first two of the next, so that one's exponentials run beside the other's products.
//
// Defines: D (64, 128), CAUSAL, PACKED, ELEMENT (1 BF16, 2 FP16), ROWS (a multiple of 16), STAGES.
#include "ex2.cuh"
#include "mma.cuh"
#include "place.cuh"
#include "store.cuh"

constexpr int GROUPS = 2, KEYS = 64 * GROUPS, THREADS = 128 * (GROUPS + 1);
constexpr int TURN = 1;  // and on: names of barriers, one for each warpgroup
constexpr int TILE_BYTES = KEYS * D * 2, BLOCK_BYTES = ROWS * D * 2, NUMBER_BYTES = ROWS * 8;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_grad_keys(const __grid_constant__ tma::Map q, const __grid_constant__ tma::Map k, const __grid_constant__ tma::Map v,
                        const __grid_constant__ tma::Map grad_out, const float* lse, const float* delta, element* grad_k,
                        element* grad_v, const i64* cu_q, const i64* cu_k, i64 documents, i64 SQ, i64 SK, i64 heads, i64 group_size,
                        i64 c_bits, i64 scale_bits, i64 log2_e_bits) {
  const Place at = place_of<false>(KEYS, cu_k, cu_q, documents, SK, SQ);
  if (!at.here) return;
  const int keys = at.count, queries = at.other_count, tile = at.tile, kv_head = blockIdx.y, group = (int)group_size;
  const int shift = keys - queries;  // causal: query i sees the keys up to i + shift
  const int begin = CAUSAL ? max(0, tile * KEYS - shift) / ROWS : 0;  // blocks before it see none of these keys
  const int per_head = max(0, (queries + ROWS - 1) / ROWS - begin), blocks = per_head * group;

  extern __shared__ char dynamic[];
  const unsigned mine_k = (shared_address(dynamic) + 1023) & ~1023u, mine_v = mine_k + TILE_BYTES, q_blocks = mine_v + TILE_BYTES,
                 g_blocks = q_blocks + STAGES * BLOCK_BYTES, numbers = g_blocks + STAGES * BLOCK_BYTES,
                 tile_full = numbers + STAGES * NUMBER_BYTES, full = tile_full + 8, empty = full + 8 * STAGES, copied = empty + 8 * STAGES;
  if (threadIdx.x == 0) {
    tma::init(tile_full, 1), tma::init(copied, 1);
    for (int i = 0; i < 8 * STAGES; i += 8) tma::init(full + i, 1 + 32), tma::init(empty + i, 128 * GROUPS);
    tma::init_done();
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);

  if (warpgroup == 0) {  // --- copies
    wgmma::fewer_registers<24>();
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    int first = begin * ROWS, head = kv_head * group;  // of the queries of a step
    auto next = [&]() {
      if ((first += ROWS) >= queries) first = begin * ROWS, ++head;
    };
    if (warp == 0 && blocks > 0) {
      if (lane == 0) {
        tma::expect(tile_full, 2 * TILE_BYTES);
        load_box(mine_k, k, tile_full, at.first + tile * KEYS, kv_head, at.batch);
        load_box(mine_v, v, tile_full, at.first + tile * KEYS, kv_head, at.batch);
      }
      int cleared = 0;
      for (int step = 0; step < blocks; ++step, next()) {
        const int stage = step % STAGES;
        const unsigned q_block = q_blocks + stage * BLOCK_BYTES, g_block = g_blocks + stage * BLOCK_BYTES;
        const bool clears = PACKED && queries - first < ROWS;  // the last block of a head
        tma::wait(empty + 8 * stage, (step / STAGES & 1) ^ 1);
        if (lane == 0) {
          const unsigned tell = clears ? copied : full + 8 * stage;
          tma::expect(tell, 2 * BLOCK_BYTES);
          load_box(q_block, q, tell, at.other_first + first, head, at.batch);
          load_box(g_block, grad_out, tell, at.other_first + first, head, at.batch);
        }
        if (clears) {
          tma::wait(copied, cleared++ & 1);
          clear_rows<ROWS>(q_block, queries - first), clear_rows<ROWS>(g_block, queries - first);
          tma::written_for_async();
          __syncwarp();
          if (lane == 0) tma::arrive(full + 8 * stage);
        }
      }
    } else if (warp == 1) {
      const float log2_e = __int_as_float((int)log2_e_bits);
      for (int step = 0; step < blocks; ++step, next()) {
        const int stage = step % STAGES;
        const i64 start = ((i64)at.batch * heads + head) * SQ + at.other_first + first + lane;
        float logs[(ROWS + 31) / 32], sums[(ROWS + 31) / 32];  // asked for before there is room, since they take long
#pragma unroll
        for (int i = 0; i < ROWS; i += 32) {  // a query that is not here, or sees no key, gets +inf, hence p = +0
          const bool here = i + lane < ROWS && first + i + lane < queries;
          logs[i / 32] = here ? lse[start + i] : INFINITE, sums[i / 32] = here ? delta[start + i] : 0.0f;
        }
        tma::wait(empty + 8 * stage, (step / STAGES & 1) ^ 1);
#pragma unroll
        for (int i = 0; i < ROWS; i += 32) {
          const float found = logs[i / 32];
          const unsigned to = numbers + stage * NUMBER_BYTES + (i + lane) * 4;
          if (i + lane < ROWS) {
            asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(mul(found == -INFINITE ? INFINITE : found, log2_e)) : "memory");
            asm volatile("st.shared.f32 [%0], %1;" ::"r"(to + ROWS * 4), "f"(sums[i / 32]) : "memory");
          }
        }
        tma::arrive(full + 8 * stage);
      }
    }
    return;
  }

  // --- products
  wgmma::more_registers<240>();
  const int mine = warpgroup - 1, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, quad = lane % 4;
  const int first_key = tile * KEYS + mine * 64, key = first_key + warp * 16 + lane / 4;
  const float c = __int_as_float((int)c_bits), scale = __int_as_float((int)scale_bits);
  float s[ROWS / 2], dp[ROWS / 2], dk[D / 2], dv[D / 2];
  unsigned p[ROWS / 16][4], ds[ROWS / 16][4];
#pragma unroll
  for (int i = 0; i < D / 2; ++i) dk[i] = 0.0f, dv[i] = 0.0f;

  // c = a b^T: 64 rows of a tile by the rows of a block.
  auto ask = [&](float (&c)[ROWS / 2], unsigned tile_at, unsigned block_at) {
    const unsigned long long a = wgmma::k_major(tile_at + mine * 64 * LINE), b = wgmma::k_major(block_at);
#pragma unroll
    for (int i = 0; i < D / 16; ++i)  // descriptors count in 16 bytes
      wgmma::add<ROWS, false, false>(c, a + (i / 4 * KEYS * LINE + i % 4 * 32) / 16, b + (i / 4 * ROWS * LINE + i % 4 * 32) / 16, i > 0);
    wgmma::commit();
  };
  // c += a b, a from registers: the rows of a block are the reduction.
  auto ask_turned = [&](float (&c)[D / 2], const unsigned (&a)[ROWS / 16][4], unsigned block_at) {
    const unsigned long long b = wgmma::mn_major(block_at, ROWS * LINE);
#pragma unroll
    for (int i = 0; i < ROWS / 16; ++i) wgmma::add<D, true>(c, a[i], b + i * 16 * LINE / 16);
    wgmma::commit();
  };
  // Of the neighbouring queries 8 i + 2 quad and the next: 0, lse log2 e; 1, delta.
  auto numbers_of = [&](int stage, int which, int i) {
    float2 two;
    const unsigned from = numbers + stage * NUMBER_BYTES + (which * ROWS + i * 8 + 2 * quad) * 4;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(two.x), "=f"(two.y) : "r"(from) : "memory");
    return two;
  };
  if (blocks > 0) {
    tma::wait(tile_full, 0);
    tma::wait(full, 0);
    if (mine == 1) tma::come(TURN, 256);
    tma::meet(TURN + mine, 256);
    int first = begin * ROWS;
    for (int step = 0; step < blocks; ++step) {
      const int stage = step % STAGES, from = stage * BLOCK_BYTES;
      wgmma::pin(s);
      wgmma::fence();
      ask(s, mine_k, q_blocks + from);
      wgmma::wait<1>();  // the step before is over, so ds and dp can share registers
      wgmma::pin(dk), wgmma::pin(dv), wgmma::pin(dp);
      if (step > 0) tma::arrive(empty + (step - 1) % STAGES * 8);  // every lane, since each has read numbers there
      wgmma::fence();
      ask(dp, mine_v, g_blocks + from);
      tma::come(TURN + 1 - mine, 256);
      wgmma::wait<1>();
      wgmma::pin(s);
#pragma unroll
      for (int i = 0; i < ROWS / 8; ++i) {
        const float2 logs = numbers_of(stage, 0, i);
#pragma unroll
        for (int e = 0; e < 4; ++e) s[4 * i + e] = ex2(sub(mul(s[4 * i + e], c), e % 2 ? logs.y : logs.x));
      }
      if (CAUSAL) {
        if (first + shift < first_key + 63) {
#pragma unroll
          for (int i = 0; i < ROWS / 2; ++i)
            if (key + i / 2 % 2 * 8 > first + i / 4 * 8 + 2 * quad + i % 2 + shift) s[i] = 0.0f;
        }
        if ((first += ROWS) >= queries) first = begin * ROWS;
      }
      wgmma::pin(s);
      // The next block is awaited here because this branch keeps the assembler from moving the exponentials behind the wait below.
      if (step + 1 < blocks) tma::wait(full + (step + 1) % STAGES * 8, (step + 1) / STAGES & 1);
      wgmma::wait<0>();
      wgmma::pin(dp);
#pragma unroll
      for (int i = 0; i < ROWS / 8; ++i) {
        const float2 sums = numbers_of(stage, 1, i);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int j = 4 * i + 2 * r;
          ds[j / 8][j / 2 % 4] = pair_of(mul(s[j], sub(dp[j], sums.x)), mul(s[j + 1], sub(dp[j + 1], sums.y)));
          p[j / 8][j / 2 % 4] = pair_of(s[j], s[j + 1]);
        }
      }
      tma::meet(TURN + mine, 256);
      wgmma::pin(dk), wgmma::pin(dv);
      wgmma::fence();
      ask_turned(dv, p, g_blocks + from);
      ask_turned(dk, ds, q_blocks + from);
    }
    if (mine == 0) tma::come(TURN + 1, 256);
    wgmma::wait<0>();
    wgmma::pin(dk), wgmma::pin(dv);
  }
  const Place to = PACKED ? place_of<false>(KEYS, cu_k, cu_q, documents, SK, SQ) : at;  // the loop has no register to keep it in
  const i64 kv_heads = heads / group_size, row = to.tile * KEYS + mine * 64 + warp * 16;
  const i64 first_out = (((i64)to.batch * SK + to.first + row) * kv_heads + kv_head) * D;
  const int left = to.count - (int)row;
  const unsigned scratch = (mine * 64 + warp * 16) * LINE;
  store_rows<KEYS>(mine_k + scratch, grad_k + first_out, kv_heads * D, left, [&](int i) { return mul(dk[i], scale); });
  store_rows<KEYS>(mine_v + scratch, grad_v + first_out, kv_heads * D, left, [&](int i) { return dv[i]; });
}
