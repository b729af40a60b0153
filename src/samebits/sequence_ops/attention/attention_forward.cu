// Attention forward for Hopper (sm_90a): out and lse of a tile of 64 GROUPS queries of one sequence and one head.
//
// One thread copies boxes with TMA: the queries once, then KEYS keys and KEYS values at a time into STAGES places each. GROUPS
// warpgroups own 64 queries each. A step of a warpgroup asks for the scores of one key block and for p v of the block before it, then
// turns the scores into p while the second product runs. The warpgroups take turns in asking, so that one's exponentials run beside
// the other's products. Three warpgroups with wide accumulators have no registers for that, and do one after the other.
//
// The bits are those of reference.py: every product is a chain over ascending k16 steps in one FP32 accumulator, key blocks come in
// the contract's order, and tiles, stages and turns only move work.
//
// Defines: D (64, 128), KEYS and FA2 (128, 0 or 64, 1), CAUSAL, PACKED, ELEMENT (1 BF16, 2 FP16), GROUPS (2, 3), STAGES.
#include "mma.cuh"
#include "place.cuh"
#include "softmax.cuh"

constexpr int ROWS = 64 * GROUPS, THREADS = 128 * (GROUPS + 1);
constexpr int QUERY_BYTES = ROWS * D * 2, BLOCK_BYTES = KEYS * D * 2;
constexpr bool FEW = GROUPS == 1;                       // queries: the rows of a tile are those of all heads of a group
constexpr bool BESIDE = GROUPS == 2 || KEYS + D < 256 || FEW;  // registers for the scores of one block beside p of another
constexpr int TURN = 1;                                 // and on: names of barriers, one for each warpgroup

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_forward(const __grid_constant__ tma::Map q, const __grid_constant__ tma::Map k,
                      const __grid_constant__ tma::Map v, element* out, float* lse, const i64* cu_q, const i64* cu_k, i64 documents,
                      i64 SQ, i64 SK, i64 heads, i64 group_size, double c_wide, double scale_wide,
                      double ln2_wide) {  // numbers that FP32 holds
  const int group = FEW ? (int)group_size : 1, size = FEW ? ROWS / group : ROWS;  // heads, and queries, of a tile
  const Place at = place_of<CAUSAL>(size, cu_q, cu_k, documents, SQ, SK);
  if (!at.here) return;
  extern __shared__ char dynamic[];
  const unsigned q_at = (shared_address(dynamic) + 1023) & ~1023u, k_at = q_at + QUERY_BYTES, v_at = k_at + STAGES * BLOCK_BYTES,
                 q_full = v_at + STAGES * BLOCK_BYTES, k_full = q_full + 8, v_full = k_full + 8 * STAGES,
                 k_empty = v_full + 8 * STAGES, v_empty = k_empty + 8 * STAGES, copied = v_empty + 8 * STAGES;
  const int queries = at.count, keys = at.other_count, first_query = at.tile * size;
  const int first_head = blockIdx.y * group, kv_head = FEW ? blockIdx.y : first_head / (int)group_size;
  const int shift = keys - queries;  // causal: query i sees the keys up to i + shift
  const int end = CAUSAL ? max(0, min(keys, first_query + size + shift)) : keys;
  const int blocks = (end + KEYS - 1) / KEYS;
  if (threadIdx.x == 0) {
    tma::init(q_full, 1), tma::init(copied, 1);
    for (int i = 0; i < STAGES; ++i) {
      tma::init(k_full + 8 * i, 1);
      tma::init(v_full + 8 * i, 1);
      tma::init(k_empty + 8 * i, 4 * GROUPS);  // one arrival of every warp that multiplies
      tma::init(v_empty + 8 * i, 4 * GROUPS);
    }
    tma::init_done();
    tma::written_for_async();
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);

  if (warpgroup == 0) {  // --- copies
    if constexpr (!FEW) wgmma::fewer_registers<GROUPS == 2 ? 24 : 32>();
    if (threadIdx.x < 32 && blocks > 0) {
      const bool asks = threadIdx.x == 0;
      if (asks) {
        if constexpr (FEW) {
          tma::expect(q_full, size * group * D * 2);
          for (int i = 0; i < D / 64; ++i) load_heads(q_at + i * ROWS * LINE, q, q_full, i, at.first + first_query, first_head, at.batch);
        } else {
          tma::expect(q_full, QUERY_BYTES);
          load_box(q_at, q, q_full, at.first + first_query, first_head, at.batch);
        }
      }
      for (int step = 0; step <= blocks; ++step) {
        if (step < blocks) {  // the keys of this block
          const int stage = step % STAGES, first = (FA2 ? blocks - 1 - step : step) * KEYS;
          tma::wait(k_empty + 8 * stage, (step / STAGES & 1) ^ 1);
          if (asks) {
            tma::expect(k_full + 8 * stage, BLOCK_BYTES);
            load_box(k_at + stage * BLOCK_BYTES, k, k_full + 8 * stage, at.other_first + first, kv_head, at.batch);
          }
        }
        if (step > 0) {  // the values of the one before
          const int stage = (step - 1) % STAGES, first = (FA2 ? blocks - step : step - 1) * KEYS;
          const unsigned box = v_at + stage * BLOCK_BYTES, full = v_full + 8 * stage;
          const bool clears = PACKED && keys - first < KEYS;  // one block of a sequence
          tma::wait(v_empty + 8 * stage, ((step - 1) / STAGES & 1) ^ 1);
          if (asks) {
            tma::expect(clears ? copied : full, BLOCK_BYTES);
            load_box(box, v, clears ? copied : full, at.other_first + first, kv_head, at.batch);
          }
          if (clears) {
            tma::wait(copied, 0);
            clear_rows<KEYS>(box, keys - first);
            tma::written_for_async();
            __syncwarp();
            if (asks) tma::arrive(full);
          }
        }
      }
    }
  } else {  // --- products
    if constexpr (!FEW) wgmma::more_registers<GROUPS == 2 ? 240 : 160>();
    const float c = (float)c_wide;
    const int mine = warpgroup - 1, thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32, quad = lane % 4;
    // The query of a row of the tile, and its head, which is none behind the last.
    auto query_of = [&](int row) { return first_query + (FEW ? row / group : row); };
    auto head_of = [&](int row) { return first_head + (FEW ? row % group : 0); };
    auto here = [&](int row) { return query_of(row) < queries && (!FEW || row < size * group); };
    const int row = mine * 64 + warp * 16 + lane / 4;
    Rows rows;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      rows.m[r] = -INFINITE, rows.sum[r] = 0.0f, rows.a[r] = 0.0f;
      rows.last[r] = CAUSAL ? min(query_of(row + 8 * r) + shift, keys - 1) : keys - 1;
    }
    const int seen_by_all = CAUSAL ? max(0, min(keys, query_of(mine * 64) + 1 + shift)) : keys;
    const int seen = min(seen_by_all / KEYS, blocks);  // blocks without a mask
    float o[D / 2], s[KEYS / 2];
    unsigned p[KEYS / 16][4];
#pragma unroll
    for (int i = 0; i < D / 2; ++i) o[i] = 0.0f;

    const unsigned long long q_tile = k_major(q_at + mine * 64 * LINE);
    auto ask_scores = [&](int stage) {
      const unsigned long long block = k_major(k_at + stage * BLOCK_BYTES);
#pragma unroll
      for (int i = 0; i < D / 16; ++i)  // descriptors count in 16 bytes
        wgmma::add<KEYS, false, false>(s, q_tile + (i / 4 * ROWS * LINE + i % 4 * 32) / 16, block + (i / 4 * KEYS * LINE + i % 4 * 32) / 16, i > 0);
      wgmma::commit();
    };
    auto ask_values = [&](int stage) {
      const unsigned long long block = mn_major(v_at + stage * BLOCK_BYTES, KEYS * LINE);
#pragma unroll
      for (int i = 0; i < KEYS / 16; ++i) wgmma::add<D, true>(o, p[i], block + i * 16 * LINE / 16);
      wgmma::commit();
    };
    auto round_p = [&]() {
#pragma unroll
      for (int i = 0; i < KEYS / 4; ++i) p[i / 4][i % 4] = pair_of(s[2 * i], s[2 * i + 1]);
    };
    auto rescale = [&]() {
#pragma unroll
      for (int i = 0; i < D / 2; ++i) o[i] = mul(o[i], rows.a[i / 2 % 2]);
    };
    auto block_of = [&](int step) { return FA2 ? blocks - 1 - step : step; };
    auto has_mask = [&](int step) { return block_of(step) >= seen; };
    auto release = [&](unsigned empty) {
      if (lane == 0) tma::arrive(empty);
    };
    // The scores of block `step` beside p v of the one before it.
    auto beside = [&](int step, auto masked) {
      const int k_stage = step % STAGES, v_stage = (step - 1) % STAGES;
      if (!FEW) tma::meet(TURN + mine, 256);
      wgmma::pin(s), wgmma::pin(o);
      wgmma::fence();
      ask_scores(k_stage);
      tma::wait(v_full + 8 * v_stage, (step - 1) / STAGES & 1);
      ask_values(v_stage);
      if (!FEW) tma::come(TURN + (mine + 1) % GROUPS, 256);
      wgmma::wait<1>();
      wgmma::pin(s);
      release(k_empty + 8 * k_stage);
      advance<decltype(masked)::value>(s, rows, block_of(step) * KEYS + 2 * quad, c);
      wgmma::pin(s);
      // The next keys are awaited here because this branch keeps the assembler from moving the exponentials behind the wait below.
      if (step + 1 < blocks) tma::wait(k_full + 8 * ((step + 1) % STAGES), (step + 1) / STAGES & 1);
      wgmma::wait<0>();
      wgmma::pin(o);
      release(v_empty + 8 * v_stage);
      round_p();
      rescale();
    };
    // The scores of block `step`, then its p v: the other warpgroups fill the gaps.
    auto apart = [&](int step, auto masked) {
      const int stage = step % STAGES, phase = step / STAGES & 1;
      tma::wait(k_full + 8 * stage, phase);
      wgmma::pin(s);
      wgmma::fence();
      ask_scores(stage);
      wgmma::wait<0>();
      wgmma::pin(s), wgmma::pin(o);
      release(k_empty + 8 * stage);
      advance<decltype(masked)::value>(s, rows, block_of(step) * KEYS + 2 * quad, c);
      rescale();
      round_p();
      tma::wait(v_full + 8 * stage, phase);
      wgmma::pin(o);
      wgmma::fence();
      ask_values(stage);
      wgmma::wait<0>();
      wgmma::pin(o);
      release(v_empty + 8 * stage);
    };
    // Blocks with and without a mask, in the contract's order.
    auto pass = [&](int first, const auto& work) {
      int step = first;
      if (FA2) {
        for (; step < blocks - seen; ++step) work(step, Yes());
        for (; step < blocks; ++step) work(step, No());
      } else {
        for (; step < seen; ++step) work(step, No());
        for (; step < blocks; ++step) work(step, Yes());
      }
    };

    if (blocks > 0) {
      if (BESIDE && !FEW && mine == GROUPS - 1) tma::come(TURN, 256);
      tma::wait(q_full, 0);
      if constexpr (BESIDE) {
        tma::wait(k_full, 0);
        wgmma::fence();
        ask_scores(0);
        wgmma::wait<0>();
        wgmma::pin(s);
        release(k_empty);
        if (has_mask(0))
          advance<true>(s, rows, block_of(0) * KEYS + 2 * quad, c);
        else
          advance<false>(s, rows, block_of(0) * KEYS + 2 * quad, c);
        round_p();  // o is +0, so the first factor a = 0 changes nothing
        if (blocks > 1) tma::wait(k_full + 8 * (1 % STAGES), 1 / STAGES & 1);
        pass(1, beside);
        const int v_stage = (blocks - 1) % STAGES;
        tma::wait(v_full + 8 * v_stage, (blocks - 1) / STAGES & 1);
        wgmma::pin(o);
        wgmma::fence();
        ask_values(v_stage);
        wgmma::wait<0>();
        wgmma::pin(o);
      } else {
        pass(0, apart);
      }
    }

    // --- results: the partial sums of a row are in the four threads of a quad
    const float scale = (float)scale_wide, ln2 = (float)ln2_wide;
    bool nothing[2];
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float total = total_of(rows.sum[r]);
      nothing[r] = total == 0.0f;
      inverse[r] = inverse_of(total);
      if (quad == 0 && here(row + 8 * r)) {
        const float logs = add(mul(rows.m[r], scale), mul(log2_portable(nothing[r] ? 1.0f : total), ln2));
        lse[((i64)at.batch * heads + head_of(row + 8 * r)) * SQ + at.first + query_of(row + 8 * r)] = nothing[r] ? -INFINITE : logs;
      }
    }
    // Through shared memory, where this warp's queries lay, with the swizzle that keeps its banks apart, into whole lines.
    const unsigned scratch = q_at + mine * 64 * LINE;
#pragma unroll
    for (int i = 0; i < D / 4; ++i) {
      const int r = i % 2, piece = i / 2;  // of 8 elements, 16 bytes
      const float low = nothing[r] ? 0.0f : mul(o[2 * i], inverse[r]), high = nothing[r] ? 0.0f : mul(o[2 * i + 1], inverse[r]);
      const int line = warp * 16 + lane / 4 + 8 * r;
      const unsigned from = scratch + piece / 8 * ROWS * LINE + line * LINE + ((piece % 8 ^ line % 8) * 16 + quad * 4);
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(from), "r"(pair_of(low, high)) : "memory");
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {  // 32 pieces at a time of this warp's 16 rows
      const int index = i * 32 + lane, piece = index % (D / 8), line = warp * 16 + index / (D / 8);
      const int place = mine * 64 + line;
      const unsigned from = scratch + piece / 8 * ROWS * LINE + line * LINE + ((piece % 8 ^ line % 8) * 16);
      uint4 eight;
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(eight.x), "=r"(eight.y), "=r"(eight.z), "=r"(eight.w)
                   : "r"(from)
                   : "memory");
      const i64 to = (((i64)at.batch * SQ + at.first + query_of(place)) * heads + head_of(place)) * D + piece * 8;
      if (here(place)) *reinterpret_cast<uint4*>(out + to) = eight;
    }
  }
}
