// Types, conversions, copies and synchronisation shared by the model kernels (design section 7). NVRTC, no headers.
// DTYPE selects the element type T: 0 float32 (strict), 1 bfloat16, 2 float16. Sums are always float32.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#ifndef DTYPE
#define DTYPE 1
#endif

#define DEVICE __device__ __forceinline__
#define INFINITY_F __int_as_float(0x7f800000)
#define NAN_F __int_as_float(0x7fc00000)
#define LOG2E 1.4426950408889634f

struct bf16 {
  u16 bits;
};
struct fp16 {
  u16 bits;
};

// Sizes of the step that runs, in device memory: graphs are captured for the greatest sizes of a bucket.
struct StepSizes {
  int n_rows, n_tokens, n_samples, reserved;
};

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(bf16 x) { return __uint_as_float(u32(x.bits) << 16); }
DEVICE float to_float(fp16 x) {
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x.bits));
  return r;
}
template <class E>
DEVICE E from_float(float x);
template <>
DEVICE float from_float<float>(float x) {
  return x;
}
template <>
DEVICE bf16 from_float<bf16>(float x) {
  bf16 r;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r.bits) : "f"(x));
  return r;
}
template <>
DEVICE fp16 from_float<fp16>(float x) {
  fp16 r;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r.bits) : "f"(x));
  return r;
}

#if DTYPE == 0
typedef float T;
#elif DTYPE == 1
typedef bf16 T;
#else
typedef fp16 T;
#endif

// VEC elements are one 16-byte access.
constexpr int VEC = 16 / sizeof(T);
struct alignas(16) Vec {
  T e[VEC];
};

// Two floats as one 32-bit register of 16-bit elements, the first in the low half.
DEVICE u32 pack2(float low, float high) {
  u32 r;
#if DTYPE == 2
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#else
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#endif
  return r;
}

// Programmatic dependent launch: a kernel may start before the one it follows has ended. Everything a predecessor
// wrote, or reads of what this kernel writes, comes after pdl_wait(); every thread of every kernel calls it, so that
// waiting for one predecessor is waiting for all before it.
DEVICE void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE void pdl_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// A cluster's blocks: they run at once and reach each other's shared memory. A write to another block's comes after
// a first arrival and wait of all, by which that block has begun; a read of what others wrote after a second.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// The address of the same variable in the shared memory of another block of the cluster.
DEVICE u32 shared_of(u32 shared, u32 rank) {
  u32 address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
  return address;
}
DEVICE void store_cluster(u32 address, u64 x) {
  asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(address), "l"(x) : "memory");
}
#endif

DEVICE u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }
// 16 bytes from global to shared memory; zeros, and nothing read, unless `valid`.
DEVICE void copy16(u32 shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid ? 16 : 0)
               : "memory");
}
// L2 policy of data that is read once a step: it goes first, so that code, activations and tables stay.
DEVICE u64 streaming_policy() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
DEVICE void stream16(u32 shared, const void* global, bool valid, u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::256B [%0], [%1], 16, %2, %3;" ::"r"(shared), "l"(global),
               "r"(valid ? 16 : 0), "l"(policy)
               : "memory");
}
// 16 bytes of what the thread copied itself.
DEVICE uint4 load_shared16(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
DEVICE void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

DEVICE void load_matrix(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
DEVICE void load_matrix_transposed(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
// c[16x8] += a[16x16] b[16x8], float32 sums.
DEVICE void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if DTYPE == 2
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

DEVICE float exp2_fast(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

DEVICE float warp_sum(float x) {
#pragma unroll
  for (int i = 16; i > 0; i >>= 1) x += __shfl_xor_sync(0xffffffffu, x, i);
  return x;
}
DEVICE float warp_max(float x) {
#pragma unroll
  for (int i = 16; i > 0; i >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, i));
  return x;
}
// Sum over the block, the same in every thread; `scratch` holds one float a warp. Warps are added in order.
DEVICE float block_sum(float x, float* scratch) {
  x = warp_sum(x);
  const int warps = (blockDim.x + 31) >> 5;
  __syncthreads();
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = x;
  __syncthreads();
  float total = 0.f;
  for (int i = 0; i < warps; ++i) total += scratch[i];
  return total;
}

// silu(gate) * up: exp of a very negative gate is inf, and the quotient the right zero.
DEVICE float silu_mul(float gate, float up) {
#if DTYPE == 0
  return gate / (1.f + expf(-gate)) * up;
#else
  return __fdividef(gate, 1.f + __expf(fminf(-gate, 80.f))) * up;
#endif
}
