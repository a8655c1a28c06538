// A mixture of experts for one token in 16-bit types (design section 7), three kernels instead of moe.cu's and
// gemm_skinny.cu's five: decode at batch 1 is bound by reading the chosen experts, and by what lies between two products.
#include "common.cuh"

#if DTYPE != 0
constexpr int MAX_EXPERTS = 512;
constexpr int MAX_TOP_K = 16;
constexpr int ONE_WARPS = 8;
constexpr int SPAN = 32 * VEC;  // elements of a row that a warp takes at once
// KiB in flight of a warp. The first takes more than half of shared memory on purpose, as gemm_skinny.cu says; the second
// fits beside it, and beside the product that follows.
constexpr int GATE_UP_RING = 14, DOWN_RING = 8;

struct RouterParams {
  const T* x;       // [hidden]
  const T* norm;    // [hidden]: x is divided by its root mean square and multiplied by this first; or null
  T* normed;        // [hidden]: what norm made of x, or null
  const T* router;  // [experts, hidden]
  float* logits;    // [experts]
  int experts, hidden;
  float eps;
};

struct OneParams {
  const T* x;           // [hidden]
  const float* logits;  // [experts]
  const T* gate_up;     // [experts, 2 * inner, hidden], gate rows first
  const T* down;        // [experts, hidden, inner]
  T* acted;             // [top_k, inner], in the order of the experts' numbers
  const T* residual;    // [hidden] or null; may be `out`
  T* out;               // [hidden]
  int* index;           // [top_k], likeliest first
  float* weight;        // [top_k]
  int experts, top_k, hidden, inner, normalize;
  const void* ahead;  // what a product after these reads, or null: fetched into the L2 while the router works
  i64 ahead_bytes;
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

// Logits of the experts, one warp each, and the norm before them. A lane holds HELD vectors of a row.
template <int HELD>
DEVICE void router_one(const RouterParams& p) {
  const int lane = threadIdx.x & 31, expert = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
  const bool there = expert < p.experts;
  const T* row = p.router + i64(there ? expert : 0) * p.hidden;
  Vec w[HELD], scales[HELD], x[HELD];
  pdl_launch();
#pragma unroll
  for (int j = 0; j < HELD; ++j) {
    const int at = j * SPAN + lane * VEC;
    w[j] = at < p.hidden ? load_vec(row + at) : zero_vec();
    if (HELD <= 8 && p.norm != nullptr) scales[j] = at < p.hidden ? load_vec(p.norm + at) : zero_vec();
  }
  pdl_wait();
  float squares = 0.f;
#pragma unroll
  for (int j = 0; j < HELD; ++j) {
    const int at = j * SPAN + lane * VEC;
    x[j] = at < p.hidden ? load_vec(p.x + at) : zero_vec();
  }
  if (p.norm != nullptr) {
#pragma unroll
    for (int j = 0; j < HELD; ++j) {
      squares = dot(x[j], x[j], squares);
      keep_packed(x[j]);
    }
    const float scale = 1.f / sqrtf(warp_sum(squares) / float(p.hidden) + p.eps);
#pragma unroll
    for (int j = 0; j < HELD; ++j) {
      const int at = j * SPAN + lane * VEC;
      if (HELD > 8) scales[j] = at < p.hidden ? load_vec(p.norm + at) : zero_vec();
      x[j] = scaled(x[j], scale, scales[j]);
      if (expert == 0 && p.normed != nullptr && at < p.hidden) *reinterpret_cast<Vec*>(p.normed + at) = x[j];
    }
  }
  float sum = 0.f;
#pragma unroll
  for (int j = 0; j < HELD; ++j) sum = dot(x[j], w[j], sum);
  sum = warp_sum(sum);
  if (lane == 0 && there) p.logits[expert] = sum;
}

// route() for one token by one warp: lane k gets the k-th likeliest and its weight. Up to 32 * EACH experts.
template <int EACH>
DEVICE void choose(const OneParams& p, int& index, float& weight) {
  const int lane = threadIdx.x & 31;
  float logit[EACH];
  u32 key[EACH];  // order of the likelihoods; 0: not there, or taken
  float top = -INFINITY_F, sum = 0.f;
#pragma unroll
  for (int j = 0; j < EACH; ++j) {
    const int e = j * 32 + lane;
    logit[j] = e < p.experts ? __ldcg(p.logits + e) : -INFINITY_F;
    top = fmaxf(top, logit[j]);
  }
  top = warp_max(top);
#pragma unroll
  for (int j = 0; j < EACH; ++j) {
    const bool there = j * 32 + lane < p.experts;
    const float likelihood = there ? expf(logit[j] - top) : 0.f;
    sum += likelihood;
    key[j] = there ? (__float_as_uint(likelihood) & 0x7fffffffu) + 1u : 0u;
  }
  sum = warp_sum(sum);
  float all = 0.f;
  index = 0;
  weight = 0.f;
  for (int k = 0; k < p.top_k; ++k) {
    u32 best = 0;
    int at = 0x7fffffff;
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
      if (key[j] > best) {
        best = key[j];
        at = j * 32 + lane;
      }
    }
    const u32 most = __reduce_max_sync(0xffffffffu, best);
    at = int(__reduce_min_sync(0xffffffffu, best == most ? u32(at) : 0x7fffffffu));
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
      if (j * 32 + lane == at) key[j] = 0;
    }
    const float value = __uint_as_float(most - 1u) / sum;
    all += value;
    if (lane == k) {
      index = min(at, p.experts - 1);
      weight = value;
    }
  }
  if (sum != sum) weight = NAN_F;
  if (p.normalize != 0) weight /= all;
}

// What one block knows of the choice: experts and weights in the order of the experts' numbers.
struct Chosen {
  int expert[MAX_TOP_K];
  float weight[MAX_TOP_K];
};

// By warp 0. `told`: this block also writes the choice to memory.
DEVICE void choose_all(const OneParams& p, Chosen& chosen, bool told) {
  const int lane = threadIdx.x & 31;
  int index, rank = 0;
  float weight;
  if (p.experts <= 128) {
    choose<4>(p, index, weight);
  } else {
    choose<MAX_EXPERTS / 32>(p, index, weight);
  }
  for (int k = 0; k < p.top_k; ++k) {
    const int other = __shfl_sync(0xffffffffu, index, k);
    rank += other < index || (other == index && k < lane) ? 1 : 0;
  }
  if (lane >= p.top_k) return;
  chosen.expert[rank] = index;
  chosen.weight[rank] = weight;
  if (told) {
    p.index[lane] = index;
    p.weight[lane] = weight;
  }
}

// acted = silu(gate) * up of every chosen expert; a warp makes an output. Dynamic shared memory: the warps' rings, then
// x. A thread uses only what it copied into its ring itself: no barriers.
DEVICE void gate_up_one(const OneParams& p) {
  constexpr int STAGES = GATE_UP_RING;  // of a KiB: 256 elements of a gate row and of its up row
  extern __shared__ __align__(16) u8 memory[];
  __shared__ Chosen chosen;
  T* x = reinterpret_cast<T*>(memory + ONE_WARPS * GATE_UP_RING * 1024);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const u32 ring = shared_address(memory) + warp * GATE_UP_RING * 1024 + lane * 16;
  const u64 policy = streaming_policy();
  if (p.ahead != nullptr) {
    prefetch_share(p.ahead, p.ahead_bytes, threadIdx.x * gridDim.x + blockIdx.x, i64(gridDim.x) * blockDim.x);
  }
  pdl_wait();
  pdl_launch();  // not before: what follows reads the router's logits without waiting for this kernel
  if (warp == 0) {
    choose_all(p, chosen, blockIdx.x == 0);
  } else {
    for (int i = (threadIdx.x - 32) * VEC; i < p.hidden; i += (ONE_WARPS - 1) * 32 * VEC) {
      *reinterpret_cast<Vec*>(x + i) = load_vec(p.x + i);
    }
  }
  __syncthreads();
  const int tasks = p.top_k * p.inner, stride = gridDim.x * ONE_WARPS;
  const int spans = (p.hidden + SPAN - 1) / SPAN;
  const i64 to_up = i64(p.inner) * p.hidden;
  int ahead = blockIdx.x * ONE_WARPS + warp, ahead_span = 0, slot = 0;  // what is fetched next
  const T* from = p.gate_up;
  auto open = [&]() {
    if (ahead >= tasks) return;
    const int place = ahead / p.inner, output = ahead - place * p.inner;
    from = p.gate_up + (i64(chosen.expert[place]) * 2 * p.inner + output) * p.hidden + lane * VEC;
  };
  auto fetch = [&]() {
    if (ahead < tasks) {
      const bool valid = ahead_span * SPAN + lane * VEC < p.hidden;
      const T* gate = valid ? from + ahead_span * SPAN : p.gate_up;
      stream16(ring + slot * 1024, gate, valid, policy);
      stream16(ring + slot * 1024 + 512, valid ? gate + to_up : gate, valid, policy);
      slot = slot + 1 == STAGES ? 0 : slot + 1;
      if (++ahead_span == spans) {
        ahead_span = 0;
        ahead += stride;
        open();
      }
    }
    copy_commit();
  };
  open();
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) fetch();
  int used = 0;
  for (int task = blockIdx.x * ONE_WARPS + warp; task < tasks; task += stride) {
    float gate = 0.f, up = 0.f;
    for (int span = 0; span < spans; ++span) {
      copy_wait<STAGES - 2>();
      const Vec g = load_shared(ring + used * 1024), u = load_shared(ring + used * 1024 + 512);
      used = used + 1 == STAGES ? 0 : used + 1;
      fetch();
      const int at = span * SPAN + lane * VEC;
      const Vec v = at < p.hidden ? load_vec(x + at) : zero_vec();
      gate = dot(g, v, gate);
      up = dot(u, v, up);
    }
    gate = warp_sum(gate);
    up = warp_sum(up);
    if (lane == 0) p.acted[task] = from_float<T>(silu_mul(gate, up));
  }
  copy_wait<0>();
}

// out = residual + sum of weight * (down acted), the experts in the order of their numbers; a warp makes an output.
// Dynamic shared memory: the warps' rings, then top_k * inner elements.
DEVICE void down_one(const OneParams& p) {
  constexpr int STAGES = DOWN_RING * 2;  // of 512 bytes: 256 elements of a row
  extern __shared__ __align__(16) u8 memory[];
  __shared__ Chosen chosen;
  T* acted = reinterpret_cast<T*>(memory + ONE_WARPS * DOWN_RING * 1024);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const u32 ring = shared_address(memory) + warp * DOWN_RING * 1024 + lane * 16;
  const u64 policy = streaming_policy();
  // The kernel before waited for the router's before it let this one start: the logits are there.
  if (warp == 0) choose_all(p, chosen, false);
  __syncthreads();
  const int stride = gridDim.x * ONE_WARPS, spans = (p.inner + SPAN - 1) / SPAN;
  int ahead = blockIdx.x * ONE_WARPS + warp, place = 0, ahead_span = 0, slot = 0;  // what is fetched next
  auto fetch = [&]() {
    if (ahead < p.hidden) {
      const int at = ahead_span * SPAN + lane * VEC;
      const bool valid = at < p.inner;
      const i64 row = i64(chosen.expert[place]) * p.hidden + ahead;
      stream16(ring + slot * 512, valid ? p.down + row * p.inner + at : p.down, valid, policy);
      slot = slot + 1 == STAGES ? 0 : slot + 1;
      if (++ahead_span == spans) {
        ahead_span = 0;
        if (++place == p.top_k) {
          place = 0;
          ahead += stride;
        }
      }
    }
    copy_commit();
  };
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) fetch();
  pdl_wait();
  pdl_launch();
  for (int i = threadIdx.x * VEC; i < p.top_k * p.inner; i += ONE_WARPS * 32 * VEC) {
    *reinterpret_cast<Vec*>(acted + i) = load_vec(p.acted + i);
  }
  __syncthreads();
  int used = 0;
  for (int output = blockIdx.x * ONE_WARPS + warp; output < p.hidden; output += stride) {
    float total = 0.f;
    for (int j = 0; j < p.top_k; ++j) {
      float sum = 0.f;
      for (int span = 0; span < spans; ++span) {
        copy_wait<STAGES - 2>();
        const Vec w = load_shared(ring + used * 512);
        used = used + 1 == STAGES ? 0 : used + 1;
        fetch();
        const int at = span * SPAN + lane * VEC;
        sum = dot(w, at < p.inner ? load_vec(acted + j * p.inner + at) : zero_vec(), sum);
      }
      total = fmaf(chosen.weight[j], sum, total);
    }
    total = warp_sum(total);
    if (lane == 0) {
      if (p.residual != nullptr) total += to_float(p.residual[output]);
      p.out[output] = from_float<T>(total);
    }
  }
  copy_wait<0>();
}

// A suffix is HELD, the 256-element pieces of a row.
extern "C" __global__ void __launch_bounds__(128, 4) moe_router_one_8(const __grid_constant__ RouterParams p) {
  router_one<8>(p);
}
extern "C" __global__ void __launch_bounds__(128) moe_router_one_16(const __grid_constant__ RouterParams p) {
  router_one<16>(p);
}
// Room for one block of each on a multiprocessor, so that the second fills its rings while the first still reads.
extern "C" __global__ void __launch_bounds__(ONE_WARPS * 32, 2) moe_gate_up_one(const __grid_constant__ OneParams p) {
  gate_up_one(p);
}
extern "C" __global__ void __launch_bounds__(ONE_WARPS * 32, 2) moe_down_one(const __grid_constant__ OneParams p) {
  down_one(p);
}
#endif
