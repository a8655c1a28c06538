// Embedding, RMS norm with residual, SwiGLU: memory-bound, 16 bytes a thread (design section 7).
#include "common.cuh"

DEVICE Vec load_vec(const T* p) { return *reinterpret_cast<const Vec*>(p); }
DEVICE void store_vec(T* p, const Vec& v) { *reinterpret_cast<Vec*>(p) = v; }

// out[t] = table[ids[t]]; table [vocab, n]. One block a token.
extern "C" __global__ void embedding(const T* table, const int* ids, T* out, int n) {
  pdl_launch();
  pdl_wait();
  const i64 row = ids[blockIdx.x];
  for (int i = threadIdx.x * VEC; i < n; i += blockDim.x * VEC) {
    store_vec(out + i64(blockIdx.x) * n + i, load_vec(table + row * n + i));
  }
}

// x += delta (unless delta is null), out = x / sqrt(mean(x^2) + eps) * weight. One block a row of n elements; a thread
// keeps up to 4 vectors, so n is at most 4 * VEC * blockDim. The residual is rounded to T as it is stored. weight is
// [groups, n] (one a head, groups > 1) or [n]. chosen: rows of x and delta, for each row of out, where not all are
// wanted: a row may be chosen twice, so x stays as it is.
extern "C" __global__ void rms_norm(T* x, const T* delta, const T* weight, T* out, int n, int groups, float eps,
                                    const int* chosen) {
  __shared__ float scratch[32];
  pdl_launch();
  const T* w = weight + i64(blockIdx.x % groups) * n;
  pdl_wait();
  const i64 base = i64(chosen == nullptr ? int(blockIdx.x) : chosen[blockIdx.x]) * n, to = i64(blockIdx.x) * n;
  float values[4][VEC];
  float squares = 0.f;
  Vec loaded[4], added[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int i = (j * blockDim.x + threadIdx.x) * VEC;
    if (i >= n) break;
    loaded[j] = load_vec(x + base + i);
    if (delta != nullptr) added[j] = load_vec(delta + base + i);
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int i = (j * blockDim.x + threadIdx.x) * VEC;
    if (i >= n) break;
    Vec v = loaded[j];
    if (delta != nullptr) {
#pragma unroll
      for (int e = 0; e < VEC; ++e) v.e[e] = from_float<T>(to_float(v.e[e]) + to_float(added[j].e[e]));
      if (chosen == nullptr) store_vec(x + base + i, v);
    }
#pragma unroll
    for (int e = 0; e < VEC; ++e) {
      values[j][e] = to_float(v.e[e]);
      squares += values[j][e] * values[j][e];
    }
  }
  const float mean = block_sum(squares, scratch) / float(n);
  const float scale = 1.f / sqrtf(mean + eps);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int i = (j * blockDim.x + threadIdx.x) * VEC;
    if (i >= n) break;
    const Vec g = load_vec(w + i);
    Vec v;
#pragma unroll
    for (int e = 0; e < VEC; ++e) v.e[e] = from_float<T>(values[j][e] * scale * to_float(g.e[e]));
    store_vec(out + to + i, v);
  }
}

// out[t, i] = silu(gate_up[t, i]) * gate_up[t, inner + i]. `parts` blocks a row; two vectors of the output a thread,
// half a block apart.
extern "C" __global__ void silu_multiply(const T* gate_up, T* out, int inner, int parts) {
  pdl_launch();
  pdl_wait();
  const int row = blockIdx.x / parts, part = blockIdx.x - row * parts;
  const T* gate = gate_up + i64(row) * 2 * inner;
  out += i64(row) * inner;
  const int begin = (part * blockDim.x * 2 + threadIdx.x) * VEC;
  Vec g[2], u[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int i = begin + j * blockDim.x * VEC;
    if (i < inner) {
      g[j] = load_vec(gate + i);
      u[j] = load_vec(gate + inner + i);
    }
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int i = begin + j * blockDim.x * VEC;
    if (i >= inner) break;
    Vec v;
#pragma unroll
    for (int e = 0; e < VEC; ++e) v.e[e] = from_float<T>(silu_mul(to_float(g[j].e[e]), to_float(u[j].e[e])));
    store_vec(out + i, v);
  }
}
