// One token's experts: the router's logits by all blocks of the kernel that needs them, and the choice by each of them
// (design section 7).
#pragma once
#include "common.cuh"

#if DTYPE != 0
constexpr int MAX_EXPERTS = 512;
constexpr int MAX_TOP_K = 16;
constexpr int ONE_WARPS = 8;
constexpr int SPAN = 32 * VEC;  // elements of a row that a warp takes at once
constexpr int BLOCK_SPAN = ONE_WARPS * SPAN, BLOCK_SPANS = 2;  // that a block takes at once, and how often
constexpr u32 POLLS = 1u << 24;   // of the other blocks' logits until it is given up: ten seconds and more
// KiB in flight of a warp. The first takes more than half of shared memory on purpose, as gemm_skinny.cu says; the
// second fits beside it, and beside the product that follows. With 11 (a compile-time variant, ops/cuda_variants.py) the
// first fits beside the product before it, if that has a ring of 16.
#ifndef GATE_UP_RING
#define GATE_UP_RING 14
#endif
constexpr int DOWN_RING = 8;
constexpr int ROUTER_SHARE = GATE_UP_RING;  // experts of a block whose logits it makes: rows lie where the rings will be
constexpr int AHEAD_PIECE = 4096;
static_assert(ROUTER_SHARE * BLOCK_SPANS * BLOCK_SPAN * 2 <= ONE_WARPS * GATE_UP_RING * 1024, "rows lie in the rings");

struct OneParams {
  const T* x;           // [hidden]
  const T* norm;        // [hidden]: as in RouterParams, with `router` alone
  T* normed;            // [hidden], or null
  const T* router;      // [experts, hidden]; null: moe_router_one has made the logits
  float* logits;        // [experts]
  u64* told;            // [max(slots, MAX_EXPERTS)]: a logit and, in the high half, the launch's number; with `router`
  const T* gate_up;     // [experts, 2 * inner, hidden], gate rows first
  const T* down;        // [experts, hidden, inner]
  T* acted;             // [top_k, inner], in the order of the experts' numbers
  const T* residual;    // [hidden] or null; may be `out`
  T* out;               // [hidden]
  int* index;           // [top_k], likeliest first
  float* weight;        // [top_k]
  const u8* ahead;      // what the layer after this one reads first: the blocks ask the L2 for it in turn; or null
  int experts, top_k, hidden, inner, normalize;
  int slots;  // at least `experts` and any launch's blocks, at most ROUTER_SHARE times this one's
  int ahead_bytes;  // of each block, in whole pieces of AHEAD_PIECE
  float eps;
};

DEVICE Vec load_shared(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return *reinterpret_cast<Vec*>(&v);
}
// The two elements of a word.
DEVICE float low(u32 pair) { return to_float(T{u16(pair)}); }
DEVICE float high(u32 pair) {
#if DTYPE == 1
  return __uint_as_float(pair & 0xffff0000u);
#else
  return to_float(T{u16(pair >> 16)});
#endif
}
// Keeps the compiler from holding a vector's elements apart from here on.
DEVICE void keep_packed(Vec& v) {
  uint4& x = *reinterpret_cast<uint4*>(&v);
  asm volatile("" : "+r"(x.x), "+r"(x.y), "+r"(x.z), "+r"(x.w));
}
// Two words at once: each is whole, and comes from the L2, where all blocks see the same.
DEVICE void load_words(const u64* from, u64& a, u64& b) {
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0,%1}, [%2];" : "=l"(a), "=l"(b) : "l"(from) : "memory");
}
DEVICE u64 load_word(const u64* from) {
  u64 v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
  return v;
}
DEVICE void store_word(u64* to, u64 v) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(v) : "memory");
}
DEVICE Vec load_vec(const T* from) { return *reinterpret_cast<const Vec*>(from); }
DEVICE Vec zero_vec() {
  uint4 v = make_uint4(0, 0, 0, 0);
  return *reinterpret_cast<Vec*>(&v);
}
// Sum of the products, two elements at a time out of their 32-bit words: as separate values they would take twice the
// registers.
DEVICE float dot(const Vec& a, const Vec& b, float sum) {
  const uint4 x = *reinterpret_cast<const uint4*>(&a), y = *reinterpret_cast<const uint4*>(&b);
  const u32 left[4] = {x.x, x.y, x.z, x.w}, right[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum = fmaf(low(left[i]), low(right[i]), sum);
    sum = fmaf(high(left[i]), high(right[i]), sum);
  }
  return sum;
}

DEVICE Vec scaled(const Vec& a, float scale, const Vec& b) {
  const uint4 x = *reinterpret_cast<const uint4*>(&a), y = *reinterpret_cast<const uint4*>(&b);
  uint4 v;
  v.x = pack2(low(x.x) * scale * low(y.x), high(x.x) * scale * high(y.x));
  v.y = pack2(low(x.y) * scale * low(y.y), high(x.y) * scale * high(y.y));
  v.z = pack2(low(x.z) * scale * low(y.z), high(x.z) * scale * high(y.z));
  v.w = pack2(low(x.w) * scale * low(y.w), high(x.w) * scale * high(y.w));
  return *reinterpret_cast<Vec*>(&v);
}

// The block's share of what the next layer reads, for the L2. While the router decides, nobody knows what to read, and the
// memory would rest; nothing waits for it.
DEVICE void fetch_ahead(const OneParams& p) {
#if __CUDA_ARCH__ >= 900
  if (p.ahead == nullptr) return;
  for (int at = threadIdx.x * AHEAD_PIECE; at < p.ahead_bytes; at += ONE_WARPS * 32 * AHEAD_PIECE) {
    const u8* from = p.ahead + i64(blockIdx.x) * p.ahead_bytes + at;
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(AHEAD_PIECE) : "memory");
  }
#endif
}

// The block's share of the router: logits of the experts blockIdx.x, blockIdx.x + gridDim.x, ..., and the norm before
// them, which leaves x in shared memory. Returns the launch's number, in warp 0.
//
// Blocks tell each other their logits in words that also hold that number: a reader knows of each word by itself
// whether it is this launch's, so there is neither counter nor fence, and a logit costs one way through the L2. Every
// launch writes all slots, each block its own, so all hold the number of the launch before, which a block learns from a
// slot that only it writes; a graph's replays need nothing reset.
DEVICE u32 router_share(const OneParams& p, u32 rows, T* x) {
  __shared__ float scratch[ONE_WARPS];
  __shared__ float sums[ROUTER_SHARE][ONE_WARPS];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int count = 0;
  for (int expert = blockIdx.x; expert < p.experts; expert += gridDim.x, ++count) {
#pragma unroll
    for (int j = 0; j < BLOCK_SPANS; ++j) {
      const int at = j * BLOCK_SPAN + threadIdx.x * VEC;
      const bool valid = at < p.hidden;
      const T* from = valid ? p.router + i64(expert) * p.hidden + at : p.router;
      copy16(rows + (count * BLOCK_SPANS + j) * BLOCK_SPAN * 2, from, valid);
    }
  }
  copy_commit();
  Vec scales[BLOCK_SPANS], v[BLOCK_SPANS];
#pragma unroll
  for (int j = 0; j < BLOCK_SPANS; ++j) {
    const int at = j * BLOCK_SPAN + threadIdx.x * VEC;
    scales[j] = p.norm != nullptr && at < p.hidden ? load_vec(p.norm + at) : zero_vec();
  }
  fetch_ahead(p);
  pdl_wait();
  const int slot = blockIdx.x + lane * gridDim.x;  // warp 0: a lane has the block's lane-th expert
  const bool mine = warp == 0 && slot < p.slots;
  u32 number = mine ? u32(load_word(p.told + slot) >> 32) + 1u : 0u;
#pragma unroll
  for (int j = 0; j < BLOCK_SPANS; ++j) {
    const int at = j * BLOCK_SPAN + threadIdx.x * VEC;
    v[j] = at < p.hidden ? load_vec(p.x + at) : zero_vec();
  }
  if (p.norm != nullptr) {
    float squares = 0.f;
#pragma unroll
    for (int j = 0; j < BLOCK_SPANS; ++j) squares = dot(v[j], v[j], squares);
    const float scale = 1.f / sqrtf(block_sum(squares, scratch) / float(p.hidden) + p.eps);
#pragma unroll
    for (int j = 0; j < BLOCK_SPANS; ++j) {
      const int at = j * BLOCK_SPAN + threadIdx.x * VEC;
      v[j] = scaled(v[j], scale, scales[j]);
      if (blockIdx.x == 0 && p.normed != nullptr && at < p.hidden) *reinterpret_cast<Vec*>(p.normed + at) = v[j];
    }
  }
#pragma unroll
  for (int j = 0; j < BLOCK_SPANS; ++j) {
    const int at = j * BLOCK_SPAN + threadIdx.x * VEC;
    if (at < p.hidden) *reinterpret_cast<Vec*>(x + at) = v[j];
  }
  copy_wait<0>();
  for (int i = 0; i < count; ++i) {
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < BLOCK_SPANS; ++j) {
      sum = dot(v[j], load_shared(rows + (i * BLOCK_SPANS + j) * BLOCK_SPAN * 2), sum);
    }
    sum = warp_sum(sum);
    if (lane == 0) sums[i][warp] = sum;
  }
  __syncthreads();
  if (mine) {
    float logit = 0.f;
    if (slot < p.experts) {
#pragma unroll
      for (int w = 0; w < ONE_WARPS; ++w) logit += sums[lane][w];
      p.logits[slot] = logit;
    }
    store_word(p.told + slot, u64(number) << 32 | __float_as_uint(logit));
  }
  return __shfl_sync(0xffffffffu, number, 0);
}

// By one warp: the logits, of experts lane * EACH on in a lane. Waits until all blocks have told theirs.
//
// They all do: a block waits here only behind pdl_wait(), when every kernel before this one is over; nothing after it
// starts before all of its blocks have come past here; and its blocks, one a multiprocessor of those that are the
// kernels' to use, find room at once. Were there less room after all, the launch fails instead of hanging.
template <int EACH>
DEVICE void hear(const OneParams& p, u32 number, float (&logit)[EACH]) {
  const int first = (threadIdx.x & 31) * EACH;
  for (u32 polls = 0;; ++polls) {
    bool all = true;
#pragma unroll
    for (int j = 0; j < EACH; j += 2) {
      u64 word[2];
      load_words(p.told + first + j, word[0], word[1]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool there = first + j + i < p.experts;
        all = all && (!there || u32(word[i] >> 32) == number);
        logit[j + i] = there ? __uint_as_float(u32(word[i])) : -INFINITY_F;
      }
    }
    if (__all_sync(0xffffffffu, all)) return;
    if (polls == POLLS) asm volatile("trap;");
  }
}

// moe.cu's route() for one token by one warp: lane k gets the k-th likeliest and its weight. A lane has the logits of
// the experts lane * EACH on, so that of equals the lowest lane's first is the lowest expert.
template <int EACH>
DEVICE void choose(const OneParams& p, const float (&logit)[EACH], int& index, float& weight) {
  const int lane = threadIdx.x & 31;
  u32 key[EACH];  // order of the likelihoods; 0: not there, or taken
  float top = -INFINITY_F, sum = 0.f;
#pragma unroll
  for (int j = 0; j < EACH; ++j) top = fmaxf(top, logit[j]);
  top = warp_max(top);
#pragma unroll
  for (int j = 0; j < EACH; ++j) {
    const bool there = lane * EACH + j < p.experts;
    const float likelihood = there ? expf(logit[j] - top) : 0.f;
    sum += likelihood;
    key[j] = there ? (__float_as_uint(likelihood) & 0x7fffffffu) + 1u : 0u;
  }
  sum = warp_sum(sum);
  u32 mine = 1;
  index = 0;
  for (int k = 0; k < p.top_k; ++k) {
    u32 best = 0;
#pragma unroll
    for (int j = 0; j < EACH; ++j) best = max(best, key[j]);
    const u32 most = __reduce_max_sync(0xffffffffu, best);
    const int winner = __ffs(__ballot_sync(0xffffffffu, best == most)) - 1;
    int at = 0;
#pragma unroll
    for (int j = EACH - 1; j >= 0; --j) at = key[j] == most ? j : at;
#pragma unroll
    for (int j = 0; j < EACH; ++j) key[j] = lane == winner && j == at ? 0u : key[j];
    at = winner * EACH + __shfl_sync(0xffffffffu, at, winner);
    if (lane == k) {
      index = at;
      mine = most;
    }
  }
  weight = sum != sum ? NAN_F : __uint_as_float(mine - 1u) / sum;
  if (p.normalize != 0) {
    float all = 0.f;
    for (int k = 0; k < p.top_k; ++k) all += __shfl_sync(0xffffffffu, weight, k);
    weight /= all;
  }
}

template <int EACH>
DEVICE void choose_of(const OneParams& p, u32 number, int& index, float& weight) {
  float logit[EACH];
  if (p.router != nullptr) {
    hear<EACH>(p, number, logit);
  } else {
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
      const int e = (threadIdx.x & 31) * EACH + j;
      logit[j] = e < p.experts ? __ldcg(p.logits + e) : -INFINITY_F;
    }
  }
  choose<EACH>(p, logit, index, weight);
}

// What one block knows of the choice: experts and weights in the order of the experts' numbers.
struct Chosen {
  int expert[MAX_TOP_K];
  float weight[MAX_TOP_K];
};

// By one warp, whose lane k has the k-th likeliest.
DEVICE void in_order(const OneParams& p, int index, float weight, Chosen& chosen) {
  const int lane = threadIdx.x & 31;
  int rank = 0;
  for (int k = 0; k < p.top_k; ++k) {
    const int other = __shfl_sync(0xffffffffu, index, k);
    rank += other < index || (other == index && k < lane) ? 1 : 0;
  }
  if (lane >= p.top_k) return;
  chosen.expert[rank] = index;
  chosen.weight[rank] = weight;
}
#endif
