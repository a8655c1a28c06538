// Acquire loads and release stores of the 8-byte words that order ring traffic (design section 3).
// Only cuda::atomic_ref is used: ThreadSanitizer understands it, and it compiles for host and GPU alike.
#pragma once
#include <cuda/atomic>

#include "abi.hpp"

namespace blink {

BLINK_FN uint64_t load_acquire(const uint64_t* word) {
  cuda::atomic_ref<uint64_t, cuda::thread_scope_system> ref(*const_cast<uint64_t*>(word));
  return ref.load(cuda::std::memory_order_acquire);
}

BLINK_FN void store_release(uint64_t* word, uint64_t value) {
  cuda::atomic_ref<uint64_t, cuda::thread_scope_system> ref(*word);
  ref.store(value, cuda::std::memory_order_release);
}

// Words that order nothing: counters for readers, and flags that are looked at again.
BLINK_FN uint64_t load_relaxed(const uint64_t* word) {
  cuda::atomic_ref<uint64_t, cuda::thread_scope_system> ref(*const_cast<uint64_t*>(word));
  return ref.load(cuda::std::memory_order_relaxed);
}

BLINK_FN void store_relaxed(uint64_t* word, uint64_t value) {
  cuda::atomic_ref<uint64_t, cuda::thread_scope_system> ref(*word);
  ref.store(value, cuda::std::memory_order_relaxed);
}

}  // namespace blink
