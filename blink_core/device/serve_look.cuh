// What the scheduler that serves on a GPU keeps at hand, and its looks at rings, host and the step in flight.
#pragma once

#include "serve_records.cuh"

// What the scheduler touches all the time, in shared memory while an execution lasts: reading it from device memory takes
// ten times as long. Taken at the begin, given back before anybody else reads it. The pointers are there too: they would
// lie in local memory, whose lines for 256 threads are more than a cache of the first level holds beside shared memory.
constexpr uint32_t NEAR_RINGS = 8;
constexpr uint32_t SHOWN_RINGS = 8;

// The bucket of a step's sizes. It stays as long as they do.
struct Target {
  uint32_t tokens, rows, samples;
  uint32_t chosen;  // index of the bucket; n_buckets: none fits
  uint32_t turn;   // of Serve
  Bucket bucket;
  cudaGraphExec_t executables[NEAR_EXECUTABLES];
};

struct Near {
  ServeParams params;
  Context context, far;  // far: where all of it lies in device memory
  Config config;
  StateHeader head;
  RingState rings[NEAR_RINGS];
  ControlLine control;  // a copy
  Target target;
  uint64_t last_beat, held;      // of Serve
  uint64_t deadline;             // of the step in flight
  uint64_t launches, refused;    // of Serve, since they were given back
  uint32_t arrived, awaited;     // warps whose words have come: see watch
};

struct Engine {
  const ServeParams& p;
  const Context& c;
  const Context& far;
  BlockGroup& g;
  Near& near;
  uint64_t* peeked;  // [MAX_PEEKED] in shared memory
  ControlLine* host_control;
  StatusLine* host_status;
};

struct InShared {};
__device__ inline void* operator new(decltype(sizeof(0)), void* room, InShared) noexcept { return room; }
__device__ inline void operator delete(void*, void*, InShared) noexcept {}

// The first warp reads nothing: it has the end of the step to look for.
constexpr uint32_t FIRST_READER = 32;
constexpr uint32_t CONTROL_READER = THREADS - sizeof(ControlLine) / 8;

__device__ inline bool words_fit(const Engine& e) {
  const uint32_t words = e.c.config->rings * RING_WORDS;
  return words <= MAX_PEEKED && FIRST_READER + words <= CONTROL_READER;
}

// Reads this thread's share of what front ends and the host have written: each word is a read of host memory, all of
// them go at once. Whether a look at the rings would act on it.
__device__ inline bool read_word(const Engine& e) {
  bool news = false;
  const Config& k = *e.c.config;
  if (threadIdx.x >= CONTROL_READER) {
    const uint32_t word = threadIdx.x - CONTROL_READER;
    uint64_t* to = reinterpret_cast<uint64_t*>(&e.near.control);
    to[word] = read_host(reinterpret_cast<const uint64_t*>(e.host_control) + word);
  } else if (threadIdx.x >= FIRST_READER && threadIdx.x - FIRST_READER < k.rings * RING_WORDS && words_fit(e)) {
    const uint32_t lane = threadIdx.x - FIRST_READER, ring = lane / RING_WORDS, which = lane % RING_WORDS;
    const RingMemory m = e.c.ring(ring);
    const RingState& rs = e.c.rings[ring];
    const uint64_t index = rs.sq_next + (which > 3 ? which - 3 : 0);
    const uint64_t value = load_acquire(which == 0   ? &m.front_end->epoch
                                        : which == 1 ? &m.front_end->cq_head
                                        : which == 2 ? &m.front_end->lease
                                                     : &m.sq[index & (k.sq_entries - 1)]);
    e.peeked[lane] = value;
    const uint64_t entry = value >> SQ_SEQ_SHIFT & ((1u << SEQ_BITS) - 1);
    news = which == 0   ? value != rs.epoch
           : which == 1 ? value != rs.cq_head
           : which == 2 ? k.lease_us != 0 && value != rs.lease
           : which == 3 ? entry == sq_seq(index)
                        : false;  // nothing is taken before the entry ahead of it
  }
  return news;
}

__device__ inline void read_words(const Engine& e) {
  read_word(e);
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

// One look at the rings. Returns the entries taken. `shown`: whether the host is told in any case. `fresh`: the words
// were read just now.
__device__ inline uint32_t look(const Engine& e, bool shown, bool fresh = false) {
  if (!fresh) read_words(e);
  const uint64_t now = nanoseconds();
  const bool beating = now - e.near.last_beat >= BEAT_NS;  // only thread 0 asks
  if (threadIdx.x == 0) {
    e.g.peeked = words_fit(e) ? e.peeked : nullptr;
    e.g.beating = beating;
  }
  const uint32_t taken = poll_rings(e.c, e.g, now / 1000);
  if (threadIdx.x == 0) {
    e.g.peeked = nullptr;
    if (beating) e.p.serve->last_beat = e.near.last_beat = now;
  }
  if (shown || taken != 0) show(e);
  return taken;
}

struct Sight {
  bool ended;  // the step
  bool news;   // a look at the rings would find something
  bool due;    // heartbeat, leases, deadlines and limits ask for a look, whatever there is
};

// Looks for the end of the step in flight, and meanwhile reads the rings' words once: a look that would find nothing
// takes several times as long.
__device__ inline Sight watch(const Engine& e, const uint64_t* done, uint64_t number) {
  constexpr uint32_t readers = (THREADS - FIRST_READER) / 32;
  Sight sight{false, false, false};
  if (threadIdx.x >= FIRST_READER) {
    sight.news = read_word(e) || e.c.config->masks > 0 || !words_fit(e);
    if (threadIdx.x == FIRST_READER) sight.due = nanoseconds() - e.near.last_beat >= BEAT_NS;
    __syncwarp();
    if (threadIdx.x % 32 == 0) atomicAdd(&e.near.arrived, 1);
  } else if (threadIdx.x == 0) {
    e.near.awaited += readers;
    const volatile uint32_t* arrived = &e.near.arrived;
    do {
      sight.ended = acquire_device(done) >= number;
    } while (!sight.ended && *arrived != e.near.awaited);
  }
  sight.ended = e.g.any(sight.ended);
  if (sight.ended) return sight;
  sight.news = e.g.any(sight.news);
  sight.due = e.g.any(sight.due);
  return sight;
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

__device__ inline void come_near(const Engine& e) {
  const uint32_t rings = e.far.config->rings;
  Near& near = e.near;
  copy_words(&near.config, e.far.config, sizeof(Config));
  copy_words(&near.head, e.far.head, sizeof(StateHeader));
  if (rings <= NEAR_RINGS) copy_words(near.rings, e.far.rings, rings * sizeof(RingState));
  if (threadIdx.x == 0) {
    Context& c = near.context;
    c.config = &near.config;
    c.head = &near.head;
    c.control = &near.control;
    c.status = &e.p.serve->status;
    if (rings <= NEAR_RINGS) c.rings = near.rings;
    near.target.tokens = 0;  // no step has none
    near.last_beat = e.p.serve->last_beat;
    near.held = e.p.serve->held;
    near.deadline = near.launches = near.refused = 0;
    near.arrived = near.awaited = 0;
  }
  __syncthreads();
  read_words(e);
}

__device__ inline void give_back(const Engine& e) {
  __syncthreads();
  copy_words(e.far.head, e.c.head, sizeof(StateHeader));
  if (e.c.rings != e.far.rings) copy_words(e.far.rings, e.c.rings, e.c.config->rings * sizeof(RingState));
  if (threadIdx.x == 0) {
    Serve& s = *e.p.serve;
    s.launches += e.near.launches;
    s.refused += e.near.refused;
    s.steady += e.g.scratch.steady;
    e.near.launches = e.near.refused = e.g.scratch.steady = 0;
  }
  __syncthreads();
}

// Holds at a step boundary while verification reads the copies; never for longer than HOLD_NS.
__device__ inline void hold_if_asked(const Engine& e) {
  Serve& s = *e.p.serve;
  const uint64_t ticket = e.near.control.pause_request;
  if (ticket == e.near.held) return;
  const uint64_t since = nanoseconds();
  if (threadIdx.x == 0) publish_events(e.c);
  give_back(e);
  for (uint32_t i = 0; i < e.p.n_mirrors; ++i) copy_mirror(e.p.mirrors[i]);
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) {
    s.held = e.near.held = ticket;
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
