// A mixture of experts for one token in 16-bit types (design section 7), two kernels instead of moe.cu's and
// gemm_skinny.cu's five: decode at batch 1 is bound by reading the chosen experts, and by what lies between two
// products. A third, moe_router_one, is for where not all blocks of one launch are sure to run at once.
#include "moe_choice.cuh"

#if DTYPE != 0
struct RouterParams {
  const T* x;       // [hidden]
  const T* norm;    // [hidden]: x is divided by its root mean square and multiplied by this first; or null
  T* normed;        // [hidden]: what norm made of x, or null
  const T* router;  // [experts, hidden]
  float* logits;    // [experts]
  int experts, hidden;
  float eps;
};

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
  u32 number = 0;
  if (p.router != nullptr) {
    number = router_share(p, shared_address(memory) + threadIdx.x * 16, x);
  } else {
    fetch_ahead(p);
    pdl_wait();
    for (int i = threadIdx.x * VEC; i < p.hidden; i += BLOCK_SPAN) *reinterpret_cast<Vec*>(x + i) = load_vec(p.x + i);
  }
  if (warp == 0) {
    int index;
    float weight;
    if (p.experts <= 128) {
      choose_of<4>(p, number, index, weight);
    } else {
      choose_of<MAX_EXPERTS / 32>(p, number, index, weight);
    }
    if (blockIdx.x == 0 && lane < p.top_k) {
      p.index[lane] = index;
      p.weight[lane] = weight;
    }
    in_order(p, index, weight, chosen);
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
  // moe_down_one starts once a thread of every block has come here, and reads the choice without waiting for this
  // kernel's end: block 0 wrote it with the warp that lets it start, and the fence has it in the L2 by then.
  if (warp == 0) {
    if (blockIdx.x == 0) __threadfence();
    __syncwarp();
    pdl_launch();
  }
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

// out = residual + sum of weight * (down acted), the experts in the order of their numbers; a warp makes two outputs at
// once, whose rows lie together. Dynamic shared memory: the warps' rings, then top_k * inner elements.
DEVICE void down_one(const OneParams& p) {
  constexpr int STAGES = DOWN_RING;  // of a KiB: 256 elements of either row
  extern __shared__ __align__(16) u8 memory[];
  __shared__ Chosen chosen;
  T* acted = reinterpret_cast<T*>(memory + ONE_WARPS * DOWN_RING * 1024);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const u32 ring = shared_address(memory) + warp * DOWN_RING * 1024 + lane * 16;
  const u64 policy = streaming_policy();
  // The choice is there: moe_gate_up_one says why.
  if (warp == 0) {
    const bool there = lane < p.top_k;
    in_order(p, there ? __ldcg(p.index + lane) : 0, there ? __ldcg(p.weight + lane) : 0.f, chosen);
  }
  __syncthreads();
  const int stride = gridDim.x * ONE_WARPS * 2, spans = (p.inner + SPAN - 1) / SPAN;
  const int begin = (blockIdx.x * ONE_WARPS + warp) * 2;
  int ahead = begin, place = 0, ahead_span = 0, slot = 0;  // what is fetched next
  const T* from = p.down;
  auto open = [&]() {
    if (ahead < p.hidden) from = p.down + (i64(chosen.expert[place]) * p.hidden + ahead) * p.inner + lane * VEC;
  };
  auto fetch = [&]() {
    if (ahead < p.hidden) {
      const bool valid = ahead_span * SPAN + lane * VEC < p.inner;
      const T* row = valid ? from + ahead_span * SPAN : p.down;
      stream16(ring + slot * 1024, row, valid, policy);
      stream16(ring + slot * 1024 + 512, valid ? row + p.inner : row, valid, policy);
      slot = slot + 1 == STAGES ? 0 : slot + 1;
      if (++ahead_span == spans) {
        ahead_span = 0;
        if (++place == p.top_k) {
          place = 0;
          ahead += stride;
        }
        open();
      }
    }
    copy_commit();
  };
  open();
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) fetch();
  pdl_launch();  // before the wait: the product behind fills its rings meanwhile
  pdl_wait();
  for (int i = threadIdx.x * VEC; i < p.top_k * p.inner; i += ONE_WARPS * 32 * VEC) {
    *reinterpret_cast<Vec*>(acted + i) = load_vec(p.acted + i);
  }
  __syncthreads();
  int used = 0;
  for (int output = begin; output < p.hidden; output += stride) {
    float first = 0.f, second = 0.f;
    const float residual = lane < 2 && p.residual != nullptr ? to_float(p.residual[output + lane]) : 0.f;
    for (int j = 0; j < p.top_k; ++j) {
      float a = 0.f, b = 0.f;
      for (int span = 0; span < spans; ++span) {
        copy_wait<STAGES - 2>();
        const Vec v = load_shared(ring + used * 1024), w = load_shared(ring + used * 1024 + 512);
        used = used + 1 == STAGES ? 0 : used + 1;
        fetch();
        const int at = span * SPAN + lane * VEC;
        const Vec x = at < p.inner ? load_vec(acted + j * p.inner + at) : zero_vec();
        a = dot(v, x, a);
        b = dot(w, x, b);
      }
      first = fmaf(chosen.weight[j], a, first);
      second = fmaf(chosen.weight[j], b, second);
    }
    first = warp_sum(first);
    second = warp_sum(second);
    if (lane < 2) p.out[output + lane] = from_float<T>((lane == 0 ? first : second) + residual);
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
