// The threads that run the scheduler together: one thread on the host, a block of 256 on the GPU (design section 4).
// Every member executes the same calls in the same order; `broadcast` gives all of them rank 0's value.
#pragma once

#include "atomics.hpp"

namespace blink {

// Values that members of a group share while they work on one submission entry.
struct Scratch {
  Slot slot;
  uint64_t word;
  uint64_t steady;  // boundaries that all members worked on together: see steady.hpp
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
  // Rank 0: a word that a front end writes; `place` names it among those of all rings.
  BLINK_FN uint64_t peek(uint32_t, const uint64_t* word) const { return load_acquire(word); }
};

inline constexpr uint32_t RING_WORDS = 4;  // epoch, head, lease, next entry
inline constexpr uint32_t MAX_PEEKED = 256;

#if defined(__CUDACC__)
// All threads of one block. `cell` lies in shared memory.
struct BlockGroup {
  Scratch& scratch;
  unsigned long long& cell;
  const uint64_t* peeked = nullptr;  // in shared memory: the words of all rings as they were read together
  __device__ BlockGroup(Scratch& s, unsigned long long& c) : scratch(s), cell(c) {}
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
  bool beating = true;
};
#endif

}  // namespace blink
