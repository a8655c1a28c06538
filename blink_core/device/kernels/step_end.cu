// The last kernels of a step graph: the capture of logits for verification, and the word that says that the step is over.
#include "../abi.hpp"
#include "redo.cuh"
#include "sample_row.cuh"

using namespace blink;

struct StepSizes {
  int n_rows, n_tokens, n_samples, reserved;
};

constexpr int MAX_PLANS = 4;

struct StepEndParams {
  PlanHeader* header;
  uint64_t* done;                      // gets the step's number
  const uint64_t* begun;               // when this step began, from step_view
  uint64_t* times;                     // [slots, 2] {begun, ended} in host memory, or null
  const int* attention[MAX_PLANS];     // counts of the attention plans; [2] is set if a list was too small
  uint32_t n_plans, slots;             // slots: a power of two
  Redo* redo;                          // or null; of a pass ahead of the plan `done` is in here
};

// Launched without programmatic dependence: whatever the step wrote is there before `done` is.
extern "C" __global__ void step_end(const __grid_constant__ StepEndParams p) {
  if (threadIdx.x != 0) return;
  for (uint32_t i = 0; i < p.n_plans; ++i) {
    if (p.attention[i][2] != 0) p.header->status = uint32_t(StepStatus::FAILED);
  }
  if (p.redo != nullptr && p.redo->count > 0) {
    const unsigned long long number = p.redo->number;
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(&p.redo->done), "l"(number) : "memory");
    return;
  }
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  const uint64_t step = p.header->step;
  if (p.times != nullptr) {
    volatile uint64_t* times = p.times + 2 * (step & (p.slots - 1));
    times[0] = *p.begun;
    times[1] = now;
  }
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(p.done), "l"(step) : "memory");
}

struct NoopParams {
  const PlanHeader* header;
  const PlanRow* plan_rows;
  StepResult* results;
  int* top_tokens;       // [rows, width]
  float* top_logprobs;
  int width;
  uint64_t* begun;
  uint64_t spin_ns;  // how long a step takes at least
};

// A model that costs nothing, as runtime/cpu.py has it: a fixed function of request and context length.
extern "C" __global__ void step_noop(const __grid_constant__ NoopParams p) {
  uint64_t begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  if (threadIdx.x == 0) *p.begun = begin;
  do {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - begin < p.spin_ns);
  for (uint32_t i = threadIdx.x; i < p.header->n_rows; i += blockDim.x) {
    const PlanRow& row = p.plan_rows[i];
    const int token = int((row.request * 31 + row.context_len * 7) % 251);
    p.results[i] = {token, 0.0f, uint32_t(StepStatus::OK), 0};
    for (int j = 0; j < p.width; ++j) {
      p.top_tokens[i * p.width + j] = (token + j) % 251;
      p.top_logprobs[i * p.width + j] = -float(j);
    }
  }
}

struct CaptureParams {
  const PlanHeader* header;
  const PlanRow* plan_rows;
  const StepResult* results;
  const SampleRow* sample_rows;
  const StepSizes* sizes;
  const float* logits;  // [samples, stride]
  long long stride;
  uint8_t* records;     // [samples] in host memory: abi capture's header, then `vocab` logits
  uint32_t vocab, record_bytes;
};

// One block a sampled row.
extern "C" __global__ void capture_rows(const __grid_constant__ CaptureParams p) {
  const int n = blockIdx.x;
  if (n >= p.sizes->n_samples) return;
  uint32_t* record = reinterpret_cast<uint32_t*>(p.records + uint64_t(n) * p.record_bytes);
  if (threadIdx.x == 0) {
    const uint32_t out = p.sample_rows[n].out;
    const PlanRow& row = p.plan_rows[out];
    record[0] = uint32_t(p.header->step);
    record[1] = uint32_t(p.header->step >> 32);
    record[2] = row.ring;
    record[3] = row.slot;
    record[4] = row.generation;
    record[5] = row.context_len;
    record[6] = uint32_t(p.results[out].token);
    record[7] = p.vocab;
  }
  const float* logits = p.logits + n * p.stride;
  for (uint32_t i = threadIdx.x; i < p.vocab; i += blockDim.x) record[8 + i] = __float_as_uint(logits[i]);
}

struct CaptureEndParams {
  const StepSizes* sizes;
  PlanHeader* header;
  uint64_t* offered;        // host memory: number of the offer << 32 | records in it
  const uint64_t* taken;    // host memory: the offer that the host has written to its file
  uint64_t limit_ns;
};

// Waits until the host has taken this step's records: a token is never told before its logits are in the file.
extern "C" __global__ void capture_end(const __grid_constant__ CaptureEndParams p) {
  if (threadIdx.x != 0 || p.sizes->n_samples == 0) return;
  uint64_t begin, now, seen;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  const uint64_t number = (*static_cast<volatile uint64_t*>(p.offered) >> 32) + 1;
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p.offered), "l"(number << 32 | uint32_t(p.sizes->n_samples))
               : "memory");
  do {
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(seen) : "l"(p.taken) : "memory");
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (seen != number && now - begin < p.limit_ns);
  if (seen != number) p.header->status = uint32_t(StepStatus::FAILED);
}
