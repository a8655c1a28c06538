// Per-head norm (Qwen3), rotary embedding and KV append of one step, fused: one pass over the QKV projection.
//
// qkv [tokens, heads + 2 * kv_heads, HEAD_DIM]; queries are rotated in place, keys and values go to the pages. LANES
// neighbouring lanes share a (token, head), 16 bytes an access; the layout is rope.cuh's. Keys and values keep no copy in
// qkv.
#include "rope.cuh"

// cos, sin float32 [max position + 1, half]. norm: [heads + kv_heads, HEAD_DIM] or null. k_pages, v_pages: one layer.
extern "C" __global__ void rope_append(T* qkv, const int* positions, const i64* kv_slots, const float* cos,
                                       const float* sin, const T* norm, T* k_pages, T* v_pages, int tokens, int heads,
                                       int kv_heads, int half, float eps) {
  pdl_launch();
  pdl_wait();
  const u32 total = heads + 2 * kv_heads, count = u32(tokens) * total;
  const u32 place = (blockIdx.x * blockDim.x + threadIdx.x) / LANES;
  const int lane = threadIdx.x % LANES;
  const bool active = place < count;  // the others go along for the shuffles
  const u32 work = active ? place : count - 1;
  const u32 token = work / total;
  const int head = int(work - token * total);
  T* in = qkv + u64(work) * HEAD_DIM;
  T* out = in;
  if (head >= heads) {
    const bool key = head < heads + kv_heads;
    const int kv_head = head - heads - (key ? 0 : kv_heads);
    out = (key ? k_pages : v_pages) + (kv_slots[token] * kv_heads + kv_head) * HEAD_DIM;
  }
  const bool rotated = head < heads + kv_heads;
  const int pairs = rotated ? half / VEC : 0;  // vectors of a half; all the others pass
  Vec a = {}, b = {};
  float c[VEC] = {}, s[VEC] = {};
  if (lane < pairs) {
    a = load_vec(in + lane * VEC);
    b = load_vec(in + half + lane * VEC);
    const i64 at = i64(positions[token]) * half + lane * VEC;
#pragma unroll
    for (int e = 0; e < VEC; e += 4) {
      *reinterpret_cast<float4*>(c + e) = *reinterpret_cast<const float4*>(cos + at + e);
      *reinterpret_cast<float4*>(s + e) = *reinterpret_cast<const float4*>(sin + at + e);
    }
  }
  const T* weight = norm == nullptr || !rotated ? nullptr : norm + i64(head) * HEAD_DIM;
  float scale = 1.f;
  if (norm != nullptr) {
    float sum = squares(a) + squares(b);
    for (int v = 2 * pairs + lane; v < VECTORS; v += LANES) sum += squares(load_vec(in + v * VEC));
#pragma unroll
    for (int i = LANES / 2; i > 0; i >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, i);
    scale = 1.f / sqrtf(sum / float(HEAD_DIM) + eps);
  }
  auto normed = [&](const Vec& v, int e, int at) {
    return weight == nullptr ? to_float(v.e[e]) : to_float(v.e[e]) * scale * to_float(weight[at + e]);
  };
  if (!active) return;
  if (lane < pairs) {
    Vec first, second;
#pragma unroll
    for (int e = 0; e < VEC; ++e) {
      const float x = normed(a, e, lane * VEC), y = normed(b, e, half + lane * VEC);
      first.e[e] = from_float<T>(__fmaf_rn(x, c[e], -__fmul_rn(y, s[e])));
      second.e[e] = from_float<T>(__fmaf_rn(y, c[e], __fmul_rn(x, s[e])));
    }
    store_vec(out + lane * VEC, first);
    store_vec(out + half + lane * VEC, second);
  }
  for (int v = 2 * pairs + lane; v < VECTORS; v += LANES) {
    Vec passed = load_vec(in + v * VEC);
    if (weight != nullptr) {
#pragma unroll
      for (int e = 0; e < VEC; ++e) passed.e[e] = from_float<T>(normed(passed, e, v * VEC));
    }
    store_vec(out + v * VEC, passed);
  }
}

// Writes values [tokens, kv_heads, HEAD_DIM], rows `stride` elements apart, into one layer's pages. A thread a vector.
extern "C" __global__ void append_kv(const T* values, i64 stride, const i64* kv_slots, T* pages, int tokens,
                                     int kv_heads) {
  pdl_launch();
  pdl_wait();
  const u32 each = kv_heads * VECTORS;
  const u32 place = blockIdx.x * blockDim.x + threadIdx.x;
  if (place >= u32(tokens) * each) return;
  const u32 token = place / each, at = (place - token * each) * VEC;
  store_vec(pages + kv_slots[token] * kv_heads * HEAD_DIM + at, load_vec(values + token * stride + at));
}
