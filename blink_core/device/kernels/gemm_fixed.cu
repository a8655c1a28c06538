// Products of any number of rows with the very bits of gemm_skinny.cu: batch-invariant mode (design section 7).
//
// There the warps of a block share k, 32 values in turn, and their sums are added in order; here one accumulator takes
// the chunks of the first warp, then those of the second and so on, and is added to the total after each. The weight is
// the 16-row operand as there, and a chunk's k is permuted alike: so a row has the same bits alone, by that kernel, and
// among any others, by this one. SPLIT is the number of warps there, 8, or 4 for a mixture's experts.
//
// Both operands go through a ring in shared memory, whose rows of 64 bytes are read without bank conflicts as 16 bytes
// a thread. The grid is fixed; blocks take tiles in turn, those with the same weight rows together.
#include "matmul.cuh"

#if DTYPE == 0
#error "float32 has gemm_tile.cu, whose sums depend on k alone"
#endif

constexpr int WARPS = 4, THREADS = WARPS * 32;
constexpr int CHUNK = 32;          // values of k
constexpr int ROW = CHUNK * 2;     // bytes of a row of a chunk

struct Tile {
  int first_row, rows, column;  // of the sorted rows, and the first output
  i64 weight_row;
};

// Place `work` of the list: rows vary fastest, so that neighbours share the weight. False beyond its end.
template <int N, bool GROUPED>
DEVICE bool find(const MatmulParams& p, int work, int outputs, int weight_rows, Tile& tile) {
  const int column_tiles = (p.n + outputs - 1) / outputs;
  if constexpr (!GROUPED) {
    const int row_tiles = (p.rows + N - 1) / N;
    if (work >= row_tiles * column_tiles) return false;
    const int first = work % row_tiles * N;
    tile = {first, min(N, p.rows - first), work / row_tiles * outputs, 0};
    return true;
  } else {
    if (work >= *p.n_blocks * column_tiles) return false;
    const int4 block = p.blocks[work / column_tiles];
    tile = {block.y, block.z, work % column_tiles * outputs, i64(block.x) * weight_rows};
    return true;
  }
}

// M rows of the weight (with silu half of them gate, half up) against N rows of x.
template <int M, int N, int STAGES, int SPLIT, bool SILU, bool GROUPED>
DEVICE void product(const MatmulParams& p) {
  constexpr int OUTPUTS = SILU ? M / 2 : M;
  constexpr int MT = M / 32, NT = N / 16;  // 16-row and 8-row tiles of a warp, of which two share each side
  constexpr int COPIES = (M + N) / 32, STAGE = (M + N) * ROW, PITCH = M + 4;
  static_assert(N * PITCH * 4 <= STAGES * STAGE, "the sums reuse the ring");
  extern __shared__ __align__(16) u8 memory[];
  float* sums = reinterpret_cast<float*>(memory);  // [N][PITCH]
  const u32 shared = shared_address(memory);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t4 = lane & 3;
  const int warp_m = (warp & 1) * (M / 2), warp_n = (warp >> 1) * (N / 2);
  const int chunks = p.k / CHUNK;
  pdl_launch();
  bool waited = GROUPED;
  if (GROUPED) pdl_wait();
  Tile tile;
  for (int work = blockIdx.x; find<N, GROUPED>(p, work, OUTPUTS, SILU ? 2 * p.n : p.n, tile); work += gridDim.x) {
    // Thread t copies 16 bytes of rows t / 4 + 32 i of the weight and then of x, at column t % 4 * 8.
    const int column = threadIdx.x % 4 * 8;
    const T* from[COPIES];
    bool valid[COPIES];
#pragma unroll
    for (int i = 0; i < COPIES; ++i) {
      const int r = threadIdx.x / 4 + i * 32;
      if (i < M / 32) {
        const int output = tile.column + (SILU ? r % OUTPUTS : r);
        valid[i] = output < p.n;
        from[i] = p.weight + (tile.weight_row + (valid[i] ? output : 0) + (SILU && r >= OUTPUTS ? p.n : 0)) * p.k;
      } else {
        valid[i] = r - M < tile.rows;
        i64 row = tile.first_row + (valid[i] ? r - M : 0);
        if (GROUPED && p.gather != nullptr) row = p.gather[row];
        from[i] = p.x + row * p.k;
      }
      from[i] += column;
    }
    // Copies of a chunk from the `begin`-th on, up to the `end`-th; the weight's come first.
    auto copy = [&](int chunk, int slot, int begin, int end) {
#pragma unroll
      for (int i = 0; i < COPIES; ++i) {
        const int r = threadIdx.x / 4 + i * 32;
        if (i < begin || i >= end) continue;
        copy16(shared + slot * STAGE + r * ROW + column * 2, from[i] + chunk * CHUNK, valid[i]);
      }
    };
    if (!waited) {  // weights do not depend on the kernel before
      int chunk = 0, first = 0;
#pragma unroll 1
      for (int s = 0; s < STAGES - 1 && chunk < chunks && first < SPLIT; ++s) {
        copy(chunk, s, 0, M / 32);
        chunk += SPLIT;
        if (chunk >= chunks) chunk = ++first;
      }
      pdl_wait();
    }
    int ahead = 0, ahead_first = 0, ahead_slot = 0;  // chunk to be fetched next, of the warp `ahead_first`
    auto fetch = [&](int begin) {
      if (ahead_first < SPLIT && ahead < chunks) {
        copy(ahead, ahead_slot, begin, COPIES);
        ahead_slot = ahead_slot + 1 == STAGES ? 0 : ahead_slot + 1;
        ahead += SPLIT;
        if (ahead >= chunks) ahead = ++ahead_first;
      }
      copy_commit();
    };
    float c[MT][NT][4] = {}, total[MT][NT][4] = {};
#pragma unroll 1
    for (int s = 0; s < STAGES - 1; ++s) fetch(waited ? 0 : M / 32);
    waited = true;
    int chunk = 0, first = 0, slot = 0;
    for (int step = 0; step < chunks; ++step) {
      copy_wait<STAGES - 2>();
      __syncthreads();
      fetch(0);
      const u8* weight = memory + slot * STAGE + (warp_m + g) * ROW + t4 * 16;
      const u8* x = memory + slot * STAGE + (M + warp_n + g) * ROW + t4 * 16;
      slot = slot + 1 == STAGES ? 0 : slot + 1;
      uint4 b[NT];
#pragma unroll
      for (int n = 0; n < NT; ++n) b[n] = *reinterpret_cast<const uint4*>(x + n * 8 * ROW);
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        const uint4 low = *reinterpret_cast<const uint4*>(weight + m * 16 * ROW);
        const uint4 high = *reinterpret_cast<const uint4*>(weight + (m * 16 + 8) * ROW);
        const u32 a0[4] = {low.x, high.x, low.y, high.y}, a1[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          mma(c[m][n], a0, b[n].x, b[n].y);
          mma(c[m][n], a1, b[n].z, b[n].w);
        }
      }
      chunk += SPLIT;
      if (chunk >= chunks) {
        chunk = ++first;
#pragma unroll
        for (int m = 0; m < MT; ++m) {
#pragma unroll
          for (int n = 0; n < NT; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              total[m][n][e] += c[m][n][e];
              c[m][n][e] = 0.f;
            }
          }
        }
      }
    }
    copy_wait<0>();
    __syncthreads();
#pragma unroll
    for (int m = 0; m < MT; ++m) {
#pragma unroll
      for (int n = 0; n < NT; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          sums[(warp_n + n * 8 + t4 * 2 + (e & 1)) * PITCH + warp_m + m * 16 + g + (e >> 1) * 8] = total[m][n][e];
        }
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < OUTPUTS * tile.rows; i += THREADS) {
      const int r = i % OUTPUTS, local = i / OUTPUTS, output = tile.column + r;
      if (output >= p.n) continue;
      float value = sums[local * PITCH + r];
      if (p.bias != nullptr) value += to_float(p.bias[output]);
      if (SILU) {
        float up = sums[local * PITCH + OUTPUTS + r];
        if (p.bias != nullptr) up += to_float(p.bias[p.n + output]);
        value = silu_mul(value, up);
      }
      i64 row = tile.first_row + local;
      if (GROUPED && p.scatter != nullptr) row = p.scatter[row];
      store(p, row, output, value);
    }
    __syncthreads();  // before the next tile's chunks overwrite the sums
  }
  if (!waited) pdl_wait();
}

// fixed_<rows of x>: dynamic shared memory (M + 64 or 32) * 64 * STAGES bytes, 48 KiB each.
#define KERNEL(NAME, BLOCKS, M, N, STAGES, SPLIT, SILU, GROUPED)                                              \
  extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) NAME(const __grid_constant__ MatmulParams p) { \
    product<M, N, STAGES, SPLIT, SILU, GROUPED>(p);                                                           \
  }
// Few rows are bound by reading the weight: narrow tiles, so that there is one for every multiprocessor.
KERNEL(fixed_32, 4, 32, 32, 12, 8, false, false)
KERNEL(fixed_64, 4, 32, 64, 8, 8, false, false)
KERNEL(fixed_many, 2, 128, 64, 4, 8, false, false)
KERNEL(fixed_silu_32, 4, 32, 32, 12, 8, true, false)
KERNEL(fixed_silu_64, 4, 32, 64, 8, 8, true, false)
KERNEL(fixed_silu_many, 2, 128, 64, 4, 8, true, false)
KERNEL(grouped_fixed, 2, 128, 64, 4, 4, false, true)
KERNEL(grouped_fixed_silu, 2, 128, 64, 4, 4, true, true)
