// The threads that run the scheduler together: one thread on the host, a block of 256 on the GPU (design section 4).
// Every member executes the same calls in the same order; `broadcast` gives all of them rank 0's value.
#pragma once

#include "atomics.hpp"
#include "next.hpp"

namespace blink {

// Moments of a boundary whose times a GPU can take, in their order: with BLINK_PHASES, see serve_kernel.cu.
enum class Phase : uint32_t {
  SEEN,      // the end of the step before
  PREPARED,  // what the boundary needs is known; got together before, as a rule
  JUDGED,    // every member has looked at its rows
  WRITTEN,   // the plan
  PLANNED,   // the boundary is over
  CHOSEN,    // the step graph
  FENCED,    // the plan is visible
  LAUNCHED,
  FINISHED,  // events, pages and log of the step before
  LOOKED,    // at the rings, for the first time
  READY,     // what the next boundary needs is known
  COUNT
};

// Values that members of a group share while they work on one submission entry.
struct Scratch {
  Slot slot;
  uint64_t word;
  uint64_t steady;  // boundaries that all members worked on together: see steady.hpp
  NextStep next;
#if defined(BLINK_PHASES)
  uint64_t phases[uint32_t(Phase::COUNT)];  // globaltimer nanoseconds
#endif
};

// A single thread: every collective is the identity.
struct SoloGroup {
  Scratch& scratch;
  BLINK_FN explicit SoloGroup(Scratch& s) : scratch(s) {}
  BLINK_FN uint32_t rank() const { return 0; }
  BLINK_FN uint32_t size() const { return 1; }
  BLINK_FN void sync() const {}
  BLINK_FN uint64_t broadcast(uint64_t value) const { return value; }
  BLINK_FN uint64_t sum(uint64_t value) const { return value; }
  BLINK_FN bool any(bool value) const { return value; }
  BLINK_FN bool beats() const { return true; }
  BLINK_FN void stamp(Phase) const {}
  // Rank 0: a word that a front end writes; `place` names it among those of all rings.
  BLINK_FN uint64_t peek(uint32_t, const uint64_t* word) const { return load_acquire(word); }
};

inline constexpr uint32_t PEEKED_ENTRIES = 2;  // who takes one looks whether there is another
inline constexpr uint32_t RING_WORDS = 3 + PEEKED_ENTRIES;  // epoch, head, lease, next entries
inline constexpr uint32_t MAX_PEEKED = 256;

#if defined(__CUDACC__)
// All threads of one block. `cell` lies in shared memory.
struct BlockGroup {
  Scratch& scratch;
  unsigned long long& cell;
  const uint64_t* peeked = nullptr;  // in shared memory: the words of all rings as they were read together
  __device__ BlockGroup(Scratch& s, unsigned long long& c) : scratch(s), cell(c) {}
  // Once, by all threads: shared memory begins with anything. `rows`: `room` of them, in shared memory.
  __device__ void begin(NextRow* rows, uint32_t room) const {
    if (threadIdx.x == 0) {
      scratch.steady = 0;
      scratch.next.step = scratch.next.ended = 0;
      scratch.next.rows = scratch.next.moves = 0;
      scratch.next.row = rows;
      scratch.next.room = room;
    }
    __syncthreads();
  }
  __device__ uint64_t peek(uint32_t place, const uint64_t* word) const {
    return peeked != nullptr ? peeked[place] : load_acquire(word);
  }
  __device__ uint32_t rank() const { return threadIdx.x; }
  __device__ uint32_t size() const { return blockDim.x; }
  __device__ void sync() const { __syncthreads(); }
  __device__ uint64_t broadcast(uint64_t value) const {
    if (threadIdx.x == 0) cell = value;
    __syncthreads();
    const uint64_t result = cell;
    __syncthreads();
    return result;
  }
  __device__ uint64_t sum(uint64_t value) const {
    if (threadIdx.x == 0) cell = 0;
    for (int i = 16; i > 0; i >>= 1) value += __shfl_xor_sync(0xffffffffu, value, i);
    __syncthreads();
    // One addition a warp: in shared memory one of 64 bits is a loop.
    if (threadIdx.x % 32 == 0 && value != 0) atomicAdd(&cell, static_cast<unsigned long long>(value));
    __syncthreads();
    const uint64_t result = cell;
    __syncthreads();
    return result;
  }
  __device__ bool any(bool value) const { return __syncthreads_or(value) != 0; }
  // Whether this poll raises the heartbeat: a write to host memory waits for those before it, and polls are many.
  __device__ bool beats() const { return beating; }
  __device__ void stamp(Phase phase) const {
#if defined(BLINK_PHASES)
    if (threadIdx.x == 0) asm volatile("mov.u64 %0, %globaltimer;" : "=l"(scratch.phases[uint32_t(phase)])::"memory");
#endif
  }
  bool beating = true;
};
#endif

}  // namespace blink
