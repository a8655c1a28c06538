// Philox4x32-10 (Salmon, Moraes, Dror, Shaw, SC 2011) and the exponential times of the sampler's race.
#pragma once

#include "common.cuh"

struct Words {
  u32 x[4];
};

DEVICE Words philox(u32 c0, u32 c1, u32 c2, u32 c3, u32 k0, u32 k1) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const u32 high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
    const u32 high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
    c0 = high1 ^ c1 ^ k0;
    c2 = high0 ^ c3 ^ k1;
    c1 = low1;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// The words of token ids 4 * block to 4 * block + 3.
DEVICE Words token_words(u32 block, u32 position, u32 choice, u64 seed) {
  return philox(block, position, choice, 0, u32(seed), u32(seed >> 32));
}

// -log(u) of u = (word + 0.5) / 2^32: exact inputs near 1, where it is small and wins races.
DEVICE float time_fast(u32 word) {
  if (word >= 0x80000000u) return -log1pf(-(float(0xffffffffu - word) + 0.5f) * 2.3283064365386963e-10f);
  return -__logf((float(word) + 0.5f) * 2.3283064365386963e-10f);
}
DEVICE double time_exact(u32 word) { return -log((double(word) + 0.5) * 2.3283064365386962890625e-10); }
