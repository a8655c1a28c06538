// Per-head norm (Qwen3) and rotary embedding of a head by LANES neighbouring lanes, 16 bytes an access, inside decode
// attention: to the bits of rope_kv.cu, where it is a kernel of its own (products and sums are therefore contracted here
// and there, not by the compiler).
//
// Rotate-half layout: element i pairs with i + half; those from 2 * half on pass (partial rotary). half is a multiple
// of VEC.
#pragma once
#include "common.cuh"

constexpr int VECTORS = HEAD_DIM / VEC;
constexpr int LANES = VECTORS <= 8 ? 4 : VECTORS <= 16 ? 8 : 16;  // at least half the vectors of a head

// Heads of a token: queries, keys, values.
struct RopeParams {
  const float* cos;      // [rows, half]
  const float* sin;
  const int* positions;  // [tokens] row of cos and sin
  const i64* kv_slots;   // [tokens] page * page size + offset
  const T* norm;         // [heads + kv_heads, HEAD_DIM] or null
  T* k_pages;            // of one layer
  T* v_pages;
  int heads, kv_heads, half;
  float eps;
};

// A lane's vector of a head's first half and the one that it pairs with.
struct Pair {
  Vec a, b;
};
struct Angles {
  float cos[VEC], sin[VEC];
};

DEVICE Vec load_vec(const T* p) { return *reinterpret_cast<const Vec*>(p); }
DEVICE void store_vec(T* p, const Vec& v) { *reinterpret_cast<Vec*>(p) = v; }
DEVICE float squares(const Vec& v) {
  float sum = 0.f;
#pragma unroll
  for (int e = 0; e < VEC; ++e) sum = __fmaf_rn(to_float(v.e[e]), to_float(v.e[e]), sum);
  return sum;
}

DEVICE Pair load_pair(const T* from, int half, int lane) {
  Pair pair;
  pair.a = load_vec(from + lane * VEC);
  pair.b = load_vec(from + half + lane * VEC);
  return pair;
}
// Vectors of a half of a head; all its others pass.
DEVICE int pairs_of(const RopeParams& p, int head) { return head < p.heads + p.kv_heads ? p.half / VEC : 0; }
// Weights of a head's norm, null for none.
DEVICE const T* weights_of(const RopeParams& p, int head) {
  return p.norm == nullptr || head >= p.heads + p.kv_heads ? nullptr : p.norm + i64(head) * HEAD_DIM;
}
DEVICE Pair load_weights(const RopeParams& p, int head, int lane) {
  const T* weights = weights_of(p, head);
  return weights != nullptr && lane < pairs_of(p, head) ? load_pair(weights, p.half, lane) : Pair{};
}
// Where a token's angles begin.
DEVICE i64 angles_of(const RopeParams& p, i64 token) { return i64(p.positions[token]) * p.half; }
DEVICE Angles load_angles(const RopeParams& p, i64 row, int lane) {
  Angles angles;
  const i64 at = row + lane * VEC;
#pragma unroll
  for (int e = 0; e < VEC; e += 4) {
    *reinterpret_cast<float4*>(angles.cos + e) = *reinterpret_cast<const float4*>(p.cos + at + e);
    *reinterpret_cast<float4*>(angles.sin + e) = *reinterpret_cast<const float4*>(p.sin + at + e);
  }
  return angles;
}
// Place of a token's key or value head in the pages.
DEVICE T* slot_of(const RopeParams& p, i64 token, int head) {
  const bool key = head < p.heads + p.kv_heads;
  const int kv_head = head - p.heads - (key ? 0 : p.kv_heads);
  return (key ? p.k_pages : p.v_pages) + (p.kv_slots[token] * p.kv_heads + kv_head) * HEAD_DIM;
}

// Head `head` of a token from `in` to `out`, which may be the same: normed, rotated, rounded. weights: load_weights().
// The whole warp calls it, for the shuffles; `active` lanes write.
DEVICE void turn_head(const RopeParams& p, int head, const T* in, T* out, const Pair& weights, const Angles& angles,
                      int lane, bool active) {
  const int pairs = pairs_of(p, head), half = p.half;
  const T* norm = weights_of(p, head);
  Pair own = {};
  if (lane < pairs) own = load_pair(in, half, lane);
  float scale = 1.f;
  if (p.norm != nullptr) {
    float sum = squares(own.a) + squares(own.b);
    for (int v = 2 * pairs + lane; v < VECTORS; v += LANES) sum += squares(load_vec(in + v * VEC));
#pragma unroll
    for (int i = LANES / 2; i > 0; i >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, i);
    scale = 1.f / sqrtf(sum / float(HEAD_DIM) + p.eps);
  }
  auto normed = [&](T value, T weight) {
    return norm == nullptr ? to_float(value) : to_float(value) * scale * to_float(weight);
  };
  if (!active) return;
  if (lane < pairs) {
    Pair turned;
#pragma unroll
    for (int e = 0; e < VEC; ++e) {
      const float x = normed(own.a.e[e], weights.a.e[e]), y = normed(own.b.e[e], weights.b.e[e]);
      turned.a.e[e] = from_float<T>(__fmaf_rn(x, angles.cos[e], -__fmul_rn(y, angles.sin[e])));
      turned.b.e[e] = from_float<T>(__fmaf_rn(y, angles.cos[e], __fmul_rn(x, angles.sin[e])));
    }
    store_vec(out + lane * VEC, turned.a);
    store_vec(out + half + lane * VEC, turned.b);
  }
  for (int v = 2 * pairs + lane; v < VECTORS; v += LANES) {
    Vec passed = load_vec(in + v * VEC);
    if (norm != nullptr) {
#pragma unroll
      for (int e = 0; e < VEC; ++e) passed.e[e] = from_float<T>(normed(passed.e[e], norm[v * VEC + e]));
    }
    store_vec(out + v * VEC, passed);
  }
}
