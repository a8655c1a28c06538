// Stands in for blink_core/device/kernels/common.cuh where a kernel runs on the host (tests/cuda_on_host.py): blocks one
// after the other, a block's threads as coroutines that meet at barriers, shuffles and matrix products. bfloat16.
//
// Copies into shared memory read when they are issued and land when the thread waits for them. What a kernel ahead writes
// (`Late`) is poison until a thread of the block has waited for it, so that nothing can be read too early.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef unsigned long long u64;
typedef long long i64;
using std::max;
using std::min;

#define DTYPE 1
#define DEVICE inline
#define __device__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static
#define INFINITY_F float(INFINITY)
#define NAN_F float(NAN)

struct int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct uint4 { u32 x, y, z, w; };
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct Dim { u32 x = 0, y = 0, z = 0; };

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

// -- the block that runs ----------------------------------------------------------------------------------------------

struct Copy { u8* to; u8 bytes[16]; };
struct Thread {
  ucontext_t context;
  std::unique_ptr<u8[]> stack;
  bool over = false;
  u64 warp_turns = 0, block_turns = 0;             // barriers passed
  std::vector<std::vector<Copy>> groups;           // of copies, the last one open
  u64 words[2][12] = {};                           // what the thread brings to a meeting of its warp, by its parity
};
struct Late { void* to; const void* value; u64 bytes; };

inline std::vector<Thread> threads;
inline std::vector<u64> warp_arrived;  // arrivals at the barriers of a warp, and of the block
inline u64 block_arrived = 0;
inline int running = 0;
inline bool block_waited = false;
inline std::vector<u8> waited;  // of each block of the last launch: whether it waited for the kernel ahead
inline std::vector<Late> late;
inline ucontext_t scheduler;
inline Dim blockIdx, blockDim, gridDim;
inline const std::function<void()>* body = nullptr;
alignas(128) inline u8 dynamic_shared[232448];
#define threadIdx (Dim{u32(running), 0, 0})

inline void yield() { swapcontext(&threads[running].context, &scheduler); }
inline void meet(u64& mine, u64& arrived, u64 count) {
  ++arrived;
  const u64 until = ++mine * count;
  while (arrived < until) yield();
}
inline u64 warp_threads(int warp) { return min<u64>(32, threads.size() - warp * 32); }
inline void meet_warp() {
  const int warp = running / 32;
  meet(threads[running].warp_turns, warp_arrived[warp], warp_threads(warp));
}
inline void __syncthreads() { meet(threads[running].block_turns, block_arrived, threads.size()); }
inline void __syncwarp(u32 = ~0u) { meet_warp(); }
// The words of this thread, for the others of its warp to read with theirs(). One barrier is enough: a thread that is one
// meeting ahead writes the other half.
inline u64* mine() { return threads[running].words[threads[running].warp_turns & 1]; }
inline const u64* theirs(int lane) {
  const int at = running / 32 * 32 + lane;
  return threads[at].words[(threads[running].warp_turns - 1) & 1];
}

inline void entry() {
  (*body)();
  if (threads[running].groups.size() > 1 || !threads[running].groups.back().empty()) {
    for (const auto& group : threads[running].groups) {
      if (!group.empty()) fail("a thread ended with copies under way");
    }
  }
  threads[running].over = true;
  yield();
}
inline void launch(int grid, int block, const std::function<void()>& kernel) {
  body = &kernel;
  gridDim.x = grid;
  blockDim.x = block;
  waited.assign(grid, 0);
  for (blockIdx.x = 0; blockIdx.x < u32(grid); ++blockIdx.x) {
    threads = std::vector<Thread>(block);
    warp_arrived.assign((block + 31) / 32, 0);
    block_arrived = 0;
    block_waited = false;
    for (const Late& l : late) std::memset(l.to, 0xff, l.bytes);
    std::memset(dynamic_shared, 0xff, sizeof(dynamic_shared));
    for (Thread& t : threads) {
      t.stack.reset(new u8[64 << 10]);
      t.groups.emplace_back();
      getcontext(&t.context);
      t.context.uc_stack.ss_sp = t.stack.get();
      t.context.uc_stack.ss_size = 64 << 10;
      t.context.uc_link = &scheduler;
      makecontext(&t.context, entry, 0);
    }
    for (bool all = false; !all;) {
      all = true;
      u64 before = block_arrived;
      for (u64 n : warp_arrived) before += n;
      int ended = 0;
      for (running = 0; running < block; ++running) {
        if (threads[running].over) continue;
        swapcontext(&scheduler, &threads[running].context);
        ended += threads[running].over;
        all = all && threads[running].over;
      }
      u64 after = block_arrived;
      for (u64 n : warp_arrived) after += n;
      if (!all && ended == 0 && after == before) fail("threads wait for each other for ever");
    }
  }
}

// -- what kernels call ------------------------------------------------------------------------------------------------

inline u32 bits_of(float x) { u32 r; std::memcpy(&r, &x, 4); return r; }
inline float float_of(u32 x) { float r; std::memcpy(&r, &x, 4); return r; }
inline float __uint_as_float(u32 x) { return float_of(x); }
inline float __int_as_float(int x) { return float_of(u32(x)); }
inline u32 __float_as_uint(float x) { return bits_of(x); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline void __threadfence() {}
template <class V> V __ldcg(const V* p) { return *p; }
template <class V> void __stcg(V* p, V v) { *p = v; }
inline int atomicAdd(int* p, int v) { const int before = *p; *p += v; return before; }
template <class V> V __shfl_sync(u32, V v, int lane) {
  std::memcpy(mine(), &v, sizeof(V));
  meet_warp();
  V r;
  std::memcpy(&r, theirs(lane & 31), sizeof(V));
  return r;
}
template <class V> V __shfl_xor_sync(u32 mask, V v, int other) { return __shfl_sync(mask, v, running % 32 ^ other); }
template <class V> V __shfl_up_sync(u32 mask, V v, int by) {
  const int lane = running % 32;
  return __shfl_sync(mask, v, lane >= by ? lane - by : lane);
}

struct bf16 { u16 bits; };
typedef bf16 T;
inline float to_float(bf16 x) { return float_of(u32(x.bits) << 16); }
template <class E> E from_float(float x);
template <> inline bf16 from_float<bf16>(float x) {
  const u32 b = bits_of(x);
  if (x != x) return {0x7fff};
  return {u16((b + 0x7fff + (b >> 16 & 1)) >> 16)};
}
constexpr int VEC = 8;
struct alignas(16) Vec { T e[VEC]; };
struct StepSizes { int n_rows, n_tokens, n_samples, reserved; };
inline u32 pack2(float low, float high) {
  return u32(from_float<bf16>(low).bits) | u32(from_float<bf16>(high).bits) << 16;
}
inline void pdl_launch() {}
inline void pdl_wait() {
  if (!block_waited) {
    for (const Late& l : late) std::memcpy(l.to, l.value, l.bytes);
  }
  block_waited = true;
  waited[blockIdx.x] = 1;
}
inline u32 shared_address(const void* p) { return u32(static_cast<const u8*>(p) - dynamic_shared); }
inline u8* at_shared(u32 address) { return dynamic_shared + int32_t(address); }
inline u64 streaming_policy() { return 0; }
inline void copy16(u32 shared, const void* global, bool valid) {
  Copy copy = {at_shared(shared), {}};
  if (valid) std::memcpy(copy.bytes, global, 16);
  threads[running].groups.back().push_back(copy);
}
inline uint4 load_shared16(u32 address) {
  uint4 v;
  std::memcpy(&v, at_shared(address), 16);
  return v;
}
inline void stream16(u32 shared, const void* global, bool valid, u64) { copy16(shared, global, valid); }
inline void copy_commit() { threads[running].groups.emplace_back(); }
template <int N> void copy_wait() {
  auto& groups = threads[running].groups;  // the last one has not been committed
  while (groups.size() > N + 1) {
    for (const Copy& c : groups.front()) std::memcpy(c.to, c.bytes, 16);
    groups.erase(groups.begin());
  }
}
inline void load_rows(u32 (&r)[4], u32 address, bool transposed) {
  mine()[0] = address;
  meet_warp();
  const int lane = running % 32;
  for (int j = 0; j < 4; ++j) {
    u16 pair[2];
    for (int e = 0; e < 2; ++e) {
      const int row = transposed ? lane % 4 * 2 + e : lane / 4, column = transposed ? lane / 4 : lane % 4 * 2 + e;
      std::memcpy(&pair[e], at_shared(u32(theirs(j * 8 + row)[0])) + column * 2, 2);
    }
    r[j] = u32(pair[0]) | u32(pair[1]) << 16;
  }
  meet_warp();  // all have read before anything is written anew
}
inline void load_matrix(u32 (&r)[4], u32 address) { load_rows(r, address, false); }
inline void load_matrix_transposed(u32 (&r)[4], u32 address) { load_rows(r, address, true); }
inline void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  u64* words = mine();
  for (int i = 0; i < 4; ++i) words[i] = a[i];
  words[4] = b0;
  words[5] = b1;
  meet_warp();
  const int g = running % 32 / 4, t4 = running % 4;
  for (int e = 0; e < 4; ++e) {
    const int row = g + (e >> 1) * 8, column = t4 * 2 + (e & 1);
    double sum = c[e];
    for (int k = 0; k < 16; ++k) {
      const u64* left = theirs(row % 8 * 4 + k % 8 / 2);
      const u64* right = theirs(column * 4 + k % 8 / 2);
      const u32 x = u32(left[(row / 8) + (k / 8) * 2]), y = u32(right[4 + k / 8]);
      const int shift = k % 2 * 16;
      sum += double(float_of((x >> shift) << 16)) * double(float_of((y >> shift) << 16));
    }
    c[e] = float(sum);
  }
}
inline float warp_sum(float x) {
  for (int i = 16; i > 0; i >>= 1) x += __shfl_xor_sync(~0u, x, i);
  return x;
}
inline float block_sum(float x, float* scratch) {
  x = warp_sum(x);
  __syncthreads();
  if (running % 32 == 0) scratch[running / 32] = x;
  __syncthreads();
  float total = 0.f;
  for (size_t i = 0; i < threads.size() / 32; ++i) total += scratch[i];
  return total;
}
inline float silu_mul(float gate, float up) { return gate / (1.f + std::exp(-gate)) * up; }
inline float exp2_fast(float x) { return std::exp2(x); }

extern "C" int has_waited(int block) { return waited[block]; }
extern "C" void set_late(int count, void** to, const void** value, const u64* bytes) {
  late.clear();
  for (int i = 0; i < count; ++i) late.push_back({to[i], value[i], bytes[i]});
}
