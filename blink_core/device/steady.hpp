// A steady boundary: every running request got a token, wants one more, and nothing else happens. All members of the
// group work on it, a row each, where commit and plan would take the rows one after the other on rank 0; what they leave
// is the same to the last byte. Any other boundary is left to them, before anything has been written.
//
// It has three parts. `prepare_boundary` may run while the step does: it makes the next plan but for the tokens. The
// boundary itself reads those, looks whether anything happened meanwhile, and writes the plan. `finish_boundary` does
// what no step reads: events, the requests' records, pages and prefix cache, the log. It comes before anything else that
// looks at them; a resident group launches the step first.
//
// Not at log level ALL, whose entries have the order of the rows.
#pragma once

#include "admission.hpp"
#include "commit.hpp"
#include "next.hpp"

namespace blink {

// The tests below take all they look at before they judge, so that a GPU waits for memory once and not at each condition.

// `contains` of up to 8 ids.
BLINK_FN bool among(const int32_t (&ids)[8], uint32_t count, int32_t id) {
  bool found = false;
  for (uint32_t i = 0; i < 8; ++i) found |= (i < count) & (ids[i] == id);
  return found;
}

// -- while the step runs ------------------------------------------------------------------------------------------------

// Rank 0: the rows of a boundary that may be steady by the plan in flight; 0 if it cannot.
BLINK_FN uint32_t steady_rows(const Context& c, const NextStep& n) {
  const StateHeader& h = *c.head;
  if (h.in_flight == 0 || c.config->log_level >= uint32_t(LogLevel::ALL) || c.config->rings > STEADY_RINGS) return 0;
  const uint32_t planned = c.plan->n_rows, samples = c.plan->n_samples;
  const bool steady = (h.running <= n.room) & (h.running <= STEADY_ROWS) & (h.running == planned) & (samples == planned);
  return steady ? h.running : 0;
}

// Whether a ring has no epoch to acknowledge.
BLINK_FN bool prepare_ring(const Context& c, NextStep& n, uint32_t ring) {
  const uint64_t epoch = c.rings[ring].epoch;
  n.epoch[ring] = epoch;
  return c.ring(ring).gpu->epoch_ack == epoch;
}

// What a row needs at the boundary behind the step in flight.
struct RowNeeds {
  bool steady;     // its request can go on
  bool publishes;  // full pages
  bool grows;      // by a page
  uint32_t ring;
};

// Row `place` of the next plan.
BLINK_FN RowNeeds prepare_row(const Context& c, NextStep& n, uint32_t place) {
  const PlanRow row = c.plan_rows[place];
  const uint32_t running = c.running[place];
  const Request q = c.requests[row.request];
  const Sampling& s = c.sampling[row.request];
  const uint32_t flags = s.flags, n_stop = s.n_stop, min_tokens = s.min_tokens, logprobs = s.logprobs;
  const uint32_t size = c.config->page_size, emitted = q.emitted + 1;
  RowNeeds needs{};
  needs.steady = (running == row.request) & (row.sample != 0) & (q.state == uint32_t(RequestState::RUNNING)) &
                 (q.generation == row.generation) & (logprobs == 0) & ((flags & uint32_t(SlotFlag::MASKED)) == 0) &
                 (emitted < q.max_tokens) & (q.total + 1 < c.config->max_len);
  if (!needs.steady) return needs;
  needs.publishes = (q.published + 1) * size <= row.context_len && uses_prefix_cache(c, row.request);
  needs.grows = q.n_pages * size < row.context_len + 1;
  needs.ring = row.ring;
  NextRow& r = n.row[place];
  r.serial = q.arrival;
  r.request = row.request;
  r.generation = q.generation;
  r.context_len = row.context_len + 1;
  r.emitted = emitted;
  r.n_pages = q.n_pages + (needs.grows ? 1 : 0);
  r.row = uint32_t(q.row);
  if (!needs.grows) r.page = c.table_of(uint32_t(q.row))[row.context_len / size];
  r.stops = 0;
  if (emitted > min_tokens) r.stops = n_stop | ((flags & uint32_t(SlotFlag::IGNORE_EOS)) == 0 ? ENDS_AT_EOS : 0);
  return needs;
}

// The page with these tokens that one of the moves before `end` will have entered, or -1.
BLINK_FN int32_t find_moved(const Context& c, const NextStep& n, uint32_t end, uint32_t parent, uint64_t chain,
                            const int32_t* tokens) {
  for (uint32_t i = 0; i < end; ++i) {
    const Move& m = n.move[i];
    if (m.twin >= 0 || m.chain != chain || m.parent != parent) continue;
    const int32_t* theirs = c.tokens_of(n.row[m.place].request) + m.index * c.config->page_size;
    uint32_t equal = 0;
    while (equal < c.config->page_size && theirs[equal] == tokens[equal]) ++equal;
    if (equal == c.config->page_size) return int32_t(m.page);
  }
  return -1;
}

// Rank 0: the pages that row `place` will have filled. The tokens of all of them are known. False: too many.
BLINK_FN bool find_moves(const Context& c, NextStep& n, uint32_t place) {
  const NextRow& r = n.row[place];
  const Request& q = c.requests[r.request];
  const uint32_t size = c.config->page_size;
  const uint32_t* table = c.table_of(r.row);
  uint64_t chain = q.chain;
  uint32_t parent = q.published == 0 ? 0 : table[q.published - 1];
  for (uint32_t index = q.published; (index + 1) * size < r.context_len; ++index) {
    if (n.moves == STEADY_MOVES) return false;
    const int32_t* tokens = c.tokens_of(r.request) + index * size;
    const uint32_t page = table[index];
    chain = extend_chain(c, chain, tokens);
    int32_t twin = find_cached(c, parent, chain, tokens);
    if (twin < 0) twin = find_moved(c, n, n.moves, parent, chain, tokens);
    n.move[n.moves++] = {chain, place, index, page, parent, twin, 0};
    parent = twin >= 0 ? uint32_t(twin) : page;
  }
  return true;
}

// Rank 0: which pages the growing rows will get: those that a twin makes free, last first, and then the free list's.
BLINK_FN void find_pages(const Context& c, NextStep& n) {
  uint32_t made_free = n.moves, top = c.head->free_pages;
  for (uint32_t w = 0; w < STEADY_WORDS; ++w) {
    for (uint64_t left = n.growing.words[w]; left != 0; left &= left - 1) {
      NextRow& r = n.row[w * 64 + uint32_t(cuda::std::countr_zero(left))];
      while (made_free > 0 && n.move[made_free - 1].twin < 0) --made_free;
      r.page = made_free > 0 ? n.move[--made_free].page : c.free_list[--top];
    }
  }
}

// While a step runs, or at the latest at the boundary behind it: gets together what that boundary needs if it is steady.
template <class Group>
BLINK_FN void prepare_boundary(const Context& c, Group& g) {
  if (g.size() == 1) return;
  NextStep& n = g.scratch.next;
  g.sync();
  const uint64_t step = c.head->step;
  if (n.step == step && step != 0) return;
  g.sync();
  if (g.rank() == 0) {
    n.step = step;
    n.moves = 0;
    n.rows = steady_rows(c, n);
  }
  g.sync();
  const uint32_t rows = n.rows, rings = c.config->rings;
  if (rows == 0) return;
  bool steady = true;
  // From the other end: rank 0 has enough to do.
  for (uint32_t r = g.size() - 1 - g.rank(); r < rings; r += g.size()) steady &= prepare_ring(c, n, r);
  RowSet publishing{};
  for (uint32_t w = 0; w < STEADY_WORDS; ++w) {
    uint64_t publishes = 0, grows = 0, ring_bits[STEADY_RINGS]{};
    for (uint32_t place = w * 64 + g.rank(); place < rows && place < w * 64 + 64; place += g.size()) {
      const RowNeeds needs = prepare_row(c, n, place);
      const uint64_t bit = uint64_t(1) << (place % 64);
      steady &= needs.steady;
      publishes |= needs.publishes ? bit : 0;
      grows |= needs.grows ? bit : 0;
      for (uint32_t ring = 0; ring < STEADY_RINGS; ++ring) ring_bits[ring] |= ring == needs.ring ? bit : 0;
    }
    const bool used = w * 64 < rows;
    publishing.words[w] = used ? g.sum(publishes) : 0;
    grows = used ? g.sum(grows) : 0;
    for (uint32_t ring = 0; ring < rings; ++ring) {
      ring_bits[ring] = used ? g.sum(ring_bits[ring]) : 0;
      if (g.rank() == 0) n.of_ring[ring].words[w] = ring_bits[ring];
    }
    if (g.rank() == 0) n.growing.words[w] = grows;
  }
  steady = !g.any(!steady);
  if (g.rank() == 0) {
    for (uint32_t ring = 0; ring < rings; ++ring) n.ring_rows[ring] = n.of_ring[ring].count(rows);
    for (uint32_t w = 0; w < STEADY_WORDS; ++w) {
      for (uint64_t left = publishing.words[w]; steady && left != 0; left &= left - 1) {
        steady = find_moves(c, n, w * 64 + uint32_t(cuda::std::countr_zero(left)));
      }
    }
    steady = steady && n.growing.count(rows) <= c.head->free_pages;  // without preemption or eviction
    if (steady) find_pages(c, n);
    if (!steady) n.rows = 0;
  }
  g.sync();
}

// -- the boundary -------------------------------------------------------------------------------------------------------

// Whether the engine as a whole is steady.
BLINK_FN bool engine_is_steady(const Context& c, const NextStep& n) {
  const StateHeader& h = *c.head;
  const uint32_t status = c.plan->status;
  const uint64_t asked = load_relaxed(&c.control->stop_request) | load_relaxed(&c.control->drain_request);
  bool steady = (h.in_flight != 0) & (h.running == n.rows) & (status == uint32_t(StepStatus::OK));
  steady &= (h.state == uint32_t(EngineState::READY)) & (h.reserved_for < 0) & (h.quarantined == 0);
  return steady & (h.next_expiry == 0 || h.clock < h.next_expiry) & (asked == 0);
}

// Whether a ring has nobody waiting, no epoch to acknowledge, and credits as P2 counts them after the commit.
BLINK_FN bool ring_is_steady(const Context& c, const NextStep& n, uint32_t ring) {
  const RingState& rs = c.rings[ring];
  const uint64_t events = unconsumed(rs) + 2 * n.ring_rows[ring];
  return (rs.epoch == n.epoch[ring]) & (rs.waiting == 0) & (events + c.config->slots <= c.config->cq_entries);
}

BLINK_FN StepResult load_result(const StepResult* from) {
#if defined(__CUDA_ARCH__)
  const int4 r = *reinterpret_cast<const int4*>(from);
  return {r.x, __int_as_float(r.y), uint32_t(r.z), 0};
#else
  return *from;
#endif
}

// Takes the result of row `place`. Whether its request is still there and goes on.
BLINK_FN bool row_is_steady(const Context& c, NextRow& r, uint32_t place) {
  const Config& k = *c.config;
  const uint32_t request = r.request, generation = r.generation, stops = r.stops, n_stop = stops & ~ENDS_AT_EOS;
  const StepResult result = load_result(c.results + place);
  const uint32_t running = c.running[place];
  const Request& q = c.requests[request];
  const uint32_t living = q.generation, state = q.state;
  int32_t stop_ids[8]{};
  if (n_stop != 0) {
    for (uint32_t i = 0; i < 8; ++i) stop_ids[i] = c.sampling[request].stop_ids[i];
  }
  bool steady = (running == request) & (living == generation) & (state == uint32_t(RequestState::RUNNING));
  steady &= (result.status == uint32_t(StepStatus::OK)) & (result.token >= 0) & (uint32_t(result.token) < k.vocab);
  const bool eos = ((stops & ENDS_AT_EOS) != 0) & among(k.eos_ids, k.n_eos, result.token);
  const bool stop = among(stop_ids, n_stop, result.token);
  r.token = result.token;
  r.logprob = result.logprob;
  return steady & !eos & !stop;
}

// `fill_row` of one known token. Every address before the first store: behind one, nothing read before is taken for known.
BLINK_FN void write_row(const Context& c, const NextStep& n, uint32_t place) {
  const NextRow r = n.row[place];
  const bool grows = n.growing.has(place);
  const uint32_t position = r.context_len - 1, size = c.config->page_size;
  alignas(16) PlanRow row{};  // made here and stored whole
  row.request = r.request;
  row.generation = r.generation;
  row.q_start = place;
  row.q_len = 1;
  row.context_len = r.context_len;
  row.sample = 1;
  row.emitted = r.emitted;
  row.ring = c.ring_of(r.request);
  row.slot = c.slot_of(r.request);
  row.n_pages = r.n_pages;
  row.row = r.row;
  row.serial = r.serial;
  PlanRow* plan_row = c.plan_rows + place;
  int32_t *token = c.tokens_of(r.request) + position, *token_id = c.plan_token_ids + place;
  int32_t* plan_position = c.plan_positions + place;
  int64_t* kv_slot = c.plan_kv_slots + place;
  uint32_t* page = c.table_of(r.row) + (r.n_pages - 1);
  uint32_t* status = &c.results[place].status;
#if defined(__CUDA_ARCH__)
  const uint4* parts = reinterpret_cast<const uint4*>(&row);
  for (uint32_t i = 0; i < sizeof(PlanRow) / 16; ++i) reinterpret_cast<uint4*>(plan_row)[i] = parts[i];
#else
  *plan_row = row;
#endif
  *token = *token_id = r.token;
  *plan_position = int32_t(position);
  *kv_slot = int64_t(r.page) * size + position % size;
  if (grows) *page = r.page;
  *status = uint32_t(StepStatus::FAILED);  // until the model step says otherwise
}

// After begin_call. True if the boundary was steady: then a step is to be launched, and `finish_boundary` is due.
template <class Group>
BLINK_FN bool steady_boundary(const Context& c, Group& g) {
  if (g.size() == 1) return false;
  NextStep& n = g.scratch.next;
  prepare_boundary(c, g);
  g.stamp(Phase::PREPARED);
  const uint32_t rows = n.rows, rings = c.config->rings;
  bool steady = rows != 0;
  if (steady) {
    for (uint32_t place = g.rank(); place < rows; place += g.size()) steady &= row_is_steady(c, n.row[place], place);
    for (uint32_t r = g.size() - 1 - g.rank(); r < rings; r += g.size()) steady &= ring_is_steady(c, n, r);
    if (g.rank() == g.size() / 2) steady &= engine_is_steady(c, n);
  }
  g.stamp(Phase::JUDGED);
  steady = !g.any(!steady);
  if (g.rank() == 0) n.step = 0;
  if (!steady) return false;

  for (uint32_t place = g.rank(); place < rows; place += g.size()) write_row(c, n, place);
  for (uint32_t i = g.rank(); i < n.moves; i += g.size()) {
    const Move& m = n.move[i];
    if (m.twin >= 0) c.table_of(n.row[m.place].row)[m.index] = uint32_t(m.twin);
  }
  if (g.rank() == 0) {
    PlanHeader& plan = *c.plan;
    plan.n_rows = plan.n_tokens = plan.n_samples = rows;
    n.ended = c.head->step;
    plan.step = c.head->step = n.ended + 1;
  }
  g.stamp(Phase::WRITTEN);
  g.sync();
  return true;
}

// -- while the next step runs -------------------------------------------------------------------------------------------

// Rank 0: full pages enter the prefix cache, then growing requests get theirs; all in the order of the rows.
BLINK_FN void move_pages(const Context& c, const NextStep& n) {
  for (uint32_t i = 0; i < n.moves; ++i) {
    const Move& m = n.move[i];
    Request& q = c.requests[n.row[m.place].request];
    q.chain = m.chain;
    enter_page(c, n.row[m.place].request, m.index, m.page, m.parent, m.twin);
    ++q.published;
  }
  for (uint32_t w = 0; w < STEADY_WORDS; ++w) {
    for (uint64_t left = n.growing.words[w]; left != 0; left &= left - 1) {
      alloc_page(c, n.row[w * 64 + uint32_t(cuda::std::countr_zero(left))].request);
    }
  }
}

// What a steady boundary has left to do, if it has. Reads nothing that the step in flight writes.
template <class Group>
BLINK_FN void finish_boundary(const Context& c, Group& g) {
  if (g.size() == 1) return;
  NextStep& n = g.scratch.next;
  const uint64_t ended = n.ended;
  if (ended == 0) return;
  const uint32_t rows = n.rows, rings = c.config->rings;
  for (uint32_t place = g.rank(); place < rows; place += g.size()) {
    const NextRow& r = n.row[place];
    const uint32_t ring = c.ring_of(r.request);
    write_event(c, ring, c.rings[ring].cq_tail + n.of_ring[ring].count(place), c.slot_of(r.request), r.generation,
                EventKind::TOKEN, 0, r.emitted - 1, r.token, r.logprob, ended);
    Request& q = c.requests[r.request];
    q.computed = r.context_len - 1;
    q.total = r.context_len;
    q.emitted = r.emitted;
  }
  g.sync();
  if (g.rank() == 0) {
    move_pages(c, n);
    for (uint32_t ring = 0; ring < rings; ++ring) {
      c.rings[ring].planned = n.ring_rows[ring];
      c.rings[ring].cq_tail += n.ring_rows[ring];
    }
    c.head->tokens += rows;
    ++c.head->committed;
    store_relaxed(&c.status->steps, c.head->committed);
    log_event(c, LogLevel::DECISIONS, LogKind::STEP, 0, 0, 0, rows, rows, rows);
    ++g.scratch.steady;
    n.ended = 0;
  }
  g.sync();
}

}  // namespace blink
