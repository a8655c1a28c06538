// The device plan of a step as the arrays the model kernels read (design section 4). First kernel of a step graph.
//
// A graph is captured for a bucket: `rows` rows, `tokens` tokens, `samples` rows with logits at most. Here the step
// that runs is padded up to it: padding tokens are token 0 at position 0 and write to page 1, which belongs to nobody;
// no attention tile, expert or sample comes of them. One block.
//
// LongRoPE: a row whose context is longer than the original maximum is turned by the long table, all others by the
// short one; both lie in one array, the long one from row `long_angles` on. A pass that computes a row anew (`redo`) takes
// the tokens from the request's own record and the slots from its block table, and samples nothing.
#include "../abi.hpp"
#include "redo.cuh"
#include "sample_row.cuh"

using namespace blink;

struct StepSizes {
  int n_rows, n_tokens, n_samples, reserved;
};

struct StepViewParams {
  const Config* config;
  const PlanHeader* header;
  const PlanRow* plan_rows;
  const int* plan_token_ids;
  const int* plan_positions;
  const long long* plan_kv_slots;
  const Sampling* sampling;    // by request
  const BiasPair* bias;        // [requests, max_bias]
  const int* token_pool;       // [requests, max_len]
  const uint32_t* masks;       // [max_rows, mask_words]
  StepSizes* sizes;
  int* token_ids;              // [tokens]
  int* positions;              // [tokens]
  long long* kv_slots;         // [tokens]
  int* row_starts;             // [rows + 1]
  int* context_lens;           // [rows]
  int* table_rows;             // [rows]
  int* sample_tokens;          // [samples] last token of each row that is sampled from
  SampleRow* sample_rows;      // [samples]
  unsigned long long* begun;   // when the step began: globaltimer
  const Redo* redo;            // null without LongRoPE beyond its original maximum
  const uint32_t* block_tables;  // [max_rows, max_pages]
  int* angles;                 // [tokens] row of the rotary table; written with `redo` only
  int rows, tokens, samples;
  int original_max, long_angles;
};

// One pass of LongRoPE's as the only row of a step.
__device__ void view_redo(const StepViewParams& p, const Redo& redo) {
  const Config& c = *p.config;
  const PlanRow& row = p.plan_rows[redo.row];
  const int* known = p.token_pool + uint64_t(row.request) * c.max_len;
  const uint32_t* table = p.block_tables + uint64_t(row.row) * c.max_pages;
  for (int i = threadIdx.x; i < p.tokens; i += blockDim.x) {
    const bool there = i < redo.count;
    const int position = redo.first + i;
    // A request that is cancelled meanwhile may show its successor's tokens, checked or not.
    const int token = there ? known[position] : 0;
    p.token_ids[i] = uint32_t(token) < c.vocab ? token : 0;
    p.positions[i] = there ? position : 0;
    p.angles[i] = there ? p.long_angles + position : 0;
    p.kv_slots[i] = (long long)(c.page_size);
    if (there) {
      p.kv_slots[i] = (long long)(table[position / c.page_size]) * c.page_size + position % c.page_size;
    }
  }
  for (int i = threadIdx.x; i < p.rows; i += blockDim.x) {
    p.row_starts[i] = i == 0 ? 0 : redo.count;
    p.context_lens[i] = i == 0 ? redo.first + redo.count : 0;
    p.table_rows[i] = i == 0 ? int(row.row) : 0;
  }
  for (int i = threadIdx.x; i < p.samples; i += blockDim.x) p.sample_tokens[i] = 0;
  if (threadIdx.x == 0) {
    p.row_starts[p.rows] = redo.count;
    *p.sizes = {1, redo.count, 0, 0};
  }
}

extern "C" __global__ void step_view(const __grid_constant__ StepViewParams p) {
  __shared__ int next_sample;
  if (threadIdx.x == 0) asm volatile("mov.u64 %0, %globaltimer;" : "=l"(*p.begun));
  const Config& c = *p.config;
  if (p.redo != nullptr && p.redo->count > 0) {
    view_redo(p, *p.redo);
    return;
  }
  const int n_rows = int(p.header->n_rows), n_tokens = int(p.header->n_tokens);
  for (int i = threadIdx.x; i < p.tokens; i += blockDim.x) {
    const bool there = i < n_tokens;
    p.token_ids[i] = there ? p.plan_token_ids[i] : 0;
    p.positions[i] = there ? p.plan_positions[i] : 0;
    p.kv_slots[i] = there ? p.plan_kv_slots[i] : (long long)(c.page_size);
  }
  for (int i = threadIdx.x; i < p.rows; i += blockDim.x) {
    const bool there = i < n_rows;
    p.row_starts[i] = there ? int(p.plan_rows[i].q_start) : n_tokens;
    p.context_lens[i] = there ? int(p.plan_rows[i].context_len) : 0;
    p.table_rows[i] = there ? int(p.plan_rows[i].row) : 0;
  }
  for (int i = threadIdx.x; i < p.samples; i += blockDim.x) p.sample_tokens[i] = 0;
  if (p.redo != nullptr) {  // a warp a row
    for (int i = n_tokens + threadIdx.x; i < p.tokens; i += blockDim.x) p.angles[i] = 0;
    for (int r = threadIdx.x >> 5; r < n_rows; r += blockDim.x >> 5) {
      const PlanRow& row = p.plan_rows[r];
      const int more = int(row.context_len) > p.original_max ? p.long_angles : 0;
      for (uint32_t i = threadIdx.x & 31; i < row.q_len; i += 32) {
        p.angles[row.q_start + i] = p.plan_positions[row.q_start + i] + more;
      }
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    p.row_starts[p.rows] = n_tokens;
    int n = 0;
    for (int i = 0; i < n_rows; ++i) {
      if (p.plan_rows[i].sample == 0 || n >= p.samples) continue;
      p.sample_tokens[n] = int(p.plan_rows[i].q_start + p.plan_rows[i].q_len) - 1;
      p.sample_rows[n].out = uint32_t(i);
      ++n;
    }
    next_sample = n;
    *p.sizes = {n_rows, n_tokens, n, 0};
  }
  __syncthreads();
  for (int i = threadIdx.x; i < next_sample; i += blockDim.x) {
    SampleRow& r = p.sample_rows[i];
    const PlanRow& row = p.plan_rows[r.out];
    const Sampling& s = p.sampling[row.request];
    r.seed = s.seed;
    r.owner = row.serial + 1;  // never a request of another epoch
    r.tokens = p.token_pool + uint64_t(row.request) * c.max_len;
    r.bias = reinterpret_cast<const int2*>(p.bias + uint64_t(row.request) * c.max_bias);
    r.mask = row.masked != 0 ? p.masks + uint64_t(row.row) * c.mask_words : nullptr;
    r.temperature = s.temperature;
    r.top_p = s.top_p;
    r.min_p = s.min_p;
    r.repetition = s.repetition_penalty;
    r.presence = s.presence_penalty;
    r.frequency = s.frequency_penalty;
    r.top_k = s.top_k;
    r.choice = s.choice;
    r.position = row.context_len;
    r.logprobs = s.logprobs;
    r.prompt_len = s.prompt_len;
    r.n_tokens = row.context_len;
    r.n_bias = s.n_bias;
    r.row = row.row;
    r.n_barred = 0;
    if (row.emitted < s.min_tokens) {
      for (uint32_t j = 0; j < s.n_stop && j < 8; ++j) r.barred[r.n_barred++] = s.stop_ids[j];
      for (uint32_t j = 0; j < c.n_eos && j < 8; ++j) r.barred[r.n_barred++] = c.eos_ids[j];
    }
  }
}
