// Products of any number of rows, also one for each expert of a mixture, in tiles (design section 7).
//
// 16-bit types: 64 rows of x against 128 rows of the weight, tensor cores, three stages of 32 values of k. float32: 64
// x 64 on the plain units, exact products. Sums run over k in order from 0 to the end, so that a row has the same bits
// in any batch. The grid is fixed; blocks take tiles in turn, those with the same weight rows together.
#include "matmul.cuh"

#if DTYPE == 0
constexpr int TILE_M = 64, TILE_N = 64, TILE_K = 16, THREADS = 256;
constexpr int SPAN = 32 * TILE_K;  // values of k whose sum is added to the total at once
#else
constexpr int TILE_M = 64, TILE_N = 128, TILE_K = 32, THREADS = 128, STAGES = 4;
constexpr int STRIDE = TILE_K + 8;
constexpr int STAGE = (TILE_M + TILE_N) * STRIDE;
// Dynamic shared memory: STAGES * STAGE * 2 bytes.
#endif

struct Tile {
  int first_row, rows, column;  // of the sorted rows, and the first output
  i64 weight_row;
};

// Place `work` of the list: rows vary fastest, so that neighbours share the weight. False beyond its end.
template <bool GROUPED>
DEVICE bool find(const MatmulParams& p, int work, int tile_outputs, int weight_rows, Tile& tile) {
  const int n_tiles = (p.n + tile_outputs - 1) / tile_outputs;
  if constexpr (!GROUPED) {
    const int m_tiles = (p.rows + TILE_M - 1) / TILE_M;
    if (work >= m_tiles * n_tiles) return false;
    const int m = work % m_tiles;
    tile = {m * TILE_M, min(TILE_M, p.rows - m * TILE_M), work / m_tiles * tile_outputs, 0};
    return true;
  } else {
    if (work >= *p.n_blocks * n_tiles) return false;
    const int4 block = p.blocks[work / n_tiles];
    tile = {block.y, block.z, work % n_tiles * tile_outputs, i64(block.x) * weight_rows};
    return true;
  }
}

template <bool GROUPED>
DEVICE i64 x_row(const MatmulParams& p, int sorted) {
  return GROUPED && p.gather != nullptr ? p.gather[sorted] : sorted;
}
template <bool GROUPED>
DEVICE i64 out_row(const MatmulParams& p, int sorted) {
  return GROUPED && p.scatter != nullptr ? p.scatter[sorted] : sorted;
}

#if DTYPE == 0
template <bool SILU, bool GROUPED>
DEVICE void product(const MatmulParams& p) {
  __shared__ float a[TILE_K][TILE_M + 4], b[TILE_K][TILE_N + 4];
  pdl_launch();
  pdl_wait();
  Tile tile;
  for (int work = blockIdx.x; find<GROUPED>(p, work, TILE_N, p.n, tile); work += gridDim.x) {
    float c[4][4] = {}, total[4][4] = {};
    const int row = threadIdx.x / 4, at = threadIdx.x % 4 * 4;  // what this thread loads
    const int tm = threadIdx.x / 16 * 4, tn = threadIdx.x % 16 * 4;
    const bool x_valid = row < tile.rows, w_valid = tile.column + row < p.n;
    const float* x = p.x + (x_valid ? x_row<GROUPED>(p, tile.first_row + row) * p.k : 0);
    const float* w = p.weight + (w_valid ? (tile.weight_row + tile.column + row) * p.k : 0);
    for (int k = 0; k < p.k; k += TILE_K) {
      __syncthreads();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool inside = k + at + i < p.k;
        a[at + i][row] = x_valid && inside ? x[k + at + i] : 0.f;
        b[at + i][row] = w_valid && inside ? w[k + at + i] : 0.f;
      }
      __syncthreads();
      // Sums of TILE_K products first, then of SPAN: one long sum would lose three times as much to rounding at a k of
      // 576, and thirteen times at 14,336.
      float part[4][4] = {};
#pragma unroll
      for (int i = 0; i < TILE_K; ++i) {
#pragma unroll
        for (int m = 0; m < 4; ++m) {
#pragma unroll
          for (int n = 0; n < 4; ++n) part[m][n] += a[i][tm + m] * b[i][tn + n];
        }
      }
#pragma unroll
      for (int m = 0; m < 4; ++m) {
#pragma unroll
        for (int n = 0; n < 4; ++n) c[m][n] += part[m][n];
      }
      if ((k + TILE_K) % SPAN == 0 || k + TILE_K >= p.k) {
#pragma unroll
        for (int m = 0; m < 4; ++m) {
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            total[m][n] += c[m][n];
            c[m][n] = 0.f;
          }
        }
      }
    }
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      if (tm + m >= tile.rows) continue;
      const i64 to = out_row<GROUPED>(p, tile.first_row + tm + m);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int column = tile.column + tn + n;
        if (column < p.n) store(p, to, column, total[m][n] + (p.bias != nullptr ? p.bias[column] : 0.f));
      }
    }
  }
}
#else
template <bool SILU, bool GROUPED>
DEVICE void product(const MatmulParams& p) {
  extern __shared__ __align__(16) u8 memory[];
  const u32 shared = shared_address(memory);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t4 = lane & 3;
  const int warp_m = warp & 1, warp_n = warp >> 1;
  constexpr int OUTPUTS = SILU ? TILE_N / 2 : TILE_N;
  pdl_launch();
  pdl_wait();
  Tile tile;
  for (int work = blockIdx.x; find<GROUPED>(p, work, OUTPUTS, SILU ? 2 * p.n : p.n, tile); work += gridDim.x) {
    // Thread t copies 16 bytes of rows t / 4 + 32 i of x and of the weight, at column t % 4 * 8.
    const int column = threadIdx.x % 4 * 8;
    const T* from[6];
    bool valid[6];
#pragma unroll
    for (int i = 0; i < 6; ++i) {
      const int r = threadIdx.x / 4 + i * 32;
      if (i < 2) {
        valid[i] = r < tile.rows;
        from[i] = p.x + (valid[i] ? x_row<GROUPED>(p, tile.first_row + r) : 0) * p.k + column;
      } else {
        // With silu each warp's 64 weight rows are 32 gate rows and the 32 up rows of the same outputs.
        const int local = r - TILE_M;
        const int output = tile.column + (SILU ? (local >> 6) * 32 + (local & 31) : local);
        valid[i] = output < p.n;
        const i64 row = tile.weight_row + (valid[i] ? output : 0) + (SILU && (local & 32) != 0 ? p.n : 0);
        from[i] = p.weight + row * p.k + column;
      }
    }
    const int steps = p.k / TILE_K;
    auto fetch = [&](int step) {
      if (step < steps) {
#pragma unroll
        for (int i = 0; i < 6; ++i) {
          const int r = threadIdx.x / 4 + i * 32;
          copy16(shared + (step % STAGES * STAGE + r * STRIDE + column) * 2, from[i] + step * TILE_K, valid[i]);
        }
      }
      copy_commit();
    };
    float c[2][8][4] = {};
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) fetch(s);
    for (int step = 0; step < steps; ++step) {
      copy_wait<STAGES - 2>();
      __syncthreads();
      fetch(step + STAGES - 1);
      const u32 x = shared + step % STAGES * STAGE * 2, w = x + TILE_M * STRIDE * 2;
#pragma unroll
      for (int k = 0; k < TILE_K; k += 16) {
        u32 a[2][4];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          load_matrix(a[m], x + ((warp_m * 32 + m * 16 + (lane & 15)) * STRIDE + k + (lane >> 4) * 8) * 2);
        }
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
          u32 b[4];
          const int row = warp_n * 64 + n * 8 + (lane & 7) + (lane >> 4) * 8;
          load_matrix(b, w + (row * STRIDE + k + (lane >> 3 & 1) * 8) * 2);
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            mma(c[m][n], a[m], b[0], b[1]);
            mma(c[m][n + 1], a[m], b[2], b[3]);
          }
        }
      }
    }
    copy_wait<0>();
    __syncthreads();
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int local = warp_m * 32 + m * 16 + h * 8 + g;
        if (local >= tile.rows) continue;
        const i64 to = out_row<GROUPED>(p, tile.first_row + local);
#pragma unroll
        for (int n = 0; n < (SILU ? 4 : 8); ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int output = tile.column + (SILU ? warp_n * 32 : warp_n * 64) + n * 8 + t4 * 2 + e;
            if (output >= p.n) continue;
            float value = c[m][n][2 * h + e];
            if (p.bias != nullptr) value += to_float(p.bias[output]);
            if (SILU) {
              float up = c[m][n + 4 & 7][2 * h + e];
              if (p.bias != nullptr) up += to_float(p.bias[p.n + output]);
              value = silu_mul(value, up);
            }
            store(p, to, output, value);
          }
        }
      }
    }
  }
}
#endif

#define KERNEL(NAME, SILU, GROUPED)                                                                  \
  extern "C" __global__ void __launch_bounds__(THREADS, 2) NAME(const __grid_constant__ MatmulParams p) { \
    product<SILU, GROUPED>(p);                                                                       \
  }
KERNEL(tile, false, false)
KERNEL(grouped_tile, false, true)
#if DTYPE != 0
KERNEL(grouped_tile_silu, true, true)
#endif
