// Finds where a row's values, best first, reach a count or a mass: radix selection in shared memory, for top-k, top-p
// and the most probable alternatives. No sort of the vocabulary, and the same result in any launch: masses are
// integers.
#pragma once

#include "common.cuh"

constexpr int THREADS = 512;
constexpr int DIGIT = 11, BINS = 1 << DIGIT;
constexpr int LIST = 1024;
constexpr int LEVELS = 8;  // six digits of the key, two of the id

// `key` orders by distance from the best: not decreasing in it, and equal only where `distance` (almost) is.
struct Element {
  u64 key;
  double distance;
  u64 mass;  // fixed point
  bool there;
};

// Elements up to and including (distance, id), in the order of distance and then id.
struct Cut {
  double distance;
  u32 id;
  DEVICE bool holds(double d, u32 i) const { return d < distance || (d == distance && i <= id); }
};

struct SelectMemory {
  u64 mass[BINS];  // also the scan of the list's masses
  double distance[LIST];
  u32 count[BINS];
  u32 id[LIST];
  u64 scan_mass[THREADS / 32];
  u32 scan_count[THREADS / 32];
  u64 before_mass, target;
  u32 before_count, bin, bin_count, listed;
};

DEVICE int level_shift(int level) { return level < 5 ? 53 - DIGIT * level : level == 5 ? 0 : level == 6 ? DIGIT : 0; }
DEVICE u32 digit(int level, u64 key, u32 id) {
  if (level < 5) return u32(key >> level_shift(level)) & (BINS - 1);
  if (level == 5) return u32(key) & 511;  // the last 9 bits
  return id >> level_shift(level) & (BINS - 1);
}
// Whether an element has the digits chosen at the levels before.
DEVICE bool matches(int level, u64 key, u32 id, u64 prefix_key, u32 prefix_id) {
  if (level == 0) return true;
  if (level <= 5) return key >> level_shift(level - 1) == prefix_key >> level_shift(level - 1);
  return key == prefix_key && (level == 6 || id >> DIGIT == prefix_id >> DIGIT);
}

// Bitonic sort of `n` listed (distance, id) pairs; places up to LIST are filled up with infinities.
DEVICE void sort_list(SelectMemory& m, u32 n) {
  for (u32 i = threadIdx.x; i < LIST; i += THREADS) {
    if (i >= n) {
      m.distance[i] = double(INFINITY_F);
      m.id[i] = 0xffffffffu;
    }
  }
  for (u32 size = 2; size <= LIST; size <<= 1) {
    for (u32 step = size >> 1; step > 0; step >>= 1) {
      __syncthreads();
      for (u32 i = threadIdx.x; i < LIST / 2; i += THREADS) {
        const u32 low = 2 * i - (i & (step - 1)), high = low + step;
        const double a = m.distance[low], b = m.distance[high];
        const u32 ia = m.id[low], ib = m.id[high];
        const bool after = a > b || (a == b && ia > ib);
        if (after == ((low & size) == 0)) {
          m.distance[low] = b;
          m.distance[high] = a;
          m.id[low] = ib;
          m.id[high] = ia;
        }
      }
    }
  }
  __syncthreads();
}

// The smallest prefix whose count (MASS false) or mass (MASS true) is at least `target`, or everything if that is less.
// visit(f): calls f(element, id) for all elements, the same ones in every call, each in one thread. Ends with a
// barrier.
template <bool MASS, class Visit, class MassOf>
DEVICE Cut select(SelectMemory& m, u64 target, const Visit& visit, const MassOf& mass_of) {
  u64 prefix_key = 0, before_mass = 0;
  u32 prefix_id = 0, before_count = 0;
  for (int level = 0; level < LEVELS; ++level) {
    __syncthreads();
    for (int i = threadIdx.x; i < BINS; i += THREADS) {
      m.count[i] = 0;
      m.mass[i] = 0;
    }
    __syncthreads();
    visit([&](const Element& e, u32 id) {
      if (!e.there || !matches(level, e.key, id, prefix_key, prefix_id)) return;
      const u32 bin = digit(level, e.key, id);
      atomicAdd(&m.count[bin], 1u);
      if (MASS && e.mass != 0) atomicAdd(&m.mass[bin], e.mass);
    });
    __syncthreads();
    // Scan: each thread has BINS / THREADS neighbouring bins.
    constexpr int EACH = BINS / THREADS;
    u64 mass = 0;
    u32 count = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      count += m.count[threadIdx.x * EACH + i];
      mass += m.mass[threadIdx.x * EACH + i];
    }
    u64 sum_mass = mass;
    u32 sum_count = count;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
    for (int i = 1; i < 32; i <<= 1) {
      const u64 other_mass = __shfl_up_sync(0xffffffffu, sum_mass, i);
      const u32 other_count = __shfl_up_sync(0xffffffffu, sum_count, i);
      if (lane >= i) {
        sum_mass += other_mass;
        sum_count += other_count;
      }
    }
    if (lane == 31) {
      m.scan_mass[warp] = sum_mass;
      m.scan_count[warp] = sum_count;
    }
    __syncthreads();
    u64 at_mass = before_mass + sum_mass - mass, all_mass = before_mass;
    u32 at_count = before_count + sum_count - count, all_count = before_count;
    for (int i = 0; i < THREADS / 32; ++i) {
      if (i < warp) {
        at_mass += m.scan_mass[i];
        at_count += m.scan_count[i];
      }
      all_mass += m.scan_mass[i];
      all_count += m.scan_count[i];
    }
    const u64 wanted = min(target, MASS ? all_mass : u64(all_count));
    if (wanted == 0 || all_count == 0) return {-1.0, 0};  // the same in every thread
    for (int i = 0; i < EACH; ++i) {
      const int bin = threadIdx.x * EACH + i;
      const u64 here = MASS ? m.mass[bin] : m.count[bin], at = MASS ? at_mass : at_count;
      if (at < wanted && at + here >= wanted) {
        m.bin = bin;
        m.bin_count = m.count[bin];
        m.before_count = at_count;
        m.before_mass = at_mass;
        m.target = wanted;
        m.listed = 0;
      }
      at_count += m.count[bin];
      at_mass += m.mass[bin];
    }
    __syncthreads();
    target = m.target;
    before_count = m.before_count;
    before_mass = m.before_mass;
    const u32 bin = m.bin;
    if (m.bin_count <= LIST) {
      visit([&](const Element& e, u32 id) {
        if (!e.there || !matches(level, e.key, id, prefix_key, prefix_id) || digit(level, e.key, id) != bin) return;
        const u32 at = atomicAdd(&m.listed, 1u);
        m.distance[at] = e.distance;
        m.id[at] = id;
      });
      __syncthreads();
      const u32 n = m.listed;
      sort_list(m, n);
      u32 place = 0;
      if (MASS) {
        // Inclusive scan of the sorted masses, then the first place that reaches the target.
        for (u32 i = threadIdx.x; i < LIST; i += THREADS) m.mass[i] = i < n ? mass_of(m.distance[i]) : 0;
        for (u32 step = 1; step < LIST; step <<= 1) {
          u64 add[LIST / THREADS];
          __syncthreads();
#pragma unroll
          for (int j = 0; j < LIST / THREADS; ++j) {
            const u32 i = threadIdx.x + j * THREADS;
            add[j] = i >= step ? m.mass[i - step] : 0;
          }
          __syncthreads();
#pragma unroll
          for (int j = 0; j < LIST / THREADS; ++j) m.mass[threadIdx.x + j * THREADS] += add[j];
        }
        __syncthreads();
        for (u32 i = threadIdx.x; i < n; i += THREADS) {
          const u64 low = before_mass + (i > 0 ? m.mass[i - 1] : 0), high = before_mass + m.mass[i];
          if (low < target && high >= target) m.bin = i;
        }
        __syncthreads();
        place = m.bin;
      } else {
        place = u32(target) - before_count - 1;
      }
      const Cut cut = {m.distance[place], m.id[place]};
      __syncthreads();
      return cut;
    }
    if (level <= 5) {
      prefix_key |= u64(bin) << level_shift(level);
    } else {
      prefix_id |= bin << level_shift(level);
    }
  }
  return {double(INFINITY_F), 0xffffffffu};  // not reached: ids differ
}
