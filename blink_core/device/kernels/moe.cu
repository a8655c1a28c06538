// Mixture of experts: routing, sorting tokens by expert, and adding up what the experts made (design section 7).
#include "common.cuh"

constexpr int MAX_EXPERTS = 512;
constexpr int MAX_TOP_K = 16;

// Softmax over all experts, then the top_k likeliest, most likely first, the lower index of equals; `normalize` divides
// their weights by their sum. logits float32 [tokens, experts]; index, weight [tokens, top_k]. One warp a token.
DEVICE void route(const float* logits, int* index, float* weight, int token, int experts, int top_k, int normalize) {
  const int lane = threadIdx.x & 31;
  constexpr int EACH = MAX_EXPERTS / 32;
  float p[EACH];
  float top = -INFINITY_F;
#pragma unroll
  for (int j = 0; j < EACH; ++j) {
    const int e = j * 32 + lane;
    p[j] = e < experts ? logits[i64(token) * experts + e] : -INFINITY_F;
    top = fmaxf(top, p[j]);
  }
  top = warp_max(top);
  float sum = 0.f;
#pragma unroll
  for (int j = 0; j < EACH; ++j) {
    p[j] = j * 32 + lane < experts ? expf(p[j] - top) : -1.f;
    sum += fmaxf(p[j], 0.f);
  }
  sum = warp_sum(sum);
  float chosen = 0.f, mine = 0.f;
  int my_index = 0;
  for (int k = 0; k < top_k; ++k) {
    float best = -1.f;
    int at = 0x7fffffff;
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
      if (p[j] > best) {
        best = p[j];
        at = j * 32 + lane;
      }
    }
#pragma unroll
    for (int i = 16; i > 0; i >>= 1) {
      const float other = __shfl_xor_sync(0xffffffffu, best, i);
      const int other_at = __shfl_xor_sync(0xffffffffu, at, i);
      if (other > best || (other == best && other_at < at)) {
        best = other;
        at = other_at;
      }
    }
    if (at >= experts) at = k;  // NaN logits: any expert will do, the weights stay NaN
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
      if (j * 32 + lane == at) p[j] = -2.f;
    }
    const float value = best / sum;
    chosen += value;
    if (lane == k) {
      mine = value;
      my_index = at;
    }
  }
  if (sum != sum) mine = NAN_F;
  if (lane < top_k) {
    index[i64(token) * top_k + lane] = my_index;
    weight[i64(token) * top_k + lane] = normalize ? mine / chosen : mine;
  }
}

// Sorts the step's (token, choice) pairs by expert: pairs [tokens * top_k] (token * top_k + choice) and their tokens,
// and cuts each expert's into blocks {expert, first, count, 0} of at most `width`, *n_blocks of them. Only tokens that
// are there count, so padding brings no expert in. The order within an expert is not fixed; a row's product does not
// depend on it. One block.
DEVICE void sort(int total, const int* index, int* n_blocks, int4* blocks, int* pairs, int* tokens_of, int experts,
                 int top_k, int width) {
  __shared__ int counts[MAX_EXPERTS], starts[MAX_EXPERTS];
  for (int e = threadIdx.x; e < experts; e += blockDim.x) counts[e] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < total; i += blockDim.x) atomicAdd(&counts[index[i]], 1);
  __syncthreads();
  if (threadIdx.x < 32) {
    int rows_before = 0, blocks_before = 0;
    for (int base = 0; base < experts; base += 32) {
      const int e = base + threadIdx.x;
      const int count = e < experts ? counts[e] : 0, here = (count + width - 1) / width;
      int rows = count, n = here;
#pragma unroll
      for (int i = 1; i < 32; i <<= 1) {
        const int other_rows = __shfl_up_sync(0xffffffffu, rows, i), other_n = __shfl_up_sync(0xffffffffu, n, i);
        if (int(threadIdx.x) >= i) {
          rows += other_rows;
          n += other_n;
        }
      }
      const int first = rows_before + rows - count, at = blocks_before + n - here;
      if (e < experts) starts[e] = first;
      for (int i = 0; i < here; ++i) blocks[at + i] = make_int4(e, first + i * width, min(width, count - i * width), 0);
      rows_before += __shfl_sync(0xffffffffu, rows, 31);
      blocks_before += __shfl_sync(0xffffffffu, n, 31);
    }
    if (threadIdx.x == 0) *n_blocks = blocks_before;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < total; i += blockDim.x) {
    const int at = atomicAdd(&starts[index[i]], 1);
    pairs[at] = i;
    tokens_of[at] = i / top_k;
  }
}

extern "C" __global__ void moe_route(const float* logits, int* index, float* weight, int tokens, int experts, int top_k,
                                     int normalize) {
  pdl_launch();
  pdl_wait();
  const int token = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
  if (token < tokens) route(logits, index, weight, token, experts, top_k, normalize);
}

extern "C" __global__ void moe_sort(const StepSizes* sizes, const int* index, int* n_blocks, int4* blocks, int* pairs,
                                    int* tokens_of, int experts, int top_k, int width) {
  pdl_launch();
  pdl_wait();
  sort(sizes->n_tokens * top_k, index, n_blocks, blocks, pairs, tokens_of, experts, top_k, width);
}

// Both for few tokens: one block.
extern "C" __global__ void moe_route_sort(const StepSizes* sizes, const float* logits, int* index, float* weight,
                                          int* n_blocks, int4* blocks, int* pairs, int* tokens_of, int tokens,
                                          int experts, int top_k, int width, int normalize) {
  pdl_launch();
  pdl_wait();
  for (int token = threadIdx.x >> 5; token < tokens; token += blockDim.x >> 5) {
    route(logits, index, weight, token, experts, top_k, normalize);
  }
  __syncthreads();
  sort(sizes->n_tokens * top_k, index, n_blocks, blocks, pairs, tokens_of, experts, top_k, width);
}

// x[t] += sum of weight[t, j] * parts[t * top_k + j], in the order of the experts' numbers; parts [tokens * top_k, n].
// x may be null: then out[t] is the sum. One block a token.
extern "C" __global__ void moe_combine(const T* parts, const int* index, const float* weight, const T* x, T* out, int n,
                                       int top_k) {
  __shared__ int order[MAX_TOP_K];
  pdl_launch();
  pdl_wait();
  const i64 token = blockIdx.x;
  if (threadIdx.x < top_k) {
    const int mine = index[token * top_k + threadIdx.x];
    int rank = 0;
    for (int j = 0; j < top_k; ++j) {
      const int other = index[token * top_k + j];
      rank += other < mine || (other == mine && j < int(threadIdx.x)) ? 1 : 0;
    }
    order[rank] = threadIdx.x;
  }
  __syncthreads();
  for (int i = threadIdx.x * VEC; i < n; i += blockDim.x * VEC) {
    float sum[VEC] = {};
#pragma unroll 8
    for (int j = 0; j < top_k; ++j) {
      const i64 pair = token * top_k + order[j];
      const float w = weight[pair];
      const Vec v = *reinterpret_cast<const Vec*>(parts + pair * n + i);
#pragma unroll
      for (int e = 0; e < VEC; ++e) sum[e] += to_float(v.e[e]) * w;
    }
    Vec to = {};
    if (x != nullptr) to = *reinterpret_cast<const Vec*>(x + token * n + i);
#pragma unroll
    for (int e = 0; e < VEC; ++e) to.e[e] = from_float<T>(sum[e] + (x != nullptr ? to_float(to.e[e]) : 0.f));
    *reinterpret_cast<Vec*>(out + token * n + i) = to;
  }
}
