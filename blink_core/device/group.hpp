// The threads that run the scheduler together: one thread on the host, a block of 256 on the GPU (design section 4).
// Every member executes the same calls in the same order; `broadcast` gives all of them rank 0's value.
#pragma once

#include "abi.hpp"

namespace blink {

// Values that members of a group share while they work on one submission entry.
struct Scratch {
  Slot slot;
  uint64_t word;
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
};

#if defined(__CUDACC__)
// All threads of one block. `cell` lies in shared memory.
struct BlockGroup {
  Scratch& scratch;
  unsigned long long& cell;
  __device__ BlockGroup(Scratch& s, unsigned long long& c) : scratch(s), cell(c) {}
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
    __syncthreads();
    atomicAdd(&cell, static_cast<unsigned long long>(value));
    __syncthreads();
    const uint64_t result = cell;
    __syncthreads();
    return result;
  }
  __device__ bool any(bool value) const { return __syncthreads_or(value) != 0; }
};
#endif

}  // namespace blink
