// Gradient of the queries for Hopper (sm_90a): 64 GROUPS queries of one sequence and one head, which pass all their keys.
//
// One thread copies boxes with TMA: queries and upstream gradients once, then KEYS keys with their values at a time into STAGES
// places. GROUPS warpgroups own 64 queries each. A step: s = q k^T and dp = grad_out v^T; p = ex2(s c - lse log2 e) while dp still
// runs; ds = p (dp - delta), rounded, is the left operand of grad_q += ds k from registers. One chain over ascending keys.
//
// Defines: D (64, 128), CAUSAL, PACKED, ELEMENT (1 BF16, 2 FP16), GROUPS (2, 3), KEYS (a multiple of 16), STAGES.
#include "ex2.cuh"
#include "mma.cuh"
#include "place.cuh"
#include "store.cuh"

constexpr int ROWS = 64 * GROUPS, THREADS = 128 * (GROUPS + 1);
constexpr int TILE_BYTES = ROWS * D * 2, BLOCK_BYTES = KEYS * D * 2;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_grad_queries(const __grid_constant__ tma::Map q, const __grid_constant__ tma::Map k, const __grid_constant__ tma::Map v,
                           const __grid_constant__ tma::Map grad_out, const float* lse, const float* delta, element* grad_q,
                           const i64* cu_q, const i64* cu_k, i64 documents, i64 SQ, i64 SK, i64 heads, i64 group_size, i64 c_bits,
                           i64 scale_bits, i64 log2_e_bits) {
  const Place at = place_of<CAUSAL>(ROWS, cu_q, cu_k, documents, SQ, SK);
  if (!at.here) return;
  const int queries = at.count, keys = at.other_count, tile = at.tile, head = blockIdx.y, kv_head = head / (int)group_size;
  const int shift = keys - queries;  // causal: query i sees the keys up to i + shift
  const int end = CAUSAL ? max(0, min(keys, (tile + 1) * ROWS + shift)) : keys;
  const int blocks = (end + KEYS - 1) / KEYS;

  extern __shared__ char dynamic[];
  const unsigned mine_q = (shared_address(dynamic) + 1023) & ~1023u, mine_g = mine_q + TILE_BYTES, k_blocks = mine_g + TILE_BYTES,
                 v_blocks = k_blocks + STAGES * BLOCK_BYTES, tile_full = v_blocks + STAGES * BLOCK_BYTES, full = tile_full + 8,
                 empty = full + 8 * STAGES, copied = empty + 8 * STAGES;
  if (threadIdx.x == 0) {
    tma::init(tile_full, 1), tma::init(copied, 1);
    for (int i = 0; i < 8 * STAGES; i += 8) tma::init(full + i, 1), tma::init(empty + i, 4 * GROUPS);
    tma::init_done();
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);

  if (warpgroup == 0) {  // --- copies
    wgmma::fewer_registers<GROUPS == 2 ? 24 : 32>();
    if (threadIdx.x < 32 && blocks > 0) {
      const bool asks = threadIdx.x == 0;
      if (asks) {
        tma::expect(tile_full, 2 * TILE_BYTES);
        load_box(mine_q, q, tile_full, at.first + tile * ROWS, head, at.batch);
        load_box(mine_g, grad_out, tile_full, at.first + tile * ROWS, head, at.batch);
      }
      for (int step = 0; step < blocks; ++step) {
        const int stage = step % STAGES, rows = keys - step * KEYS;
        const unsigned k_block = k_blocks + stage * BLOCK_BYTES, v_block = v_blocks + stage * BLOCK_BYTES;
        const bool clears = PACKED && rows < KEYS;  // the last block
        tma::wait(empty + 8 * stage, (step / STAGES & 1) ^ 1);
        if (asks) {
          const unsigned tell = clears ? copied : full + 8 * stage;
          tma::expect(tell, 2 * BLOCK_BYTES);
          load_box(k_block, k, tell, at.other_first + step * KEYS, kv_head, at.batch);
          load_box(v_block, v, tell, at.other_first + step * KEYS, kv_head, at.batch);
        }
        if (clears) {
          tma::wait(copied, 0);
          clear_rows<KEYS>(k_block, rows), clear_rows<KEYS>(v_block, rows);
          tma::written_for_async();
          __syncwarp();
          if (asks) tma::arrive(full + 8 * stage);
        }
      }
    }
    return;
  }

  // --- products
  wgmma::more_registers<GROUPS == 2 ? 240 : 160>();
  const int mine = warpgroup - 1, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, quad = lane % 4;
  const int first_row = tile * ROWS + mine * 64, row = first_row + warp * 16 + lane / 4;
  const float c = __int_as_float((int)c_bits), scale = __int_as_float((int)scale_bits), log2_e = __int_as_float((int)log2_e_bits);
  float logs[2], sums[2];  // a query that is not here, or sees no key, gets +inf, hence p = +0
  int last[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool here = row + 8 * r < queries;
    const i64 number = ((i64)at.batch * heads + head) * SQ + at.first + row + 8 * r;
    const float found = here ? lse[number] : INFINITE;
    logs[r] = mul(found == -INFINITE ? INFINITE : found, log2_e);
    sums[r] = here ? delta[number] : 0.0f;
    last[r] = CAUSAL ? min(row + 8 * r + shift, keys - 1) : keys - 1;
  }
  const int seen = min(CAUSAL ? max(0, min(keys, first_row + 1 + shift)) / KEYS : keys / KEYS, blocks);  // blocks without a mask
  float s[KEYS / 2], dp[KEYS / 2], dq[D / 2];
  unsigned ds[KEYS / 16][4];
#pragma unroll
  for (int i = 0; i < D / 2; ++i) dq[i] = 0.0f;

  // c = a b^T: 64 rows of a tile by the rows of a block.
  auto ask = [&](float (&c)[KEYS / 2], unsigned tile_at, unsigned block_at) {
    const unsigned long long a = wgmma::k_major(tile_at + mine * 64 * LINE), b = wgmma::k_major(block_at);
#pragma unroll
    for (int i = 0; i < D / 16; ++i)  // descriptors count in 16 bytes
      wgmma::add<KEYS, false, false>(c, a + (i / 4 * ROWS * LINE + i % 4 * 32) / 16, b + (i / 4 * KEYS * LINE + i % 4 * 32) / 16, i > 0);
    wgmma::commit();
  };
  auto wait_full = [&](int step) { tma::wait(full + step % STAGES * 8, step / STAGES & 1); };
  auto release = [&](int step) {
    if (lane == 0) tma::arrive(empty + step % STAGES * 8);
  };
  auto work = [&](int step, auto masked) {
    const int from = step % STAGES * BLOCK_BYTES;
    wgmma::pin(s);
    wgmma::fence();
    ask(s, mine_q, k_blocks + from);
    wgmma::wait<1>();  // the step before is over, so ds and dp can share registers
    wgmma::pin(dq), wgmma::pin(dp);
    if (step > 0) release(step - 1);
    wgmma::fence();
    ask(dp, mine_g, v_blocks + from);
    wgmma::wait<1>();
    wgmma::pin(s);
#pragma unroll
    for (int i = 0; i < KEYS / 2; ++i) {
      s[i] = ex2(sub(mul(s[i], c), logs[i / 2 % 2]));
      if (decltype(masked)::value && step * KEYS + i / 4 * 8 + 2 * quad + i % 2 > last[i / 2 % 2]) s[i] = 0.0f;
    }
    wgmma::pin(s);
    // The next block is awaited here because this branch keeps the assembler from moving the exponentials behind the wait below.
    if (step + 1 < blocks) wait_full(step + 1);
    wgmma::wait<0>();
    wgmma::pin(dp);
#pragma unroll
    for (int i = 0; i < KEYS / 2; i += 2) {
      const int r = i / 2 % 2;
      ds[i / 8][i / 2 % 4] = pair_of(mul(s[i], sub(dp[i], sums[r])), mul(s[i + 1], sub(dp[i + 1], sums[r])));
    }
    wgmma::pin(dq);
    wgmma::fence();
    const unsigned long long b = wgmma::mn_major(k_blocks + from, KEYS * LINE);
#pragma unroll
    for (int i = 0; i < KEYS / 16; ++i) wgmma::add<D, true>(dq, ds[i], b + i * 16 * LINE / 16);
    wgmma::commit();
  };
  if (blocks > 0) {
    tma::wait(tile_full, 0);
    wait_full(0);

    for (int step = 0; step < seen; ++step) work(step, No());
    for (int step = seen; step < blocks; ++step) work(step, Yes());
    wgmma::wait<0>();
    wgmma::pin(dq);
  }
  const i64 first_out = (i64)at.batch * SQ + at.first + first_row + warp * 16;
  store_rows<ROWS>(mine_q + (mine * 64 + warp * 16) * LINE, grad_q + (first_out * heads + head) * D, heads * D,
                   queries - first_row - warp * 16, [&](int i) { return mul(dq[i], scale); });
}
