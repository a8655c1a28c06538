// Work list of one step's attention, made on the device from the rows of the plan and used by every layer with the same
// window (design sections 4 and 7; precedent: FlashMLA's tile-scheduler metadata). One block.
//
// Rows with one new token are decode rows: their visible keys are cut into splits of about equal length, one item each.
// Other rows are prefill: their new tokens are cut into tiles of `tile_tokens`, the last (heaviest) first.
//
// In batch-invariant mode (`piece`) all rows are prefill. There a token's sums are made for pieces of so many keys, cut by
// position, and added in order: a tile of several tokens takes all its pieces, a row of one token has a tile for each
// piece as long as there is room, which leaves the same bits.
#include "common.cuh"

constexpr int THREADS = 256;
constexpr int UNIT = 64;  // keys; splits are cut at multiples of it

struct PlanParams {
  int heads_work;    // blocks that one item or tile makes: kv_heads * ceil(group / 16)
  int target;        // decode blocks wanted in all, about 3 for each place on the GPU
  int fixed_chunk;   // keys of a split whatever the batch (batch-invariant mode), multiple of UNIT; 0: chosen here
  int min_chunk;     // otherwise at least this many
  int tile_tokens;   // new tokens of a prefill tile
  int window;        // keys a query sees, its own included; 0: all
  int max_items, max_tiles;
  int piece;         // keys of a piece in batch-invariant mode, else 0
  int max_pieces;    // of all rows with one new token
};

// Exclusive prefix sum over the block; `total` gets the sum. `scratch`: THREADS / 32 words.
DEVICE int block_scan(int value, int* scratch, int& total) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int sum = value;
#pragma unroll
  for (int i = 1; i < 32; i <<= 1) {
    const int other = __shfl_up_sync(0xffffffffu, sum, i);
    if (lane >= i) sum += other;
  }
  __syncthreads();
  if (lane == 31) scratch[warp] = sum;
  __syncthreads();
  int before = 0;
  total = 0;
  for (int i = 0; i < THREADS / 32; ++i) {
    before += i < warp ? scratch[i] : 0;
    total += scratch[i];
  }
  return before + sum - value;
}

DEVICE int first_key(int position, int window) {
  return window > 0 && position + 1 > window ? position + 1 - window : 0;
}

// row_starts [n_rows + 1], context_lens, table_rows [n_rows]. counts: {items, tiles, overflow}. items: two int4 each,
// {row, first key, end key, split | splits << 16} and {token, row of the block tables, first visible key, 0}; a row's
// items are neighbours. tiles {row of the block tables, first token in the step's arrays, tokens, position of the
// first}; in batch-invariant mode two int4 each, the other {place of the piece's sums or -1 for all pieces, piece, place
// among the row's pieces | their number << 16, row}. token_rows: row of each token.
extern "C" __global__ void __launch_bounds__(THREADS)
    attention_plan(const StepSizes* sizes, const int* row_starts, const int* context_lens, const int* table_rows,
                   PlanParams p, int* counts, int4* items, int4* tiles, int* token_rows) {
  __shared__ int scratch[THREADS / 32], prefill[THREADS], n_prefill;
  pdl_wait();
  const int rows = sizes->n_rows;
  int keys = 0;  // of all decode rows, in units
  for (int base = 0; base < rows; base += THREADS) {
    const int row = base + threadIdx.x;
    int units = 0, sum;
    if (row < rows && row_starts[row + 1] - row_starts[row] == 1 && p.piece == 0) {
      const int end = context_lens[row], first = first_key(end - 1, p.window) / UNIT * UNIT;
      units = (end - first + UNIT - 1) / UNIT;
    }
    block_scan(units, scratch, sum);
    keys += sum;
  }
  // With room for every row's rounding: sum(ceil(units / chunk)) <= rows + keys / chunk <= max_items.
  const int room = max(1, min(p.target / p.heads_work, p.max_items - rows));
  int chunk = max((keys + room - 1) / room, (p.min_chunk + UNIT - 1) / UNIT);
  if (p.fixed_chunk > 0) chunk = p.fixed_chunk / UNIT;
  chunk = max(chunk, 1);
  int n_items = 0, n_tiles = 0, n_pieces = 0;
  for (int base = 0; base < rows; base += THREADS) {
    const int row = base + threadIdx.x;
    int splits = 0, row_tiles = 0, first = 0, end = 0, start = 0, length = 0, units = 0, pieces = 0, sum;
    if (row < rows) {
      start = row_starts[row];
      length = row_starts[row + 1] - start;
      end = context_lens[row];
      if (length == 1 && p.piece == 0) {
        token_rows[start] = row;
        first = first_key(end - 1, p.window) / UNIT * UNIT;
        units = (end - first + UNIT - 1) / UNIT;
        splits = (units + chunk - 1) / chunk;
      } else {
        row_tiles = (length + p.tile_tokens - 1) / p.tile_tokens;
        if (p.piece > 0 && length == 1) {
          first = first_key(end - 1, p.window) / p.piece;
          pieces = (end - 1) / p.piece - first + 1;
        }
      }
    }
    const int item = n_items + block_scan(splits, scratch, sum);
    n_items += sum;
    if (splits > 0 && item + splits <= p.max_items) {
      // Equal lengths, unless the cuts must be the same in any batch.
      const int length_units = p.fixed_chunk > 0 ? chunk : (units + splits - 1) / splits;
      for (int s = 0; s < splits; ++s) {
        const int low = first + s * length_units * UNIT;
        items[2 * (item + s)] = make_int4(row, min(low, end), min(low + length_units * UNIT, end), s | splits << 16);
        items[2 * (item + s) + 1] = make_int4(start, table_rows[row], first_key(end - 1, p.window), 0);
      }
    }
    if (threadIdx.x == 0) n_prefill = 0;
    const int place = n_pieces + block_scan(pieces > 1 ? pieces : 0, scratch, sum);
    n_pieces += sum;
    const bool cut = pieces > 1 && place + pieces <= p.max_pieces;
    if (cut) row_tiles = pieces;
    const int tile = n_tiles + block_scan(row_tiles, scratch, sum);
    n_tiles += sum;
    if (row_tiles > 0) prefill[atomicAdd(&n_prefill, 1)] = row;
    __syncthreads();
    for (int i = 0; i < n_prefill; ++i) {
      const int begin = row_starts[prefill[i]], after = row_starts[prefill[i] + 1];
      for (int t = begin + threadIdx.x; t < after; t += THREADS) token_rows[t] = prefill[i];
    }
    if (row_tiles > 0 && tile + row_tiles <= p.max_tiles) {
      for (int i = 0; i < row_tiles; ++i) {
        const int at = cut ? 0 : (row_tiles - 1 - i) * p.tile_tokens;
        const int4 made = make_int4(table_rows[row], start + at, min(p.tile_tokens, length - at), end - length + at);
        if (p.piece == 0) {
          tiles[tile + i] = made;
        } else {
          tiles[2 * (tile + i)] = made;
          tiles[2 * (tile + i) + 1] = make_int4(cut ? place + i : -1, first + i, i | pieces << 16, row);
        }
      }
    }
  }
  if (threadIdx.x == 0) {
    counts[0] = min(n_items, p.max_items);
    counts[1] = min(n_tiles, p.max_tiles);
    counts[2] = n_items > p.max_items || n_tiles > p.max_tiles ? 1 : 0;  // the lists were sized too small: an error
  }
}

// Follows the plan without programmatic dependence: what starts after it sees the whole plan, without waiting for the
// kernel before it. One thread.
extern "C" __global__ void attention_plan_made() {}
