// Paged attention of rows with one new token (design section 7): split KV, work list from the device, tensor cores.
//
// A block takes items (row, range of keys) x key-value heads from the list until it is empty; the grid is fixed. Its
// four warps take 16 keys at a time each, through rings of their own in shared memory. The query heads of the group are
// the rows of a 16 x 16 product, so that any ratio of heads reads each key once (ratios above 16 in chunks of 16). The
// block that finishes a row's last split adds the splits in order: the result does not depend on which one that is.
//
// The list and the keys of earlier steps are older than the kernel before (see attention_plan.cu), so a block's first
// tiles are fetched while that one still runs: all but the tile of the new token, which it writes.
//
// Compile-time variants (ops/cuda_variants.py):
// STAGES: tiles of a warp in flight. With 2 a block fits beside one of the product before it.
// LEAVE: blocks without work end at once instead of waiting for the kernel before, so that the next product's blocks may
// have their place. Block 0 always waits: this kernel is over only when all before it are, as pdl_wait() promises.
// JOINED: it follows the QKV product and does what rope_kv.cu does as well: each block norms and rotates its queries,
// and those that take a row's last keys the new one, which goes with its value from shared memory into the products.
// That slot of the pages is not read; the block of the head's first chunk writes it. Positions and slots of the step
// are older than the work list too. The bits are those of the two kernels.
#include "rope.cuh"

#ifndef STAGES
#define STAGES 3
#endif
#ifndef LEAVE
#define LEAVE 0
#endif
#ifndef JOINED
#define JOINED 0
#endif

constexpr int WARPS = 4;
constexpr int KEYS = 16;                 // a warp's tile
constexpr int STRIDE = HEAD_DIM + 8;     // elements; an odd number of 16-byte units, so that ldmatrix has no conflicts
constexpr int TILE = KEYS * STRIDE;
constexpr int CHUNKS = HEAD_DIM / 8;     // 16-byte units of a row
constexpr int SHARED = WARPS * STAGES * 2 * TILE * 2;
static_assert(SHARED >= WARPS * 16 * (HEAD_DIM + 2) * 4, "the merge of the warps reuses the rings");

struct DecodeParams {
  const T* q;  // rows of `q_stride` elements, [heads, HEAD_DIM] each; joined [heads + 2 * kv_heads, HEAD_DIM]
  i64 q_stride;
  const T* k_pages;  // [pages, PAGE_SIZE, kv_heads, HEAD_DIM]
  const T* v_pages;
  T* out;  // [tokens, heads * HEAD_DIM]
  const int* counts;
  const int4* items;  // two each, see attention_plan.cu
  const u32* block_tables;
  float* partial;         // [items, heads, HEAD_DIM]
  float2* partial_sums;   // [items, heads] {maximum, sum}
  int* arrived;           // [rows, kv_heads * head chunks], zero between launches
  i64 table_stride;
  int heads, kv_heads, max_items;
  float scale;  // of the scores, times log2(e)
#if JOINED
  RopeParams rope;
#endif
};

struct alignas(4 * sizeof(T)) Quad {
  T e[4];
};
DEVICE void store_quad(T* to, const float4& v, float total) {
  Quad quad;
  quad.e[0] = from_float<T>(v.x / total);
  quad.e[1] = from_float<T>(v.y / total);
  quad.e[2] = from_float<T>(v.z / total);
  quad.e[3] = from_float<T>(v.w / total);
  *reinterpret_cast<Quad*>(to) = quad;
}
// sum * old + more * weight. Contracted here and below, not by the compiler: joined or not, the bits are the same.
DEVICE float4 add_scaled(const float4& sum, float old, const float4& more, float weight) {
  return make_float4(__fmaf_rn(more.x, weight, sum.x * old), __fmaf_rn(more.y, weight, sum.y * old),
                     __fmaf_rn(more.z, weight, sum.z * old), __fmaf_rn(more.w, weight, sum.w * old));
}

// Copies one tile of keys and values: tokens [token, token + 16), zeros where not in [low, end).
DEVICE void issue(const DecodeParams& p, const u32* table, int kv_head, int token, int low, int end, u32 page,
                  u32 shared, u64 policy) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int j = 0; j < (KEYS * CHUNKS + 31) / 32; ++j) {
    const int c = lane + j * 32;
    const int row = c / CHUNKS, column = c % CHUNKS * 8;
    const int t = token + row;
    const bool valid = t >= low && t < end;
#if PAGE_SIZE % 16 != 0
    page = valid ? table[t / PAGE_SIZE] : 0;
#endif
    const u64 at = ((u64(page) * PAGE_SIZE + t % PAGE_SIZE) * p.kv_heads + kv_head) * HEAD_DIM + column;
    const u32 to = shared + (row * STRIDE + column) * 2;
    stream16(to, p.k_pages + (valid ? at : 0), valid, policy);
    stream16(to + TILE * 2, p.v_pages + (valid ? at : 0), valid, policy);
  }
}

#if JOINED
#define KERNEL attention_rope
#else
#define KERNEL attention_decode
#endif

extern "C" __global__ void __launch_bounds__(WARPS * 32) KERNEL(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(16) u8 memory[];
  pdl_launch();  // with few rows most blocks have no work: the next product fills its rings in their place
#if JOINED
  constexpr int AT_ONCE = WARPS * 32 / LANES;  // heads that a block turns at once
  __shared__ __align__(16) T turned[18 * STRIDE];  // 16 queries, the new key and its value
#endif
  __shared__ int last_arrived;
  bool waited = false;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t4 = lane & 3;
  const u64 policy = streaming_policy();
  const int group = p.heads / p.kv_heads;
  const int head_chunks = (group + 15) / 16;
  const int per_item = p.kv_heads * head_chunks;
  const u32 ring = shared_address(memory) + warp * STAGES * 2 * TILE * 2;
  // The first item is read without waiting for the count; the list has room for it.
  int work = blockIdx.x;
  const int4* early = p.items + 2 * min(work / per_item, p.max_items - 1);
  int4 item = early[0], more = early[1];
  const int works = p.counts[0] * per_item;

  while (work < works) {
    const int index = work / per_item, place = work - index * per_item;
    const int kv_head = place / head_chunks, chunk = place - kv_head * head_chunks;
    const int row = item.x, first = item.y, end = item.z, split = item.w & 0xffff, splits = item.w >> 16;
    const int head0 = kv_head * group + chunk * 16, n_heads = min(16, group - chunk * 16);
    const i64 token = more.x;
    const u32* table = p.block_tables + i64(more.y) * p.table_stride;
    const int low = max(first, more.z);
#if JOINED
    // The new token, if its key is of this split; all other keys come from the pages.
    const int fresh = split + 1 == splits ? end - 1 : -1;
    const int stored = fresh < 0 ? end : fresh;
#else
    const int stored = end;
#endif

    float o[HEAD_DIM / 8][4];
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; ++n) o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.f;
    float peak[2] = {-INFINITY_F, -INFINITY_F}, sum[2] = {0.f, 0.f};

    const int tiles = (end - first + KEYS - 1) / KEYS;
    const int mine = tiles > warp ? (tiles - warp + WARPS - 1) / WARPS : 0;
    u32 ids = 0;  // pages of this warp's next 32 tiles, one a lane
    auto fetch = [&](int i) {
      if (i < mine) {
        const int at = first + (i * WARPS + warp) * KEYS;
#if PAGE_SIZE % 16 == 0
        if (i % 32 == 0) {
          const int ahead = at + lane * WARPS * KEYS;
          ids = ahead < end ? table[ahead / PAGE_SIZE] : 0;
        }
#endif
        const u32 page = __shfl_sync(0xffffffffu, ids, i % 32);
        issue(p, table, kv_head, at, low, stored, page, ring + i % STAGES * 2 * TILE * 2, policy);
      }
      copy_commit();
    };
    const auto old = [&](int i) {
      return waited || JOINED || split + 1 < splits || first + (i * WARPS + warp + 1) * KEYS < end;
    };
    u32 q[HEAD_DIM / 16][4];
    int fetched = 0;
#if JOINED
    // Heads that this block turns, of the row's: queries, and the new key and its value.
    const int turns = n_heads + (fresh < 0 ? 0 : 2), share = threadIdx.x % LANES;
    const auto head_of = [&](int i) {
      return i < n_heads ? head0 + i : p.heads + (i - n_heads) * p.kv_heads + kv_head;
    };
    const i64 row_of_angles = angles_of(p.rope, token);
    // Threads that write the new key and value, a vector each: 0 and up the key's, VECTORS and up the value's.
    const int side = threadIdx.x / VECTORS, vector = threadIdx.x % VECTORS * VEC;
    T* slot = nullptr;
    if (fresh >= 0 && chunk == 0 && side < 2) slot = slot_of(p.rope, token, head_of(n_heads + side)) + vector;
    while (fetched < STAGES && old(fetched)) fetch(fetched++);
    Angles angles = {};
    if (share < p.rope.half / VEC) angles = load_angles(p.rope, row_of_angles, share);
    Pair weights = load_weights(p.rope, head_of(min(int(threadIdx.x / LANES), turns - 1)), share);
    if (!waited) pdl_wait();
    for (int base = 0; base < turns; base += AT_ONCE) {
      const int turn = base + threadIdx.x / LANES, i = min(turn, turns - 1), head = head_of(i);
      if (base > 0) weights = load_weights(p.rope, head, share);
      const T* in = p.q + token * p.q_stride + i64(head) * HEAD_DIM;
      T* out = turned + (i < n_heads ? i : 16 + i - n_heads) * STRIDE;
      turn_head(p.rope, head, in, out, weights, angles, share, turn < turns);
    }
    __syncthreads();
    if (slot != nullptr) store_vec(slot, load_vec(turned + (16 + side) * STRIDE + vector));
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; ++k) {
      load_matrix(q[k], shared_address(turned + (lane & 15) * STRIDE + k * 16 + (lane >> 4) * 8));
      if (g >= n_heads) q[k][0] = q[k][2] = 0;
      if (g + 8 >= n_heads) q[k][1] = q[k][3] = 0;
    }
#else
    while (fetched < STAGES && old(fetched)) fetch(fetched++);
    if (!waited) pdl_wait();
    while (fetched < STAGES) fetch(fetched++);
    const T* q_row = p.q + token * p.q_stride + i64(head0) * HEAD_DIM;
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; ++k) {
      const T* at = q_row + g * HEAD_DIM + k * 16 + t4 * 2;
      q[k][0] = g < n_heads ? *reinterpret_cast<const u32*>(at) : 0;
      q[k][1] = g + 8 < n_heads ? *reinterpret_cast<const u32*>(at + 8 * HEAD_DIM) : 0;
      q[k][2] = g < n_heads ? *reinterpret_cast<const u32*>(at + 8) : 0;
      q[k][3] = g + 8 < n_heads ? *reinterpret_cast<const u32*>(at + 8 * HEAD_DIM + 8) : 0;
    }
#endif
    waited = true;

    for (int i = 0; i < mine; ++i) {
      copy_wait<STAGES - 1>();
      __syncwarp();
      const u32 keys = ring + i % STAGES * 2 * TILE * 2, values = keys + TILE * 2;
      const int at = first + (i * WARPS + warp) * KEYS;
      // Where this lane's rows of ldmatrix are: the ring, but the new token's.
      const int key_row = (lane & 7) + (lane >> 4) * 8, value_row = lane & 15;
      u32 key_at = keys + key_row * STRIDE * 2, value_at = values + value_row * STRIDE * 2;
#if JOINED
      if (at + key_row == fresh) key_at = shared_address(turned) + 16 * STRIDE * 2;
      if (at + value_row == fresh) value_at = shared_address(turned) + 17 * STRIDE * 2;
#endif
      float s[2][4] = {}, odd[2][4] = {};  // two chains of sums: half the latency
#pragma unroll
      for (int k = 0; k < HEAD_DIM / 16; ++k) {
        u32 b[4];
        load_matrix(b, key_at + (k * 16 + (lane >> 3 & 1) * 8) * 2);
        mma(k % 2 ? odd[0] : s[0], q[k], b[0], b[1]);
        mma(k % 2 ? odd[1] : s[1], q[k], b[2], b[3]);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[0][e] += odd[0][e];
        s[1][e] += odd[1][e];
      }
      if (at < low || at + KEYS > end) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int key = at + n * 8 + t4 * 2 + (e & 1);
            if (key < low || key >= end) s[n][e] = -INFINITY_F;
          }
        }
      }
      float rescale[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float m = fmaxf(fmaxf(s[0][2 * h], s[0][2 * h + 1]), fmaxf(s[1][2 * h], s[1][2 * h + 1]));
        m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
        m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
        m = fmaxf(peak[h], m * p.scale);
        const float base = m == -INFINITY_F ? 0.f : m;
        rescale[h] = exp2_fast(peak[h] - base);
        peak[h] = m;
        float part = 0.f;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = s[n][2 * h + e];
            x = exp2_fast(__fmaf_rn(x, p.scale, -base));
            part += x;
          }
        }
        sum[h] = __fmaf_rn(sum[h], rescale[h], part);
      }
      const u32 weights[4] = {pack2(s[0][0], s[0][1]), pack2(s[0][2], s[0][3]), pack2(s[1][0], s[1][1]),
                              pack2(s[1][2], s[1][3])};
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 8; n += 2) {
        u32 b[4];
        load_matrix_transposed(b, value_at + (n * 8 + (lane >> 4) * 8) * 2);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          o[n + m][0] *= rescale[0];
          o[n + m][1] *= rescale[0];
          o[n + m][2] *= rescale[1];
          o[n + m][3] *= rescale[1];
          mma(o[n + m], weights, b[2 * m], b[2 * m + 1]);
        }
      }
      __syncwarp();
      fetch(i + STAGES);
    }
    copy_wait<0>();
    __syncthreads();

    // Merge the warps in order.
    float* merged = reinterpret_cast<float*>(memory);           // [WARPS, 16, HEAD_DIM]
    float2* sums = reinterpret_cast<float2*>(merged + WARPS * 16 * HEAD_DIM);  // [WARPS, 16]
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int head = g + h * 8;
      sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 1);
      sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 2);
      if (head < n_heads) {
        if (t4 == 0) sums[warp * 16 + head] = make_float2(peak[h], sum[h]);
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 8; ++n) {
          *reinterpret_cast<float2*>(merged + (warp * 16 + head) * HEAD_DIM + n * 8 + t4 * 2) =
              make_float2(o[n][2 * h], o[n][2 * h + 1]);
        }
      }
    }
    __syncthreads();
    T* out = p.out + (token * p.heads + head0) * HEAD_DIM;
    for (int i = threadIdx.x * 4; i < n_heads * HEAD_DIM; i += WARPS * 32 * 4) {
      const int head = i / HEAD_DIM;
      float top = -INFINITY_F, total = 0.f;
      float4 value = {};
#pragma unroll
      for (int w = 0; w < WARPS; ++w) top = fmaxf(top, sums[w * 16 + head].x);
      const float base = top == -INFINITY_F ? 0.f : top;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        const float weight = exp2_fast(sums[w * 16 + head].x - base);
        total = __fmaf_rn(sums[w * 16 + head].y, weight, total);
        value = add_scaled(value, 1.f, *reinterpret_cast<const float4*>(merged + w * 16 * HEAD_DIM + i), weight);
      }
      if (splits == 1) {
        store_quad(out + i, value, total);
      } else {
        const i64 at = i64(index) * p.heads + head0;
        __stcg(reinterpret_cast<float4*>(p.partial + at * HEAD_DIM + i), value);
        if (i % HEAD_DIM == 0) __stcg(p.partial_sums + at + head, make_float2(top, total));
      }
    }
    if (splits > 1) {
      __threadfence();
      __syncthreads();
      if (threadIdx.x == 0) {
        int* arrived = p.arrived + i64(row) * per_item + place;
        const int before = atomicAdd(arrived, 1);
        last_arrived = before == splits - 1;
        if (last_arrived) *arrived = 0;
      }
      __syncthreads();
      if (last_arrived) {
        __threadfence();
        const i64 at = i64(index - split) * p.heads + head0;
        for (int i = threadIdx.x * 4; i < n_heads * HEAD_DIM; i += WARPS * 32 * 4) {
          const int head = i / HEAD_DIM;
          float top = -INFINITY_F, total = 0.f;
          float4 value = {};
          for (int s = 0; s < splits; ++s) {
            const float2 part = __ldcg(p.partial_sums + at + i64(s) * p.heads + head);
            const float next = fmaxf(top, part.x);
            const float base = next == -INFINITY_F ? 0.f : next;
            const float old = exp2_fast(top - base), weight = exp2_fast(part.x - base);
            total = __fmaf_rn(part.y, weight, total * old);
            const float* from = p.partial + (at + i64(s) * p.heads) * HEAD_DIM + i;
            value = add_scaled(value, old, __ldcg(reinterpret_cast<const float4*>(from)), weight);
            top = next;
          }
          store_quad(out + i, value, total);
        }
      }
    }
    work += gridDim.x;
    if (work < works) {
      item = p.items[2 * (work / per_item)];
      more = p.items[2 * (work / per_item) + 1];
    }
    __syncthreads();
  }
  if (!waited && (!LEAVE || blockIdx.x == 0)) pdl_wait();
}
