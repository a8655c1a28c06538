// The resident scheduler on a GPU: one block that never leaves, but to renew itself (design sections 4 and 6).
//
// It runs the same boundary and polls as the host's loop and launches the step graphs itself: fire-and-forget, spinning
// on the word that a step graph's last kernel writes, or as a tail launch, for which the block makes room. One execution
// of a graph may launch only so many others, so after MOST_LAUNCHES it tail-launches its own graph and ends.
//
// The rings and the event log lie in host memory, everything else in device memory. A read of host memory takes about a
// microsecond, so the control line is read while a step runs and the status line is written from a copy.
#include "scheduler.hpp"

using namespace blink;

constexpr uint32_t THREADS = 256;
constexpr uint32_t MOST_LAUNCHES = 118;  // of 120 that an execution may make
constexpr uint32_t MAX_BUCKETS = 64;
constexpr uint64_t BEAT_NS = 100000;         // between two heartbeats
constexpr uint64_t HOLD_NS = 30000000000ull;  // longest hold, as on the host
constexpr uint64_t LAUNCH_NS = 2000000;      // for which a refused launch is tried again
constexpr uint32_t IDLE_NAP_NS = 400;
constexpr uint32_t SHOW_EVERY = 32;          // looks between two updates of what the host may know

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
  uint64_t deadline;  // of the step in flight
  uint64_t tail_step;  // step launched by tail launch and not yet seen to end; 0: none
  uint64_t executions, launches, refused;
  uint64_t failure, failure_detail;
  uint64_t steady;    // of the executions before this one
  ControlLine control;  // copies of the two lines
  StatusLine status;
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
  uint32_t n_buckets, n_mirrors, n_samples, reserved;
  uint64_t step_limit_ns;  // a step that takes longer ends the engine
  uint64_t run_limit_ns;   // the engine stops by itself; 0: never
};

// runtime/serve_abi.py has the same records.
static_assert(sizeof(Bucket) == 32 && sizeof(Mirror) == 32 && sizeof(Sample) == 32 && sizeof(Report) == 64);
static_assert(sizeof(Serve) == 480 && sizeof(ServeParams) == 120);

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

// What the scheduler touches all the time, in shared memory while an execution lasts: reading it from device memory takes
// ten times as long. Taken at the begin, given back before anybody else reads it.
constexpr uint32_t NEAR_RINGS = 8;
constexpr uint32_t SHOWN_RINGS = 8;
struct Near {
  Config config;
  StateHeader head;
  RingState rings[NEAR_RINGS];
};

struct Engine {
  const ServeParams& p;
  Context c;
  Context far;  // where all of it lies in device memory
  BlockGroup& g;
  uint64_t* peeked;  // [MAX_PEEKED] in shared memory
  ControlLine* host_control;
  StatusLine* host_status;
};

// Reads what front ends and the host have written, all of it at once: each word is a read of host memory.
__device__ inline void read_words(const Engine& e) {
  const uint32_t lane = threadIdx.x, rings = e.c.config->rings;
  const bool fits = rings * RING_WORDS <= MAX_PEEKED;
  if (fits && lane < rings * RING_WORDS) {
    const uint32_t ring = lane / RING_WORDS, which = lane % RING_WORDS;
    const RingMemory m = e.c.ring(ring);
    const uint64_t next = e.c.rings[ring].sq_next & (e.c.config->sq_entries - 1);
    e.peeked[lane] = load_acquire(which == 0   ? &m.front_end->epoch
                                  : which == 1 ? &m.front_end->cq_head
                                  : which == 2 ? &m.front_end->lease
                                               : &m.sq[next]);
  }
  if (lane >= THREADS - sizeof(ControlLine) / 8) {
    const uint32_t word = lane - (THREADS - sizeof(ControlLine) / 8);
    uint64_t* to = reinterpret_cast<uint64_t*>(&e.p.serve->control);
    to[word] = read_host(reinterpret_cast<const uint64_t*>(e.host_control) + word);
  }
  e.g.peeked = fits ? e.peeked : nullptr;
  __syncthreads();
}

// Copies what the host may know: the status line, and the scheduler's counters for verification.
__device__ inline void show(const Engine& e) {
  const uint32_t lane = threadIdx.x;
  if (lane >= 64 && lane < 64 + sizeof(StatusLine) / 8) {
    const uint64_t* from = reinterpret_cast<const uint64_t*>(&e.p.serve->status);
    write_host(reinterpret_cast<uint64_t*>(e.host_status) + lane - 64, from[lane - 64]);
  }
  StateHeader* mirror = e.p.header_mirror;
  if (mirror != nullptr && lane >= 96 && lane < 96 + sizeof(StateHeader) / 8) {
    const uint64_t* from = reinterpret_cast<const uint64_t*>(e.c.head);
    write_host(reinterpret_cast<uint64_t*>(mirror) + lane - 96, from[lane - 96]);
  }
  const uint32_t rings = e.c.config->rings;
  if (mirror == nullptr || rings > SHOWN_RINGS || lane < 128 || lane >= 128 + sizeof(RingState) / 8) return;
  // The rings' records lie behind the header, in the mirror as in the state itself.
  uint8_t* to = reinterpret_cast<uint8_t*>(mirror) +
                (reinterpret_cast<const uint8_t*>(e.far.rings) - reinterpret_cast<const uint8_t*>(e.far.head));
  for (uint32_t ring = 0; ring < rings; ++ring) {
    const uint64_t* from = reinterpret_cast<const uint64_t*>(e.c.rings + ring);
    write_host(reinterpret_cast<uint64_t*>(to + ring * sizeof(RingState)) + lane - 128, from[lane - 128]);
  }
}

// One look at the rings. Returns the entries taken. `shown`: whether the host is told in any case.
__device__ inline uint32_t look(const Engine& e, bool shown) {
  Serve& s = *e.p.serve;
  read_words(e);
  const uint64_t now = nanoseconds();
  e.g.beating = now - s.last_beat >= BEAT_NS;  // only thread 0 asks
  const uint32_t taken = poll_rings(e.c, e.g, now / 1000);
  e.g.peeked = nullptr;
  if (threadIdx.x == 0 && e.g.beating) s.last_beat = now;
  if (shown || taken != 0) show(e);
  return taken;
}

__device__ inline float widen(uint16_t bits, uint64_t kind) {
  if (kind == 1) return __uint_as_float(uint32_t(bits) << 16);
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(bits));
  return f;
}

__device__ inline void copy_mirror(const Mirror& m) {
  if (m.kind == 0) {
    for (uint64_t i = threadIdx.x; i < m.nbytes / 16; i += blockDim.x) {
      reinterpret_cast<uint4*>(m.to)[i] = reinterpret_cast<const uint4*>(m.from)[i];
    }
    return;
  }
  for (uint64_t i = threadIdx.x; i < m.nbytes / 4; i += blockDim.x) {  // two elements
    const uint32_t pair = reinterpret_cast<const uint32_t*>(m.from)[i];
    reinterpret_cast<float2*>(m.to)[i] = {widen(uint16_t(pair), m.kind), widen(uint16_t(pair >> 16), m.kind)};
  }
}

__device__ inline void copy_words(void* to, const void* from, uint64_t nbytes) {
  for (uint64_t i = threadIdx.x; i < nbytes / 8; i += blockDim.x) {
    static_cast<uint64_t*>(to)[i] = static_cast<const uint64_t*>(from)[i];
  }
}

__device__ inline void come_near(Engine& e, Near& near) {
  const uint32_t rings = e.far.config->rings;
  copy_words(&near.config, e.far.config, sizeof(Config));
  copy_words(&near.head, e.far.head, sizeof(StateHeader));
  e.c.config = &near.config;
  e.c.head = &near.head;
  if (rings <= NEAR_RINGS) {
    copy_words(near.rings, e.far.rings, rings * sizeof(RingState));
    e.c.rings = near.rings;
  }
  __syncthreads();
}

__device__ inline void give_back(const Engine& e) {
  __syncthreads();
  copy_words(e.far.head, e.c.head, sizeof(StateHeader));
  if (e.c.rings != e.far.rings) copy_words(e.far.rings, e.c.rings, e.c.config->rings * sizeof(RingState));
  __syncthreads();
}

// Holds at a step boundary while verification reads the copies; never for longer than HOLD_NS.
__device__ inline void hold_if_asked(const Engine& e) {
  Serve& s = *e.p.serve;
  const uint64_t ticket = s.control.pause_request;
  if (ticket == s.held) return;
  const uint64_t since = nanoseconds();
  if (threadIdx.x == 0) publish_events(e.c);
  give_back(e);
  for (uint32_t i = 0; i < e.p.n_mirrors; ++i) copy_mirror(e.p.mirrors[i]);
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) {
    s.held = ticket;
    s.status.pause_ack = ticket;
    store_release(&e.host_status->pause_ack, ticket);
    while (load_acquire(&e.host_control->pause_release) < ticket && nanoseconds() - since < HOLD_NS &&
           load_acquire(&e.host_control->stop_request) == 0) {
      __nanosleep(20000);
      beat(e.c);
      write_host(&e.host_status->heartbeat, s.status.heartbeat);
    }
    const uint64_t now = nanoseconds();
    set_clock(e.c, now / 1000);
    excuse_leases(e.c, (now - since) / 1000);
  }
  __syncthreads();
}

// The bucket of the plan, or null. Thread 0.
__device__ inline const Bucket* choose(const Engine& e) {
  const PlanHeader& plan = *e.c.plan;
  for (uint32_t i = 0; i < e.p.n_buckets; ++i) {
    const Bucket& b = e.p.buckets[i];
    if (plan.n_tokens <= b.tokens && plan.n_rows <= b.rows && plan.n_samples <= b.samples &&
        (b.decode == 0 || plan.n_tokens == plan.n_rows)) {
      return &b;
    }
  }
  return nullptr;
}

__device__ inline void note_failure(const Engine& e, Failure why, uint64_t detail) {
  if (e.p.serve->failure != 0) return;
  e.p.serve->failure = uint64_t(why);
  e.p.serve->failure_detail = detail;
}

// Thread 0. An executable whose last run has told its end may not be free yet: the next one is tried, for a while.
__device__ inline bool launch(const Engine& e, const Bucket& b) {
  Serve& s = *e.p.serve;
  uint32_t& turn = s.turn[&b - e.p.buckets];
  __threadfence();
  const uint64_t since = nanoseconds();
  cudaError_t error = cudaSuccess;
  do {
    const cudaGraphExec_t executable = e.p.executables[b.first + turn];
    turn = turn + 1 == b.count ? 0 : turn + 1;
    error = cudaGraphLaunch(executable, b.tail != 0 ? cudaStreamGraphTailLaunch : cudaStreamGraphFireAndForget);
    if (error == cudaSuccess) {
      ++s.launches;
      return true;
    }
    ++s.refused;
  } while (nanoseconds() - since < LAUNCH_NS);
  note_failure(e, Failure::LAUNCH, uint64_t(error));
  return false;
}

// Thread 0: runs this graph again once this execution and all that it launched have ended.
__device__ inline bool renew(const Engine& e) {
  ++e.p.serve->executions;
  const cudaError_t error = cudaGraphLaunch(cudaGetCurrentGraphExec(), cudaStreamGraphTailLaunch);
  if (error == cudaSuccess) return true;
  note_failure(e, Failure::RENEWAL, uint64_t(error));
  return false;
}

// The engine has failed: every live request ends, nothing is planned any more and no page used again; entries are still
// judged, and refused, until the host asks for a stop.
__device__ inline void fail(const Engine& e) {
  Serve& s = *e.p.serve;
  if (threadIdx.x == 0) {
    for (uint32_t ring = 0; ring < e.c.config->rings; ++ring) terminate_ring(e.c, ring, ErrorReason::MODEL_ERROR);
    publish_events(e.c);
    set_state(e.c, EngineState::FAILED);
    Report& r = *e.p.report;
    r.failure_step = e.c.head->step;
    r.failure_detail = s.failure_detail;
    store_release(&r.failure, s.failure);
  }
  __syncthreads();
  const uint64_t since = nanoseconds();
  while (true) {
    look(e, true);
    __syncthreads();
    const uint64_t limit = e.p.run_limit_ns;
    if (s.control.stop_request != 0 || (limit != 0 && nanoseconds() - since > limit)) break;
  }
  if (threadIdx.x == 0) set_state(e.c, EngineState::STOPPED);
  __syncthreads();
}

__device__ inline void finish(const Engine& e) {
  if (threadIdx.x == 0) publish_events(e.c);
  give_back(e);
  show(e);
  for (uint32_t i = 0; i < e.p.n_mirrors; ++i) copy_mirror(e.p.mirrors[i]);
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) {
    const Serve& s = *e.p.serve;
    Report& r = *e.p.report;
    r.executions = s.executions;
    r.launches = s.launches;
    r.refused = s.refused;
    r.steady = e.g.scratch.steady + s.steady;
    store_release(&r.ended, 1);
  }
}

// What the block does next.
enum class Next : uint32_t { ON, RENEW, LEAVE, FAIL, STOP };

// One boundary, and the step it launches. `launches`: of this execution. `seen`: when the step before was seen to end.
__device__ inline Next turn(const Engine& e, uint32_t& launches, uint64_t& seen) {
  Serve& s = *e.p.serve;
  __shared__ uint32_t next;
  const bool go = step_boundary(e.c, e.g, microseconds());
  const uint64_t planned = nanoseconds();
  if (EngineState(e.c.head->state) == EngineState::STOPPED) return Next::STOP;
  if (s.control.pause_request != s.held) hold_if_asked(e);
  if (!go) {
    seen = 0;
    if (look(e, true) == 0) __nanosleep(IDLE_NAP_NS);
    const uint64_t limit = e.p.run_limit_ns;
    if (limit != 0 && e.g.any(threadIdx.x == 0 && nanoseconds() - s.started > limit) && threadIdx.x == 0) {
      s.control.stop_request = 1;
    }
    __syncthreads();
    return Next::ON;
  }
  if (threadIdx.x == 0) {
    const Bucket* b = choose(e);
    next = uint32_t(Next::FAIL);
    if (b == nullptr) {
      note_failure(e, Failure::NO_BUCKET, e.c.plan->n_tokens);
    } else if (launch(e, *b)) {
      next = uint32_t(b->tail != 0 ? Next::LEAVE : Next::ON);
      if (b->tail != 0) {
        s.tail_step = e.c.head->step;
        if (!renew(e)) next = uint32_t(Next::FAIL);
      }
    }
    const uint64_t launched = nanoseconds();
    s.deadline = launched + e.p.step_limit_ns;
    if (e.p.n_samples != 0) {
      Sample& sample = e.p.samples[e.c.head->step & (e.p.n_samples - 1)];
      write_host(&sample.seen, seen);
      write_host(&sample.planned, planned);
      write_host(&sample.launched, launched);
      write_host(&sample.step, e.c.head->step);
    }
  }
  __syncthreads();
  if (Next(next) != Next::ON) return Next(next);
  ++launches;
  const uint64_t step = e.c.head->step, deadline = s.deadline;
  bool ended = false, overdue = false;
  for (uint32_t looks = 0; !ended && !overdue; ++looks) {  // one a step at least: no pace of the model starves the rings
    const bool shown = looks % SHOW_EVERY == 0;
    look(e, shown);
    ended = e.g.any(threadIdx.x == 0 && acquire_device(&s.done) >= step);
    if (shown && !ended) overdue = e.g.any(threadIdx.x == 0 && nanoseconds() > deadline);
  }
  seen = nanoseconds();
  if (overdue) {
    if (threadIdx.x == 0) note_failure(e, Failure::OVERDUE, step);
    return Next::FAIL;
  }
  return launches == MOST_LAUNCHES ? Next::RENEW : Next::ON;
}

extern "C" __global__ void __launch_bounds__(THREADS) blink_serve(const __grid_constant__ ServeParams p) {
  __shared__ Scratch scratch;
  __shared__ unsigned long long cell;
  __shared__ uint64_t peeked[MAX_PEEKED];
  BlockGroup g(scratch, cell);
  __shared__ Near near;
  const Context far = make_context(p.shared, p.state, p.log, p.plan);
  Engine e{p, far, far, g, peeked, nullptr, nullptr};
  e.host_control = e.c.control;
  e.host_status = e.c.status;
  e.c.control = &p.serve->control;
  e.c.status = &p.serve->status;
  Serve& s = *p.serve;
  if (threadIdx.x == 0 && s.started == 0) s.started = nanoseconds();
  if (threadIdx.x == 0) scratch.steady = 0;
  come_near(e, near);
  __syncthreads();
  uint32_t launches = 0;
  uint64_t seen = 0;
  Next next = Next::ON;
  if (s.tail_step != 0) {  // it ran between the last execution and this one
    const bool lost = g.any(threadIdx.x == 0 && acquire_device(&s.done) < s.tail_step);
    if (lost && threadIdx.x == 0) note_failure(e, Failure::LOST_STEP, s.tail_step);
    __syncthreads();
    if (threadIdx.x == 0) s.tail_step = 0;
    __syncthreads();
    if (lost) next = Next::FAIL;
    seen = nanoseconds();
    if (!lost) look(e, true);
    __syncthreads();
  }
  while (next == Next::ON) next = turn(e, launches, seen);
  if (next == Next::LEAVE || next == Next::RENEW) {
    give_back(e);
    if (threadIdx.x == 0) s.steady += scratch.steady;
  }
  if (next == Next::LEAVE) return;
  if (next == Next::RENEW) {
    if (!g.any(threadIdx.x == 0 && !renew(e))) return;
    next = Next::FAIL;
  }
  if (next == Next::FAIL) fail(e);
  finish(e);
}

// Before the first execution: adopts the configuration of shared memory and makes the first state.
extern "C" __global__ void blink_serve_init(uint8_t* shared, uint8_t* state, uint8_t* log, uint8_t* plan, Serve* serve) {
  if (threadIdx.x != 0) return;
  adopt_config(shared, state);
  Context c = make_context(shared, state, log, plan);
  StatusLine* host = c.status;
  c.status = &serve->status;
  init_state(c);
  store_release(&host->state, serve->status.state);
}
