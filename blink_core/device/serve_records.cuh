// Records and limits of the scheduler that serves on a GPU, some of them shared with the host (runtime/serve_abi.py).
#pragma once

#include "kernels/redo.cuh"
#include "scheduler.hpp"

using namespace blink;

constexpr uint32_t THREADS = 256;
constexpr uint32_t MOST_LAUNCHES = 118;  // of 120 that an execution may make
constexpr uint32_t MAX_BUCKETS = 64;
constexpr uint64_t BEAT_NS = 100000;         // between two heartbeats
constexpr uint64_t HOLD_NS = 30000000000ull;  // longest hold, as on the host
[[maybe_unused]] constexpr uint64_t LAUNCH_NS = 2000000;  // for which a refused launch is tried again
constexpr uint32_t IDLE_NAP_NS = 400;
constexpr uint32_t NEAR_EXECUTABLES = 4;     // of the bucket in use, whose handles are kept at hand

// Why the engine failed; runtime/serve_abi.py has the words.
enum class Failure : uint64_t { NONE = 0, LAUNCH = 1, OVERDUE = 2, NO_BUCKET = 3, LOST_STEP = 4, RENEWAL = 5 };

// Sizes that one set of step graphs was captured for. In order of cost; the first that a step fits is taken.
struct Bucket {
  uint32_t tokens, rows, samples;
  uint32_t decode;   // 1: only rows of one token
  uint32_t tail;     // 1: launched by tail launch
  uint32_t first;    // of its executables
  uint32_t count;    // they are used in turn
  uint32_t reserved;
};

// A copy of device memory for verification, made while the engine is held. kind 0: bytes; 1, 2: bf16, fp16 to float32.
struct Mirror {
  const uint8_t* from;
  uint8_t* to;
  uint64_t nbytes;  // of `from`, a multiple of 16
  uint64_t kind;
};

// What one boundary cost: globaltimer nanoseconds. In host memory, a ring.
struct Sample {
  uint64_t step;
  uint64_t seen;      // the end of the step before was seen; 0: none was in flight
  uint64_t planned;   // the boundary was over
  uint64_t launched;  // the launch call had returned
};

// In device memory.
struct Serve {
  uint64_t done;      // number of the step whose graph ended last
  uint64_t started;   // globaltimer of the first execution
  uint64_t held;      // ticket of the last hold
  uint64_t last_beat;
  uint64_t deadline;  // of the step launched by tail launch
  uint64_t tail_step;  // step launched by tail launch and not yet seen to end; 0: none
  uint64_t executions, launches, refused;
  uint64_t failure, failure_detail;
  uint64_t steady;    // of the executions before this one
  uint64_t pending;   // 1: a pass ahead of the plan at hand was launched, the plan itself is still to be
  uint64_t tail_redo; // number of the pass launched by tail launch and not yet seen to end; 0: none
  uint32_t redo_row, redo_at;  // where the passes of the plan at hand go on
  StatusLine status;  // a copy
  uint32_t turn[MAX_BUCKETS];
};

// In host memory, for the process that waits for the end.
struct Report {
  uint64_t ended;     // 1: the engine has stopped and launches nothing more
  uint64_t failure, failure_detail, failure_step;
  uint64_t executions, launches, refused;
  uint64_t steady;    // boundaries that all threads worked on together
};

struct ServeParams {
  uint8_t* shared;
  uint8_t* state;
  uint8_t* log;
  uint8_t* plan;
  Serve* serve;
  Report* report;
  const Bucket* buckets;
  const cudaGraphExec_t* executables;
  const Mirror* mirrors;
  StateHeader* header_mirror;  // in host memory, or null
  Sample* samples;
  Redo* redo;              // the pass that runs
  uint64_t* phases;        // [n_samples, Phase::COUNT] in host memory, with BLINK_PHASES; else null
  uint32_t n_buckets, n_mirrors, n_samples;
  uint32_t original_max;   // LongRoPE's, where sequences may outgrow it; else 0
  uint64_t step_limit_ns;  // a step that takes longer ends the engine
  uint64_t run_limit_ns;   // the engine stops by itself; 0: never
  uint64_t branch, loop;   // BLINK_SWITCH: conditional handles of the SWITCH and of the WHILE around it
  uint64_t watched;        // 1: the KV sanitizer is part of the steps, which reads the records of pages
};

// runtime/serve_abi.py has the same records.
static_assert(sizeof(Bucket) == 32 && sizeof(Mirror) == 32 && sizeof(Sample) == 32 && sizeof(Report) == 64);
static_assert(sizeof(Serve) == 440 && sizeof(ServeParams) == 160);

__device__ inline uint64_t nanoseconds() {
  uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}
__device__ inline uint64_t microseconds() { return nanoseconds() / 1000; }

__device__ inline uint64_t acquire_device(const uint64_t* word) {
  uint64_t v;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(word) : "memory");
  return v;
}
__device__ inline uint64_t read_host(const uint64_t* word) { return *const_cast<const volatile uint64_t*>(word); }
__device__ inline void write_host(uint64_t* word, uint64_t value) { *const_cast<volatile uint64_t*>(word) = value; }
