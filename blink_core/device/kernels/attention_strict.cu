// Paged attention in float32 for checks (design section 9): decode and prefill alike, one (token, query head) at a
// time.
//
// Keys are taken in blocks of 128 counted from position 0 and added in order, so a result depends on its context alone:
// not on the batch, the chunks of its prompt, or whether it came by prefill or decode. Long sums have two levels: one
// chain over a long context would lose more to rounding than HuggingFace's float32, which the criterion measures by.
#include "common.cuh"

constexpr int KEYS = 128;
constexpr int PART = 16;  // products that are added up by themselves first

struct StrictParams {
  const T* q;  // rows of `q_stride` elements, [heads, HEAD_DIM] each
  i64 q_stride;
  const T* k_pages;  // [pages, PAGE_SIZE, kv_heads, HEAD_DIM]
  const T* v_pages;
  T* out;  // [tokens, heads * HEAD_DIM]
  const StepSizes* sizes;
  const int* row_starts;
  const int* context_lens;
  const int* token_rows;
  const u32* block_tables;
  const int* table_rows;
  i64 table_stride;
  int heads, kv_heads, window;
  float scale;  // of the scores
};

extern "C" __global__ void __launch_bounds__(KEYS) attention_strict(const __grid_constant__ StrictParams p) {
  __shared__ float q[HEAD_DIM], weights[KEYS], scratch[KEYS / 32];
  __shared__ u64 places[KEYS];
  pdl_launch();
  pdl_wait();
  const i64 works = i64(p.sizes->n_tokens) * p.heads;
  for (i64 work = blockIdx.x; work < works; work += gridDim.x) {
    const i64 token = work / p.heads;
    const int head = int(work - token * p.heads), kv_head = head / (p.heads / p.kv_heads);
    const int row = p.token_rows[token];
    const int last = p.context_lens[row] - (p.row_starts[row + 1] - int(token));  // position of the query
    const int low = p.window > 0 ? max(0, last + 1 - p.window) : 0;
    const u32* table = p.block_tables + i64(p.table_rows[row]) * p.table_stride;
    __syncthreads();
    if (threadIdx.x < HEAD_DIM) {
      q[threadIdx.x] = to_float(p.q[token * p.q_stride + i64(head) * HEAD_DIM + threadIdx.x]) * p.scale;
    }
    float peak = -INFINITY_F, sum = 0.f, o = 0.f;
    for (int base = low / KEYS * KEYS; base <= last; base += KEYS) {
      const int key = base + threadIdx.x;
      const bool valid = key >= low && key <= last;
      float score = -INFINITY_F;
      u64 at = 0;
      __syncthreads();
      if (valid) {
        at = ((u64(table[key / PAGE_SIZE]) * PAGE_SIZE + key % PAGE_SIZE) * p.kv_heads + kv_head) * HEAD_DIM;
        score = 0.f;
        for (int part = 0; part < HEAD_DIM; part += PART) {
          float some = 0.f;
#pragma unroll
          for (int d = part; d < part + PART && d < HEAD_DIM; d += VEC) {
            const Vec k = *reinterpret_cast<const Vec*>(p.k_pages + at + d);
#pragma unroll
            for (int e = 0; e < VEC; ++e) some += q[d + e] * to_float(k.e[e]);
          }
          score += some;
        }
      }
      places[threadIdx.x] = at;
      const float warp_top = warp_max(score);
      if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = warp_top;
      __syncthreads();
      float top = peak;
      for (int i = 0; i < KEYS / 32; ++i) top = fmaxf(top, scratch[i]);
      const float weight = valid ? expf(score - top) : 0.f;
      const float rescale = peak == -INFINITY_F ? 0.f : expf(peak - top);
      peak = top;
      weights[threadIdx.x] = weight;
      sum = sum * rescale + block_sum(weight, scratch);  // its barriers publish the weights
      if (threadIdx.x < HEAD_DIM) {
        const int stop = min(KEYS, last + 1 - base);
        float some = 0.f;
        for (int i = max(0, low - base); i < stop; ++i) {
          some += weights[i] * to_float(p.v_pages[places[i] + threadIdx.x]);
        }
        o = o * rescale + some;
      }
    }
    if (threadIdx.x < HEAD_DIM) p.out[work * HEAD_DIM + threadIdx.x] = from_float<T>(o / sum);
  }
}
