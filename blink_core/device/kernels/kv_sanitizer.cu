// KV sanitizer on the GPU (design section 5): the checks of blink_core/runtime/kv_sanitizer.py, which says what is
// right.
//
// Tags lie as blink_core/ops/kv_tags.py lays them out. A step runs kv_tags_begin behind step_view, then in each layer
// kv_tags_append behind the kernel that writes keys and values, kv_tags_check and kv_tags_report ahead of attention,
// and kv_tags_end behind the sampler. Nothing of it is launched when the sanitizer is off. A pass that computes a row
// anew for LongRoPE (`redo`) writes the same rows again: their tags stay as they are.
//
// What a row must hold comes from the reader's own tokens in the token pool and from nothing that the plan says but
// whose row it is; tags come from the arrays that the model reads. No kernel here starts before the one ahead has ended.
#include "../abi.hpp"
#include "redo.cuh"

using namespace blink;

constexpr uint32_t BLOCK = 256;
constexpr uint32_t WORDS = 4;  // of a tag
enum : uint32_t { PREFIX, PLACE, OWNER, WRITTEN };
constexpr uint64_t LOW = 0xFFFFFFFFull, CACHE_BIT = 1ull << 32, NONE = ~0ull;
enum : uint32_t { STEPS, ROWS, SHARED, REPORTS, GONE };  // descriptor.KV_COUNTERS
// Mismatch of runtime/kv_report.py, in its order.
enum : uint32_t { UNWRITTEN, FOREIGN, NOT_SHARED, POSITION, TOKENS, NOT_NOW, FREED, TAKEN, LAYERS };

struct RowInfo {
  uint64_t owner, written, life;  // life: arrival + 1
  uint32_t start, skip;           // position of the first new token; 1: not checked (any more)
};

struct Report {
  uint32_t kind, layer, values, page, offset, table_index;  // values: 1 for values, 0 for keys
  uint32_t reader, reader_generation, reader_position, step;
  uint32_t writer, writer_generation, writer_position, writer_step;  // writer: request + 1, 0 for nobody
  uint32_t same_tokens, page_state;
  int32_t page_owner;
  uint32_t page_generation;
};

struct KvTagsParams {
  const Config* config;
  const PlanHeader* header;
  const PlanRow* plan_rows;
  const Request* requests;
  const Sampling* sampling;
  const Page* pages;
  const int32_t* token_pool;     // [requests, max_len]
  const uint32_t* block_tables;  // [max_rows, max_pages]
  StepResult* results;           // [max_rows]
  const int32_t* token_ids;      // what step_view made: [tokens]
  const int32_t* positions;
  const int64_t* kv_slots;
  const int32_t* row_starts;     // [rows + 1]
  const int32_t* context_lens;   // [rows]
  const int32_t* table_rows;     // [rows]
  uint64_t* tags;                // [2, layers, pages * page_size, WORDS]
  uint64_t* fresh;               // [tokens, WORDS] tags of the new tokens
  uint64_t* expected;            // [max_rows, max_len, 2] prefix and place of each position
  RowInfo* rows;                 // [max_rows]
  uint64_t* first;               // [max_rows] least key of a mismatch in this layer, or NONE
  uint64_t* condemned;           // [requests] life of the request that read a wrong row
  uint64_t* counters;            // [5]
  Report* reports;               // [max_reports], in host memory
  const Redo* redo;              // or null
  uint64_t* told;                // [5] in host memory: `counters` as others see them, or null; the host writes REPORTS
  uint64_t* offered;             // in host memory: reports that are there to be taken
  uint64_t limit_ns;             // longest wait for the host to take them
  uint32_t layers, max_reports;
};

// Whether the step's own plan runs, not a pass of LongRoPE's.
__device__ bool of_plan(const KvTagsParams& p) { return p.redo == nullptr || p.redo->count == 0; }

// mix_word of device/checksum.hpp.
__device__ uint64_t mix(uint32_t word, uint64_t index) {
  uint64_t z = uint64_t(word) + (index + 1) * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

// Inclusive sum over the block; every thread gets `total`. `scratch`: BLOCK / 32 words.
__device__ uint64_t block_scan(uint64_t value, uint64_t* scratch, uint64_t& total) {
  const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  for (uint32_t i = 1; i < 32; i <<= 1) {
    const unsigned long long other = __shfl_up_sync(0xffffffffu, (unsigned long long)value, i);
    if (lane >= i) value += other;
  }
  __syncthreads();
  if (lane == 31) scratch[warp] = value;
  __syncthreads();
  total = 0;
  for (uint32_t i = 0; i < BLOCK / 32; ++i) {
    if (i < warp) value += scratch[i];
    total += scratch[i];
  }
  return value;
}

template <class T>
__device__ T look(const T& word) {
  return *static_cast<const volatile T*>(&word);
}

__device__ uint64_t add(uint64_t* counter, uint64_t more) {
  return atomicAdd(reinterpret_cast<unsigned long long*>(counter), (unsigned long long)more);
}

// One block a row: what its request knows of itself, and the tags of its new tokens.
extern "C" __global__ void __launch_bounds__(BLOCK) kv_tags_begin(const __grid_constant__ KvTagsParams p) {
  __shared__ uint64_t scratch[BLOCK / 32], before_new;
  const uint32_t r = blockIdx.x;
  if (!of_plan(p)) return;
  if (r >= p.header->n_rows) return;
  if (r == 0 && threadIdx.x == 0) add(&p.counters[STEPS], 1);
  const PlanRow& row = p.plan_rows[r];
  const Request& q = p.requests[row.request];
  const uint64_t arrival = look(q.arrival);
  const uint32_t known = row.context_len, count = uint32_t(p.row_starts[r + 1] - p.row_starts[r]);
  const uint32_t start = uint32_t(p.context_lens[r]) - count;
  const int32_t* tokens = p.token_pool + uint64_t(row.request) * p.config->max_len;
  uint64_t* expected = p.expected + uint64_t(r) * p.config->max_len * 2;
  uint64_t carry = 0, total;
  if (threadIdx.x == 0) before_new = 0;
  for (uint32_t base = 0; base < known; base += BLOCK) {
    const uint32_t at = base + threadIdx.x;
    const uint32_t token = at < known ? uint32_t(look(tokens[at])) : 0;
    const uint64_t sum = carry + block_scan(at < known ? mix(token, at) : 0, scratch, total);
    if (at < known) {
      expected[2 * at] = sum;
      expected[2 * at + 1] = uint64_t(token) << 32 | at;
      if (at + 1 == start) before_new = sum;
    }
    carry += total;
  }
  // Looked at after its tokens were: as long as it runs, nobody else's can have stood there.
  __threadfence();
  __syncthreads();
  const bool cached =
      p.config->prefix_cache != 0 && (p.sampling[row.request].flags & uint32_t(SlotFlag::NO_PREFIX_CACHE)) == 0;
  const uint64_t owner = uint64_t(row.request + 1) | uint64_t(row.generation) << 32;
  const uint64_t written = (p.header->step & LOW) | (cached ? CACHE_BIT : 0);
  if (threadIdx.x == 0) {
    const bool gone = look(q.state) != uint32_t(RequestState::RUNNING) || look(q.generation) != row.generation ||
                      look(q.arrival) != arrival;
    if (gone) add(&p.counters[GONE], 1);
    p.rows[r] = {owner, written, arrival + 1, start, gone || p.condemned[row.request] == arrival + 1 ? 1u : 0u};
    p.first[r] = NONE;
  }
  carry = before_new;
  for (uint32_t base = 0; base < count; base += BLOCK) {
    const uint32_t i = base + threadIdx.x, at = uint32_t(p.row_starts[r]) + i;
    const uint32_t token = i < count ? uint32_t(p.token_ids[at]) : 0;
    const uint32_t position = i < count ? uint32_t(p.positions[at]) : 0;
    const uint64_t sum = carry + block_scan(i < count ? mix(token, position) : 0, scratch, total);
    if (i < count) {
      uint64_t* tag = p.fresh + uint64_t(at) * WORDS;
      tag[PREFIX] = sum;
      tag[PLACE] = uint64_t(token) << 32 | position;
      tag[OWNER] = owner;
      tag[WRITTEN] = written;
    }
    carry += total;
  }
}

__device__ uint64_t* plane(const KvTagsParams& p, uint32_t values, uint32_t layer) {
  return p.tags + (uint64_t(values) * p.layers + layer) * p.config->pages * p.config->page_size * WORDS;
}

// Tags of the new tokens, of one layer's keys and values. Padding writes no tag.
extern "C" __global__ void __launch_bounds__(BLOCK)
    kv_tags_append(const __grid_constant__ KvTagsParams p, uint32_t layer) {
  if (!of_plan(p)) return;
  const uint32_t words = p.header->n_tokens * WORDS;
  uint64_t *k = plane(p, 0, layer), *v = plane(p, 1, layer);
  for (uint32_t i = blockIdx.x * BLOCK + threadIdx.x; i < words; i += gridDim.x * BLOCK) {
    const uint64_t at = uint64_t(p.kv_slots[i / WORDS]) * WORDS + i % WORDS;
    k[at] = v[at] = p.fresh[i];
  }
}

struct Place {
  uint32_t page, offset;
  uint64_t slot;
};

__device__ Place place_of(const KvTagsParams& p, uint32_t r, uint32_t position) {
  const uint32_t size = p.config->page_size;
  const uint32_t page = p.block_tables[uint64_t(p.table_rows[r]) * p.config->max_pages + position / size];
  return {page, position % size, uint64_t(page) * size + position % size};
}

// What is wrong with the tag of one row of keys or values, -1 if nothing is; `shared`: another request's, and right.
__device__ int judge(const KvTagsParams& p, const RowInfo& row, const uint64_t* want, const uint64_t* tag,
                     const Page& page, uint32_t position, bool& shared) {
  const bool same = tag[PREFIX] == want[0] && tag[PLACE] == want[1], mine = tag[OWNER] == row.owner;
  const bool now = (tag[WRITTEN] & LOW) == (row.written & LOW);
  shared = false;
  if (same && mine && (position < row.start || now)) return -1;
  const uint32_t size = p.config->page_size;
  const bool full = (position / size + 1) * size <= row.start;
  shared = same && !mine && full && look(page.state) == uint32_t(PageState::CACHED) && !now &&
           (tag[WRITTEN] & row.written & CACHE_BIT) != 0;
  if (shared) return -1;
  if (tag[OWNER] == 0) return UNWRITTEN;
  if (!mine) return same ? NOT_SHARED : FOREIGN;
  if (same) return NOT_NOW;
  return (tag[PLACE] & LOW) != position ? POSITION : TOKENS;
}

// A page whose rows are right, but which the request does not hold any more: see KvSanitizer._page_wrong.
__device__ int judge_page(const Page& page, uint32_t request, uint32_t generation) {
  const uint32_t state = look(page.state);
  const int32_t owner = look(page.owner);
  if (state == uint32_t(PageState::OWNED)) {
    return owner != -1 && (owner != int32_t(request) || look(page.generation) != generation) ? int(TAKEN) : -1;
  }
  return state != uint32_t(PageState::CACHED) && state != uint32_t(PageState::QUARANTINED) ? int(FREED) : -1;
}

// Keys of a mismatch, least first: keys before values, tags before pages before comparison of layers, then position.
__device__ uint64_t key_of(uint32_t values, uint32_t order, int kind, uint32_t position) {
  return uint64_t(values) << 62 | uint64_t(order) << 60 | uint64_t(position) << 8 | uint64_t(kind);
}

__device__ void note(const KvTagsParams& p, uint32_t r, uint64_t key) {
  atomicMin(reinterpret_cast<unsigned long long*>(&p.first[r]), (unsigned long long)key);
}

// Every row that one layer's attention is about to read. window: keys that a query sees, its own included; 0: all.
extern "C" __global__ void __launch_bounds__(BLOCK)
    kv_tags_check(const __grid_constant__ KvTagsParams p, uint32_t layer, uint32_t window) {
  if (!of_plan(p)) return;
  const uint32_t n_rows = p.header->n_rows, size = p.config->page_size;
  const uint64_t *tags[2] = {plane(p, 0, layer), plane(p, 1, layer)}, *base = plane(p, 0, 0);
  // Neighbouring blocks share a row: `each` of them, or one where there are more rows than blocks.
  const uint32_t each = n_rows == 0 || gridDim.x < n_rows ? 1 : gridDim.x / n_rows, part = blockIdx.x % each;
  uint64_t checked = 0, others = 0;
  for (uint32_t r = blockIdx.x / each; r < n_rows; r += (gridDim.x + each - 1) / each) {
    const RowInfo row = p.rows[r];
    if (row.skip != 0) continue;
    const PlanRow& plan = p.plan_rows[r];
    const uint32_t low = window > 0 && row.start + 1 > window ? row.start + 1 - window : 0;
    // What the view says is not to be trusted: too long a context must not lead out of `expected` or the block table.
    const uint32_t end = min(uint32_t(p.context_lens[r]), p.config->max_len);
    for (uint32_t at = low + part * BLOCK + threadIdx.x; at < end; at += each * BLOCK) {
      if (at >= plan.context_len) {  // behind what its request knows
        note(p, r, key_of(0, 0, POSITION, at));
        break;
      }
      const Place place = place_of(p, r, at);
      const Page& page = p.pages[place.page];
      const uint64_t* want = p.expected + (uint64_t(r) * p.config->max_len + at) * 2;
      for (uint32_t values = 0; values < 2; ++values) {
        const uint64_t* tag = tags[values] + place.slot * WORDS;
        bool shared;
        const int wrong = judge(p, row, want, tag, page, at, shared);
        if (wrong >= 0) note(p, r, key_of(values, 0, wrong, at));
        if (layer == 0 && values == 0) {
          checked += wrong < 0 ? 1 : 0;
          others += shared ? 1 : 0;
        }
        bool equal = true;
        for (uint32_t w = 0; w < WORDS; ++w) equal = equal && tag[w] == base[place.slot * WORDS + w];
        if (!equal) note(p, r, key_of(values, 2, LAYERS, at));
      }
      if (at % size == 0 || at == low) {
        const int wrong = judge_page(page, plan.request, plan.generation);
        if (wrong >= 0) note(p, r, key_of(0, 1, wrong, at));
      }
    }
  }
  if (checked != 0) add(&p.counters[ROWS], checked);
  if (others != 0) add(&p.counters[SHARED], others);
}

// One report for each row whose first mismatch this layer showed. One block.
extern "C" __global__ void __launch_bounds__(BLOCK)
    kv_tags_report(const __grid_constant__ KvTagsParams p, uint32_t layer) {
  if (!of_plan(p)) return;
  for (uint32_t r = threadIdx.x; r < p.header->n_rows; r += BLOCK) {
    const uint64_t key = p.first[r];
    if (key == NONE) continue;
    RowInfo& row = p.rows[r];
    const PlanRow& plan = p.plan_rows[r];
    const uint32_t values = uint32_t(key >> 62), at = uint32_t(key >> 8);
    const Place place = place_of(p, r, at);
    const uint64_t* tag = plane(p, values, layer) + place.slot * WORDS;
    const Page& page = p.pages[place.page];
    p.first[r] = NONE;
    row.skip = 1;
    p.condemned[plan.request] = row.life;
    const uint64_t number = add(&p.counters[REPORTS], 1);
    if (number >= p.max_reports) continue;
    Report& out = p.reports[number];
    out = {uint32_t(key & 0xFF), layer, values, place.page, place.offset, at / p.config->page_size,
           plan.request, plan.generation, at, uint32_t(row.written & LOW),
           uint32_t(tag[OWNER] & LOW), uint32_t(tag[OWNER] >> 32), uint32_t(tag[PLACE] & LOW),
           uint32_t(tag[WRITTEN] & LOW),
           tag[PREFIX] == p.expected[(uint64_t(r) * p.config->max_len + at) * 2] ? 1u : 0u, look(page.state),
           look(page.owner), look(page.generation)};
    __threadfence_system();  // the host is told of it by kv_tags_end
  }
}

__device__ uint64_t read_host(const uint64_t* word) {
  uint64_t v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(word) : "memory");
  return v;
}

// Tells the host the counters. New reports wait until it has taken them: a request never ends before its report is in
// the file. One thread.
__device__ void tell(const KvTagsParams& p) {
  const uint64_t made = p.counters[REPORTS];
  for (uint32_t i = 0; i <= GONE; ++i) {
    if (i != REPORTS) static_cast<volatile uint64_t*>(p.told)[i] = p.counters[i];
  }
  if (read_host(&p.told[REPORTS]) == made) return;
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p.offered), "l"(made) : "memory");
  uint64_t begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (read_host(&p.told[REPORTS]) != made && now - begin < p.limit_ns);
}

// No token of a request passes that read a wrong row.
extern "C" __global__ void __launch_bounds__(BLOCK) kv_tags_end(const __grid_constant__ KvTagsParams p) {
  if (!of_plan(p)) return;
  if (threadIdx.x == 0 && p.told != nullptr) tell(p);
  for (uint32_t r = threadIdx.x; r < p.header->n_rows; r += BLOCK) {
    if (p.condemned[p.plan_rows[r].request] == p.rows[r].life) p.results[r].status = uint32_t(StepStatus::FAILED);
  }
}
