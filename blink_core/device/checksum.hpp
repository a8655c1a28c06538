// 64-bit checksum of 32-bit words that a group computes in any order: a sum of mixed (word, index) pairs.
// Not cryptographic: it detects torn and stale writes, not an attacker. blink_core/transport/checksum.py calls this one.
#pragma once

#include "abi.hpp"

namespace blink {

BLINK_FN uint64_t mix_word(uint32_t word, uint64_t index) {
  uint64_t z = uint64_t(word) + (index + 1) * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

}  // namespace blink
