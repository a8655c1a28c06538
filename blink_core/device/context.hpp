// Pointers into the shared and engine-owned memory of one engine, computed once from its Config.
#pragma once

#include "abi.hpp"

namespace blink {

struct RingMemory {
  FrontEndLine* front_end;
  GpuLine* gpu;
  uint64_t* sq;
  Slot* slots;
  int32_t* arena;
  Event* cq;
  MaskBox* mask_boxes;
  uint32_t* mask_bits;
};

struct Context {
  const Config* config;  // in State: front ends can write the one in shared memory
  ControlLine* control;
  StatusLine* status;
  uint8_t* rings_base;
  RingLayout ring_layout;
  // State
  StateHeader* head;
  RingState* rings;
  Request* requests;
  Sampling* sampling;
  BiasPair* bias;
  uint32_t* running;
  uint32_t* row_stack;
  uint32_t* block_tables;
  Page* pages;
  uint32_t* free_list;
  uint32_t* quarantine;
  int32_t* buckets;
  int32_t* page_tokens;
  uint32_t* masks;
  int32_t* tokens;
  // Log and plan
  LogEntry* log;
  PlanHeader* plan;
  PlanRow* plan_rows;
  int32_t* plan_token_ids;
  int32_t* plan_positions;
  int64_t* plan_kv_slots;
  StepResult* results;
  int32_t* top_tokens;
  float* top_logprobs;

  BLINK_FN RingMemory ring(uint32_t index) const {
    uint8_t* base = rings_base + uint64_t(index) * ring_layout.nbytes;
    return {reinterpret_cast<FrontEndLine*>(base + ring_layout.front_end),
            reinterpret_cast<GpuLine*>(base + ring_layout.gpu),
            reinterpret_cast<uint64_t*>(base + ring_layout.sq),
            reinterpret_cast<Slot*>(base + ring_layout.slots),
            reinterpret_cast<int32_t*>(base + ring_layout.arena),
            reinterpret_cast<Event*>(base + ring_layout.cq),
            reinterpret_cast<MaskBox*>(base + ring_layout.mask_boxes),
            reinterpret_cast<uint32_t*>(base + ring_layout.mask_bits)};
  }
  BLINK_FN uint32_t request_index(uint32_t ring, uint32_t slot) const { return ring * config->slots + slot; }
  // A division a call counts where every row of a step makes some: one ring needs none.
  BLINK_FN uint32_t ring_of(uint32_t request) const { return config->rings == 1 ? 0 : request / config->slots; }
  BLINK_FN uint32_t slot_of(uint32_t request) const { return request - ring_of(request) * config->slots; }
  BLINK_FN int32_t* tokens_of(uint32_t request) const { return tokens + uint64_t(request) * config->max_len; }
  BLINK_FN BiasPair* bias_of(uint32_t request) const { return bias + uint64_t(request) * config->max_bias; }
  BLINK_FN uint32_t* mask_of(uint32_t row) const { return masks + uint64_t(row) * config->mask_words; }
  BLINK_FN int32_t* tokens_of_page(uint32_t page) const { return page_tokens + uint64_t(page) * config->page_size; }
  BLINK_FN uint32_t* table_of(uint32_t row) const { return block_tables + uint64_t(row) * config->max_pages; }
};

// Once, before the first make_context: takes the configuration into engine-owned memory. From then on the shared copy is
// for readers only, and what a front end writes there changes nothing.
BLINK_FN void adopt_config(const uint8_t* shared, uint8_t* state) {
  *reinterpret_cast<Config*>(state) = *reinterpret_cast<const Config*>(shared);
}

// `shared` holds the control region and then the rings; the others are engine-owned regions.
BLINK_FN Context make_context(uint8_t* shared, uint8_t* state, uint8_t* log, uint8_t* plan) {
  Context c{};
  c.config = reinterpret_cast<const Config*>(state);  // State's first section
  const ControlLayout cl = control_layout(*c.config);
  c.control = reinterpret_cast<ControlLine*>(shared + cl.control);
  c.status = reinterpret_cast<StatusLine*>(shared + cl.status);
  c.rings_base = shared + cl.nbytes;
  c.ring_layout = ring_layout(*c.config);
  const StateLayout s = state_layout(*c.config);
  c.head = reinterpret_cast<StateHeader*>(state + s.header);
  c.rings = reinterpret_cast<RingState*>(state + s.rings);
  c.requests = reinterpret_cast<Request*>(state + s.requests);
  c.sampling = reinterpret_cast<Sampling*>(state + s.sampling);
  c.bias = reinterpret_cast<BiasPair*>(state + s.bias);
  c.running = reinterpret_cast<uint32_t*>(state + s.running);
  c.row_stack = reinterpret_cast<uint32_t*>(state + s.row_stack);
  c.block_tables = reinterpret_cast<uint32_t*>(state + s.block_tables);
  c.pages = reinterpret_cast<Page*>(state + s.pages);
  c.free_list = reinterpret_cast<uint32_t*>(state + s.free_list);
  c.quarantine = reinterpret_cast<uint32_t*>(state + s.quarantine);
  c.buckets = reinterpret_cast<int32_t*>(state + s.buckets);
  c.page_tokens = reinterpret_cast<int32_t*>(state + s.page_tokens);
  c.masks = reinterpret_cast<uint32_t*>(state + s.masks);
  c.tokens = reinterpret_cast<int32_t*>(state + s.tokens);
  const LogLayout l = log_layout(*c.config);
  c.log = reinterpret_cast<LogEntry*>(log + l.entries);
  const PlanLayout p = plan_layout(*c.config);
  c.plan = reinterpret_cast<PlanHeader*>(plan + p.header);
  c.plan_rows = reinterpret_cast<PlanRow*>(plan + p.rows);
  c.plan_token_ids = reinterpret_cast<int32_t*>(plan + p.token_ids);
  c.plan_positions = reinterpret_cast<int32_t*>(plan + p.positions);
  c.plan_kv_slots = reinterpret_cast<int64_t*>(plan + p.kv_slots);
  c.results = reinterpret_cast<StepResult*>(plan + p.results);
  c.top_tokens = reinterpret_cast<int32_t*>(plan + p.top_tokens);
  c.top_logprobs = reinterpret_cast<float*>(plan + p.top_logprobs);
  return c;
}

BLINK_FN void append_log(const Context& c, LogKind kind, uint32_t ring, uint32_t slot, uint32_t generation, uint32_t a,
                         uint32_t b, uint32_t d) {
  LogEntry& e = c.log[c.head->log_tail & (c.config->log_entries - 1)];
  e.step = c.plan->step;  // runs ahead of head->step while a step is planned
  e.kind = uint16_t(kind);
  e.ring = uint16_t(ring);
  e.slot = slot;
  e.generation = generation;
  e.a = a;
  e.b = b;
  e.c = d;
  ++c.head->log_tail;
}

// At level ALL the first entry of each call follows one that says which call it is, its clock, and how many boundaries
// there have been: with it a reader knows every call that wrote, and how many boundaries wrote nothing.
BLINK_FN void append_in_call(const Context& c, LogKind kind, uint32_t ring, uint32_t slot, uint32_t generation,
                             uint32_t a, uint32_t b, uint32_t d) {
  if (c.config->log_level >= uint32_t(LogLevel::ALL) && c.head->clock_due != 0) {
    append_log(c, LogKind::CLOCK, 0, c.head->clock_due - 1, 0, uint32_t(c.head->clock), uint32_t(c.head->clock >> 32),
               uint32_t(c.head->boundaries));
    c.head->clock_due = 0;
    c.head->logged_clock = c.head->clock;
  }
  append_log(c, kind, ring, slot, generation, a, b, d);
}

// Appends to the event log; the index never waits, so a reader that falls behind sees a counted gap.
BLINK_FN void log_event(const Context& c, LogLevel level, LogKind kind, uint32_t ring, uint32_t slot,
                        uint32_t generation, uint32_t a, uint32_t b, uint32_t d) {
  if (c.config->log_level >= uint32_t(level)) append_in_call(c, kind, ring, slot, generation, a, b, d);
}

// Rank 0: the time of this call in microseconds. A clock that goes back is held still.
BLINK_FN void set_clock(const Context& c, uint64_t now) {
  if (now > c.head->clock) c.head->clock = now;
}

// Rank 0: a poll or a boundary begins at `now`.
BLINK_FN void begin_call(const Context& c, bool boundary, uint64_t now) {
  set_clock(c, now);
  c.head->boundaries += boundary;
  c.head->clock_due = boundary ? 2 : 1;
}

}  // namespace blink
