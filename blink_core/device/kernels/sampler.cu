// Choosing each row's next token inside the step graph (design section 7), as blink_core/ops/sampling.py and logits.py
// define it: bias, mask, barred ids, repetition, presence and frequency penalties in float64, then temperature, top-k,
// top-p, min-p, and greedy or an exponential race; log probabilities of the raw logits. A cluster of PARTS blocks a row:
// they share out the pass over the raw logits, which is all that a greedy row needs, and the first does the rest.
//
// The race is run in float32 and its leaders, all within a margin far above float32's error, again in float64: the
// token is the float64 one.
#include "philox.cuh"
#include "sample_row.cuh"
#include "select.cuh"

struct Result {  // abi StepResult
  int token;
  float logprob;
  u32 status;
  u32 reserved;
};
enum Status : u32 { OK = 0, NAN_LOGITS = 1, FAILED = 2, NO_TOKEN = 3 };

struct SamplerParams {
  const float* logits;  // [samples, stride]; stride a multiple of 4
  i64 stride;
  const SampleRow* rows;
  const StepSizes* sizes;
  Result* results;
  int* top_tokens;  // [out, width]
  float* top_logprobs;
  double* work;    // [samples, stride]
  u32* counts;     // [running rows, vocab]: occurrences in the output, bit 31: in the prompt
  u64* owners;     // [running rows], 0: nobody's
  u32* counted;    // [running rows]: tokens of the owner counted already
  int vocab, width;
};

constexpr double SCALE = 35184372088832.0;  // 2^45: masses below 1 of 2^18 ids stay under 2^63
#ifndef PARTS
#define PARTS 1
#endif
#if PARTS > 1
#define CLUSTER __cluster_dims__(PARTS, 1, 1)
#else
#define CLUSTER
#endif
constexpr int AHEAD = 10;  // loads of the first pass under way: of 8 parts, all that a thread has of 163,840 ids
constexpr float MARGIN = 1e-3f;
constexpr float LUCKIEST = 23.f;  // greatest -log(-log(u)), rounded up

struct Best {
  double value;
  u32 id;
};
DEVICE Best better(Best a, Best b) { return b.value > a.value || (b.value == a.value && b.id < a.id) ? b : a; }

// The greatest value of the block and its lowest id, in every thread.
DEVICE Best block_best(Best x) {
  __shared__ double values[THREADS / 32];
  __shared__ u32 ids[THREADS / 32];
#pragma unroll
  for (int i = 16; i > 0; i >>= 1) {
    x = better(x, {__shfl_xor_sync(0xffffffffu, x.value, i), __shfl_xor_sync(0xffffffffu, x.id, i)});
  }
  __syncthreads();
  if ((threadIdx.x & 31) == 0) {
    values[threadIdx.x >> 5] = x.value;
    ids[threadIdx.x >> 5] = x.id;
  }
  __syncthreads();
  Best all = {values[0], ids[0]};
  for (int i = 1; i < THREADS / 32; ++i) all = better(all, {values[i], ids[i]});
  return all;
}
template <class N>
DEVICE N block_total(N x) {
  __shared__ N parts[THREADS / 32];
#pragma unroll
  for (int i = 16; i > 0; i >>= 1) x += __shfl_xor_sync(0xffffffffu, x, i);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) parts[threadIdx.x >> 5] = x;
  __syncthreads();
  N total = 0;
  for (int i = 0; i < THREADS / 32; ++i) total += parts[i];
  return total;
}

// What one block found in its part of the raw logits. total: of the exponentials, relative to its peak.
struct Scan {
  double peak, total;
  u32 id, bad;
};
static_assert(sizeof(Scan) == 24);

DEVICE u64 mass_of(double distance) {
  return distance < 40.0 ? u64(exp(-distance) * SCALE + 0.5) : 0;
}
// Order of float32 values as integers, the greatest first.
DEVICE u32 descending(float x) {
  const u32 bits = __float_as_uint(x == 0.f ? 0.f : x);
  return bits & 0x80000000u ? bits : ~(bits | 0x80000000u);
}

DEVICE bool usable(const SampleRow& r) {
  bool ok = r.temperature >= 0.f && r.temperature < INFINITY_F && r.top_p > 0.f && r.top_p <= 1.f && r.min_p >= 0.f &&
            r.min_p <= 1.f && r.repetition > 0.f && r.repetition < INFINITY_F && fabsf(r.presence) < INFINITY_F &&
            fabsf(r.frequency) < INFINITY_F;
  for (u32 i = 0; i < r.n_bias; ++i) ok = ok && fabsf(__int_as_float(r.bias[i].y)) < INFINITY_F;
  return ok;
}

// Brings the counts of a running row up to date: a new owner, or one that was resumed, is counted from the start.
DEVICE u32* update_counts(const SamplerParams& p, const SampleRow& r) {
  u32* counts = p.counts + i64(r.row) * p.vocab;
  u32 from = p.counted[r.row];
  if (p.owners[r.row] != r.owner || from > r.n_tokens) {
    for (int i = threadIdx.x; i < p.vocab; i += THREADS) counts[i] = 0;
    from = 0;
  }
  __syncthreads();
  for (u32 i = from + threadIdx.x; i < r.n_tokens; i += THREADS) {
    const u32 token = u32(r.tokens[i]);
    if (token >= u32(p.vocab)) continue;
    if (i < r.prompt_len) {
      atomicOr(&counts[token], 0x80000000u);
    } else {
      atomicAdd(&counts[token], 1u);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    p.owners[r.row] = r.owner;
    p.counted[r.row] = r.n_tokens;
  }
  return counts;
}

// work = logits after bias, mask, barred ids and penalties.
DEVICE void process(const SamplerParams& p, const SampleRow& r, const float* logits, double* work) {
  const bool penalised = r.repetition != 1.f || r.presence != 0.f || r.frequency != 0.f;
  const u32* counts = penalised ? update_counts(p, r) : nullptr;
#pragma unroll 8
  for (int i = threadIdx.x; i < p.vocab; i += THREADS) work[i] = logits[i];
  __syncthreads();
  for (u32 i = threadIdx.x; i < r.n_bias; i += THREADS) {
    const u32 id = u32(r.bias[i].x);
    if (id < u32(p.vocab)) atomicAdd(&work[id], double(__int_as_float(r.bias[i].y)));
  }
  __syncthreads();
  for (int i = threadIdx.x; i < p.vocab; i += THREADS) {
    double v = work[i];
    if (r.mask != nullptr && (r.mask[i >> 5] >> (i & 31) & 1) == 0) v = -double(INFINITY_F);
    if (penalised) {
      const u32 count = counts[i];
      if (count != 0 && r.repetition != 1.f) v = v > 0.0 ? v / double(r.repetition) : v * double(r.repetition);
      const u32 made = count & 0x7fffffffu;
      if (made != 0) v -= double(r.frequency) * made + double(r.presence);
    }
    work[i] = v;
  }
  __syncthreads();
  if (threadIdx.x < r.n_barred && u32(r.barred[threadIdx.x]) < u32(p.vocab)) {
    work[r.barred[threadIdx.x]] = -double(INFINITY_F);
  }
  __syncthreads();
}

extern "C" __global__ void CLUSTER __launch_bounds__(THREADS) sample_rows(const __grid_constant__ SamplerParams p) {
  __shared__ SelectMemory memory;
#if PARTS > 1
  __shared__ Scan scans[PARTS];
#endif
  pdl_launch();
  pdl_wait();
  const int row = blockIdx.x / PARTS, part = blockIdx.x % PARTS;
  if (row >= p.sizes->n_samples) return;  // the whole cluster
#if PARTS > 1
  cluster_arrive();
#endif
  const SampleRow& r = p.rows[row];
  const float* logits = p.logits + i64(row) * p.stride;
  double* work = p.work + i64(row) * p.stride;
  const int vocab = p.vocab, groups = (vocab + 3) / 4;
  const double minus_inf = -double(INFINITY_F);

  auto raw = [&](int group, float(&v)[4]) {
    const float4 f = reinterpret_cast<const float4*>(logits)[group];
    v[0] = f.x, v[1] = f.y, v[2] = f.z, v[3] = f.w;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (group * 4 + e >= vocab) v[e] = -INFINITY_F;
    }
  };
  // Raw logits: maximum, NaN or +inf, sum of exponentials.
  Best best = {minus_inf, 0xffffffffu};
  float top = -INFINITY_F, sum = 0.f;
  u32 bad = 0;
  const int each = (groups + PARTS - 1) / PARTS, end = min(groups, (part + 1) * each);
  for (int base = part * each + threadIdx.x; base < end; base += THREADS * AHEAD) {
    float ahead[AHEAD][4];
#pragma unroll
    for (int j = 0; j < AHEAD; ++j) {
      if (base + j * THREADS < end) raw(base + j * THREADS, ahead[j]);
    }
#pragma unroll
    for (int j = 0; j < AHEAD; ++j) {
      const int group = base + j * THREADS;
      if (group >= end) break;
      const float(&v)[4] = ahead[j];
      const float m = fmaxf(fmaxf(v[0], v[1]), fmaxf(v[2], v[3]));
      bad |= !(v[0] < INFINITY_F && v[1] < INFINITY_F && v[2] < INFINITY_F && v[3] < INFINITY_F);
      if (m > top) {
        sum *= __expf(top - m);
        top = m;
        const u32 e = v[0] == m ? 0 : v[1] == m ? 1 : v[2] == m ? 2 : 3;
        best = {m, u32(group) * 4 + e};
      }
      if (top > -INFINITY_F) sum += __expf(v[0] - top) + __expf(v[1] - top) + __expf(v[2] - top) + __expf(v[3] - top);
    }
  }
  best = block_best(best);
  bad = block_total(bad);
  double total = block_total(top > -INFINITY_F ? double(sum) * exp(double(top) - best.value) : 0.0);
#if PARTS > 1
  cluster_wait();
  if (threadIdx.x == 0) {
    const u32 to = shared_of(shared_address(scans + part), 0);
    store_cluster(to, __double_as_longlong(best.value));
    store_cluster(to + 8, __double_as_longlong(total));
    store_cluster(to + 16, u64(bad) << 32 | best.id);
  }
  __syncwarp();
  cluster_arrive();
  cluster_wait();
  if (part != 0) return;
  best = {scans[0].peak, scans[0].id};
  bad = scans[0].bad;
#pragma unroll
  for (int i = 1; i < PARTS; ++i) {
    best = better(best, {scans[i].peak, scans[i].id});
    bad |= scans[i].bad;
  }
  total = 0.0;
#pragma unroll
  for (int i = 0; i < PARTS; ++i) {
    if (scans[i].total > 0.0) total += scans[i].total * exp(scans[i].peak - best.value);
  }
#endif
  const float peak_raw = float(best.value);
  u32 status = bad != 0 || best.value == minus_inf ? NAN_LOGITS : usable(r) ? OK : FAILED;
  const double log_sum = double(peak_raw) + log(total);

  const bool plain = r.repetition == 1.f && r.presence == 0.f && r.frequency == 0.f && r.n_bias == 0 &&
                     r.n_barred == 0 && r.mask == nullptr;
  if (status == OK && !plain) {
    process(p, r, logits, work);
    best = {minus_inf, 0xffffffffu};
    for (int i = threadIdx.x; i < vocab; i += THREADS) best = better(best, {work[i], u32(i)});
    best = block_best(best);
    if (best.value == minus_inf) status = NO_TOKEN;
  }
  if (status == OK && r.temperature > 0.f) {
    const double peak = best.value, temperature = r.temperature;
    auto processed = [&](int group, double(&v)[4]) {
      if (plain) {
        float f[4];
        raw(group, f);
#pragma unroll
        for (int e = 0; e < 4; ++e) v[e] = f[e];
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) v[e] = group * 4 + e < vocab ? work[group * 4 + e] : minus_inf;
      }
    };
    Cut cut = {double(INFINITY_F), 0};
    bool masses = false;
    auto visit = [&](auto&& f) {
      for (int group = threadIdx.x; group < groups; group += THREADS) {
        double v[4];
        processed(group, v);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const u32 id = u32(group) * 4 + e;
          const double d = (peak - v[e]) / temperature;
          if (!(v[e] > minus_inf) || !cut.holds(d, id)) continue;
          // Beyond 64 the weight is under 1e-27: such ids are told apart by id only.
          f(Element{d < 64.0 ? u64(d * 144115188075855872.0) : 1ull << 63, d, masses ? mass_of(d) : 0, true}, id);
        }
      }
    };
    if (r.top_k > 0 && r.top_k < u32(vocab)) {
      const Cut k = select<false>(memory, r.top_k, visit, mass_of);
      cut = k;
    }
    if (r.top_p < 1.f) {
      masses = true;
      u64 mass = 0;
      visit([&](const Element& e, u32) { mass += e.mass; });
      mass = block_total(mass);
      const u64 target = u64(ceil(double(r.top_p) * double(mass)));
      const Cut nucleus = select<true>(memory, target < 1 ? 1 : target, visit, mass_of);
      cut = nucleus;
      masses = false;
    }
    // The race. Ids far behind the thread's leader are not even drawn.
    const double min_p = r.min_p;
    auto candidates = [&](float floor, auto&& f) {
      for (int group = threadIdx.x; group < groups; group += THREADS) {
        double v[4], d[4];
        processed(group, v);
        bool any = false;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          d[e] = (peak - v[e]) / temperature;
          any = any || (v[e] > minus_inf && LUCKIEST - float(d[e]) > floor);
        }
        if (!any) continue;
        const Words words = token_words(group, r.position, r.choice, r.seed);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const u32 id = u32(group) * 4 + e;
          if (!(v[e] > minus_inf) || !cut.holds(d[e], id)) continue;
          if (min_p > 0.0 && exp(-d[e]) < min_p) continue;
          floor = fmaxf(floor, f(d[e], id, words.x[e]) - 2.f * MARGIN);
        }
      }
    };
    float lead = -INFINITY_F;
    candidates(-INFINITY_F, [&](double d, u32, u32 word) {
      const float score = -float(d) - logf(time_fast(word));
      lead = fmaxf(lead, score);
      return lead;
    });
    const float leader = float(block_best({double(lead), threadIdx.x}).value);
    Best winner = {-1.0, 0xffffffffu};
    if (lead >= leader - MARGIN) {
      candidates(leader - 2.f * MARGIN, [&](double d, u32 id, u32 word) {
        const float score = -float(d) - logf(time_fast(word));
        if (score >= leader - MARGIN) winner = better(winner, {exp(-d) / time_exact(word), id});
        return -INFINITY_F;
      });
    }
    best.id = block_best(winner).id;
  }

  if (threadIdx.x == 0) {
    Result result = {-1, NAN_F, status, 0};
    if (status == OK) {
      result.token = int(best.id);
      result.logprob = float(double(logits[best.id]) - log_sum);
    }
    p.results[r.out] = result;
  }
  const u32 wanted = status == OK ? min(min(r.logprobs, u32(p.width)), u32(vocab)) : 0;
  if (wanted > 0) {
    auto visit = [&](auto&& f) {
      for (int group = threadIdx.x; group < groups; group += THREADS) {
        float v[4];
        raw(group, v);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const u32 id = u32(group) * 4 + e;
          if (id < u32(vocab)) f(Element{u64(descending(v[e])) << 31, -double(v[e]), 0, true}, id);
        }
      }
    };
    const Cut cut = select<false>(memory, wanted, visit, mass_of);
    if (threadIdx.x == 0) memory.listed = 0;
    __syncthreads();
    visit([&](const Element& e, u32 id) {
      if (!cut.holds(e.distance, id)) return;
      const u32 at = atomicAdd(&memory.listed, 1u);
      if (at < LIST) {
        memory.distance[at] = e.distance;
        memory.id[at] = id;
      }
    });
    __syncthreads();
    sort_list(memory, min(memory.listed, u32(LIST)));
  }
  for (u32 i = threadIdx.x; i < u32(p.width); i += THREADS) {
    const i64 at = i64(r.out) * p.width + i;
    p.top_tokens[at] = i < wanted ? int(memory.id[i]) : -1;
    p.top_logprobs[at] = i < wanted ? float(-memory.distance[i] - log_sum) : -INFINITY_F;
  }
}
