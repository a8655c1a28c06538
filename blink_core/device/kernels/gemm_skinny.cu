// Products of few rows with a large weight, bound by reading the weight once (design section 7).
//
// The weight [n, k] is the 16-row operand of the tensor cores and the activations its 8 columns, so 1 to 8 * NT rows
// read the weight at the same cost. But every tile reads all activations anew, from the L2: 32 rows as many bytes as two
// 16-row tiles of weights. Three tiles at once (MT) make 6144 outputs one round of 128 blocks, two 4096. A block's warps share a tile of 16 * MT weight rows, taking 32 values of k in turn, and add their sums
// in order. The order of k within a product step is permuted alike for both operands, so that a thread's operand is 16
// contiguous bytes. A row's result depends on neither the number of rows nor its place.
//
// One block a multiprocessor streams its tiles through a ring in shared memory, of which each thread uses only what it
// copied itself: no barriers, and 128 to 160 KiB in flight. Weights do not depend on the kernel before: the ring is
// filled before pdl_wait(), while that kernel still runs. The ring takes more than half of shared memory on purpose: a
// product's block then starts exactly where one of the product before has ended. With room for two, blocks pack two on
// the first free multiprocessor and leave another empty: a Llama-3-8B layer at batch 1 then took 162 us instead of 128
// (H200).
#include "matmul.cuh"

// KiB of a warp: compile-time variants (ops/cuda_variants.py), but the last.
#ifndef RING
#define RING 20
#endif
#ifndef NORM_RING
#define NORM_RING 16
#endif
constexpr int GROUPED_RING = 12;
constexpr int PAD = 32;  // elements between rows of x in shared memory, against bank conflicts

struct SkinnyParams {
  MatmulParams m;
  const T* norm;  // [k]: x is divided by its root mean square and multiplied by this first; null: x is used as it is
  float eps;
  T* normed;  // [rows, k]: what norm made of x, or null
};

DEVICE Vec scaled(Vec v, float scale, const Vec& weight) {
#pragma unroll
  for (int e = 0; e < VEC; ++e) v.e[e] = from_float<T>(to_float(v.e[e]) * scale * to_float(weight.e[e]));
  return v;
}
DEVICE float squares(const Vec& v) {
  float sum = 0.f;
#pragma unroll
  for (int e = 0; e < VEC; ++e) sum += to_float(v.e[e]) * to_float(v.e[e]);
  return sum;
}

// Norms the rows of x into shared memory, PAD elements apart: a single row by all warps, several by a warp each.
template <int WARPS>
DEVICE void norm_rows(const SkinnyParams& p, T* to, float* scratch) {
  constexpr int THREADS = WARPS * 32;
  const int k = p.m.k;
  const bool single = p.m.rows == 1;
  const int lane = single ? threadIdx.x : threadIdx.x & 31, lanes = single ? THREADS : 32;
  for (int row = single ? 0 : threadIdx.x >> 5; row < p.m.rows; row += WARPS) {
    T* mine = to + row * (k + PAD);
    float sum = 0.f;
#pragma unroll 4
    for (int i = lane * VEC; i < k; i += lanes * VEC) {
      const Vec v = *reinterpret_cast<const Vec*>(p.m.x + i64(row) * k + i);
      *reinterpret_cast<Vec*>(mine + i) = v;
      sum += squares(v);
    }
    sum = single ? block_sum(sum, scratch) : warp_sum(sum);
    const float scale = 1.f / sqrtf(sum / float(k) + p.eps);
#pragma unroll 4
    for (int i = lane * VEC; i < k; i += lanes * VEC) {
      const Vec v = scaled(*reinterpret_cast<const Vec*>(mine + i), scale, *reinterpret_cast<const Vec*>(p.norm + i));
      *reinterpret_cast<Vec*>(mine + i) = v;
      if (p.normed != nullptr && blockIdx.x == 0) *reinterpret_cast<Vec*>(p.normed + i64(row) * k + i) = v;
    }
  }
  __syncthreads();
}

template <int WARPS, int MT, int NT, bool SILU, bool GROUPED, bool NORM>
DEVICE void product(const SkinnyParams& params) {
  constexpr int THREADS = WARPS * 32;
  constexpr int ROWS = MT * 16, COLUMNS = NT * 8, PITCH = ROWS + 4;
  constexpr int TILE_N = SILU ? ROWS / 2 : ROWS;  // outputs of a tile
  constexpr int RING_KIB = NORM ? NORM_RING : GROUPED ? GROUPED_RING : RING;
  constexpr int STAGES = RING_KIB / MT;           // chunks of 16 * MT rows x 32 values: MT KiB
  constexpr int GROUP = NT == 4 ? 4 : 8 / NT;     // chunks of x loaded at once
  // Sums of more than 16 rows are behind the ring: there are more than static shared memory holds.
  constexpr bool BEHIND = NT > 2;
  typedef float Sums[COLUMNS][PITCH];
  extern __shared__ __align__(16) u8 memory[];
  __shared__ float near[BEHIND ? 1 : WARPS * COLUMNS * PITCH];
  Sums* sums = reinterpret_cast<Sums*>(BEHIND ? reinterpret_cast<float*>(memory + WARPS * RING_KIB * 1024) : near);
  const MatmulParams& p = params.m;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t4 = lane & 3;
  const int chunks = p.k / 32;
  const int mine = (chunks - warp + WARPS - 1) / WARPS;  // chunks of a tile that this warp takes
  const int n_tiles = (p.n + TILE_N - 1) / TILE_N;
  const u32 ring = shared_address(memory) + warp * RING_KIB * 1024 + lane * 16;
  T* normed = reinterpret_cast<T*>(memory + WARPS * RING_KIB * 1024);
  const u64 policy = streaming_policy();
  pdl_launch();
  if (GROUPED) pdl_wait();
  const int works = GROUPED ? *p.n_blocks * n_tiles : n_tiles;

  // What is fetched next: chunk `ahead` of the tile `ahead_work`, whose first weight row this thread reads is `from`.
  int ahead_work = blockIdx.x, ahead = 0, slot = 0;
  const T* from = p.weight;
  int from_row = 0;
  auto open = [&]() {
    i64 expert = 0;
    int tile = ahead_work;
    if (GROUPED && ahead_work < works) {
      expert = p.blocks[ahead_work / n_tiles].x;
      tile = ahead_work % n_tiles;
    }
    from_row = tile * TILE_N;
    from = p.weight + (expert * (SILU ? 2 : 1) * p.n + from_row + g) * p.k + warp * 32 + t4 * 8;
  };
  auto fetch = [&]() {
    if (ahead_work < works && mine > 0) {
#pragma unroll
      for (int m = 0; m < MT; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          // With silu the upper half of the tile's rows are the up projections of the same outputs.
          const bool up = SILU && m >= MT / 2;
          const int local = (SILU ? m % (MT / 2) : m) * 16 + h * 8;
          const bool valid = from_row + local + g < p.n;
          const i64 row = local + (up ? p.n : 0);
          const T* weight = valid ? from + row * p.k + ahead * (WARPS * 32) : p.weight;
          stream16(ring + (slot * MT * 2 + m * 2 + h) * 512, weight, valid, policy);
        }
      }
      slot = slot + 1 == STAGES ? 0 : slot + 1;
      if (++ahead == mine) {
        ahead = 0;
        ahead_work += gridDim.x;
        open();
      }
    }
    copy_commit();
  };
  open();
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) fetch();
  if (!GROUPED) pdl_wait();
  if (NORM) norm_rows<WARPS>(params, normed, &sums[0][0][0]);

  // The tile at hand, and where its rows of x begin.
  int tile = 0, first_row = 0, n_rows = p.rows;
  const T* rows[NT] = {};
  bool valid[NT] = {};
  uint4 b[GROUP][NT];  // the next GROUP chunks of x
  auto activation = [&](int i, int n) {
    return valid[n] && i < mine ? *reinterpret_cast<const uint4*>(rows[n] + i * (WARPS * 32)) : make_uint4(0, 0, 0, 0);
  };
  auto begin = [&](int work) {
    tile = work;
    if (GROUPED) {
      const int4 block = p.blocks[work / n_tiles];
      tile = work % n_tiles;
      first_row = block.y;
      n_rows = block.z;
    }
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const int column = n * 8 + g;
      valid[n] = column < n_rows;
      int row = first_row + (valid[n] ? column : 0);
      if (GROUPED && p.gather != nullptr) row = p.gather[row];
      rows[n] = (NORM ? normed + row * (p.k + PAD) : p.x + i64(row) * p.k) + warp * 32 + t4 * 8;
#pragma unroll
      for (int j = 0; j < GROUP; ++j) b[j][n] = activation(j, n);
    }
  };
  int used = 0;
  if (int(blockIdx.x) < works) begin(blockIdx.x);
  for (int work = blockIdx.x; work < works; work += gridDim.x) {
    float c[MT][NT][4] = {};
    for (int base = 0; base < mine; base += GROUP) {
#pragma unroll
      for (int j = 0; j < GROUP; ++j) {
        if (base + j >= mine) break;
        copy_wait<STAGES - 2>();
        uint4 a[MT][2];
#pragma unroll
        for (int m = 0; m < MT; ++m) {
          a[m][0] = load_shared16(ring + (used * MT * 2 + m * 2) * 512);
          a[m][1] = load_shared16(ring + (used * MT * 2 + m * 2 + 1) * 512);
        }
        used = used + 1 == STAGES ? 0 : used + 1;
        fetch();
#pragma unroll
        for (int m = 0; m < MT; ++m) {
          const u32 a0[4] = {a[m][0].x, a[m][1].x, a[m][0].y, a[m][1].y};
          const u32 a1[4] = {a[m][0].z, a[m][1].z, a[m][0].w, a[m][1].w};
#pragma unroll
          for (int n = 0; n < NT; ++n) {
            mma(c[m][n], a0, b[j][n].x, b[j][n].y);
            mma(c[m][n], a1, b[j][n].z, b[j][n].w);
          }
        }
#pragma unroll
        for (int n = 0; n < NT; ++n) b[j][n] = activation(base + GROUP + j, n);
      }
    }
    const int this_tile = tile, this_first = first_row, this_rows = n_rows;
    if (work + int(gridDim.x) < works) begin(work + gridDim.x);
    __syncthreads();  // the last tile's sums have been read
#pragma unroll
    for (int m = 0; m < MT; ++m) {
#pragma unroll
      for (int n = 0; n < NT; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[warp][n * 8 + t4 * 2 + (e & 1)][m * 16 + g + (e >> 1) * 8] = c[m][n][e];
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < TILE_N * COLUMNS; i += THREADS) {
      const int r = i % TILE_N, column = i / TILE_N, output = this_tile * TILE_N + r;
      if (column < this_rows && output < p.n) {
        float value = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) value += sums[w][column][r];
        if (p.bias != nullptr) value += to_float(p.bias[output]);
        if (SILU) {
          float up = 0.f;
#pragma unroll
          for (int w = 0; w < WARPS; ++w) up += sums[w][column][TILE_N + r];
          if (p.bias != nullptr) up += to_float(p.bias[p.n + output]);
          value = silu_mul(value, up);
        }
        i64 row = this_first + column;
        if (GROUPED && p.scatter != nullptr) row = p.scatter[row];
        store(p, row, output, value);
      }
    }
  }
  copy_wait<0>();
}

#define KERNEL(NAME, WARPS, BLOCKS, MT, NT, SILU, GROUPED, NORM)                                                    \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS) NAME(const __grid_constant__ SkinnyParams p) {   \
    product<WARPS, MT, NT, SILU, GROUPED, NORM>(p);                                                                \
  }
// skinny_<rows>_<16-row tiles>
KERNEL(skinny_8_1, 8, 1, 1, 1, false, false, false)
KERNEL(skinny_8_2, 8, 1, 2, 1, false, false, false)
KERNEL(skinny_16_1, 8, 1, 1, 2, false, false, false)
KERNEL(skinny_16_2, 8, 1, 2, 2, false, false, false)
KERNEL(skinny_32_1, 8, 1, 1, 4, false, false, false)
KERNEL(skinny_32_2, 8, 1, 2, 4, false, false, false)
KERNEL(skinny_32_3, 8, 1, 3, 4, false, false, false)
KERNEL(skinny_silu_8_2, 8, 1, 2, 1, true, false, false)
KERNEL(skinny_silu_16_2, 8, 1, 2, 2, true, false, false)
KERNEL(skinny_norm_8_1, 8, 1, 1, 1, false, false, true)
KERNEL(skinny_norm_8_2, 8, 1, 2, 1, false, false, true)
KERNEL(skinny_norm_silu_8_2, 8, 1, 2, 1, true, false, true)
// Which experts are read is known late: nothing to fill a ring with beforehand, and several blocks a multiprocessor
// hide each other's first reads.
KERNEL(grouped_skinny_8, 4, 4, 2, 1, false, true, false)
KERNEL(grouped_skinny_silu_8, 4, 4, 2, 1, true, true, false)
