// A steady boundary: every running request got a token, wants one more, and nothing else happens. All members of the
// group work on it, a row each, where commit and plan would take the rows one after the other on rank 0; what they leave
// is the same to the last byte. Any other boundary is left to them, before anything has been written.
//
// Not at log level ALL, whose entries have the order of the rows.
#pragma once

#include <cuda/std/bit>

#include "admission.hpp"
#include "commit.hpp"

namespace blink {

inline constexpr uint32_t STEADY_WORDS = 4;  // of 64 rows
inline constexpr uint32_t STEADY_RINGS = 4;

// A set of rows, the same in every member.
struct RowSet {
  uint64_t words[STEADY_WORDS];
  BLINK_FN bool has(uint32_t row) const { return (words[row / 64] >> (row % 64) & 1) != 0; }
  BLINK_FN uint32_t count(uint32_t end) const {  // of the rows before `end`
    uint32_t n = 0;
    for (uint32_t w = 0; w < STEADY_WORDS && w * 64 < end; ++w) {
      const uint32_t bits = end - w * 64;
      n += uint32_t(cuda::std::popcount(bits < 64 ? words[w] & ((uint64_t(1) << bits) - 1) : words[w]));
    }
    return n;
  }
};

// The tests below take all they look at before they judge, so that a GPU waits for memory once and not at each condition.

// Rank 0: whether the engine as a whole is steady.
BLINK_FN bool engine_is_steady(const Context& c) {
  const StateHeader& h = *c.head;
  const PlanHeader& plan = *c.plan;
  const uint32_t planned = plan.n_rows, samples = plan.n_samples, status = plan.status;
  const uint64_t asked = load_relaxed(&c.control->stop_request) | load_relaxed(&c.control->drain_request);
  bool steady = (h.in_flight != 0) & (h.running != 0) & (h.running <= 64 * STEADY_WORDS);
  steady &= (h.running == planned) & (samples == planned) & (status == uint32_t(StepStatus::OK));
  steady &= (h.state == uint32_t(EngineState::READY)) & (h.reserved_for < 0) & (h.quarantined == 0);
  return steady & (h.next_expiry == 0 || h.clock < h.next_expiry) & (asked == 0);
}

// Whether a ring has nobody waiting and no epoch to acknowledge.
BLINK_FN bool ring_is_steady(const Context& c, uint32_t ring) {
  const RingState& rs = c.rings[ring];
  return (c.ring(ring).gpu->epoch_ack == rs.epoch) & (rs.waiting == 0);
}

// `contains` of up to 8 ids.
BLINK_FN bool among(const int32_t (&ids)[8], uint32_t count, int32_t id) {
  bool found = false;
  for (uint32_t i = 0; i < 8; ++i) found |= (i < count) & (ids[i] == id);
  return found;
}

// Whether row `place` of the step that ended has a token after which its request goes on.
BLINK_FN bool row_is_steady(const Context& c, uint32_t place) {
  const PlanRow row = c.plan_rows[place];
  const StepResult result = c.results[place];
  const uint32_t running = c.running[place];
  const Request q = c.requests[row.request];
  const Sampling s = c.sampling[row.request];
  const Config& k = *c.config;
  const uint32_t emitted = q.emitted + 1;
  bool steady = (running == row.request) & (row.sample != 0);
  steady &= (q.state == uint32_t(RequestState::RUNNING)) & (q.generation == row.generation);
  steady &= (result.status == uint32_t(StepStatus::OK)) & (result.token >= 0) & (uint32_t(result.token) < k.vocab);
  steady &= (s.logprobs == 0) & ((s.flags & uint32_t(SlotFlag::MASKED)) == 0);
  steady &= (emitted < q.max_tokens) & (q.total + 1 < k.max_len);
  const bool eos = ((s.flags & uint32_t(SlotFlag::IGNORE_EOS)) == 0) & among(k.eos_ids, k.n_eos, result.token);
  const bool stops = eos | among(s.stop_ids, s.n_stop, result.token);
  return steady & ((emitted <= s.min_tokens) | !stops);
}

// Rank 0: the pages of the rows, in their order: full ones are published, then growing requests get theirs.
BLINK_FN void move_pages(const Context& c, const RowSet& publishing, const RowSet& growing) {
  for (const RowSet* set : {&publishing, &growing}) {
    for (uint32_t w = 0; w < STEADY_WORDS; ++w) {
      for (uint64_t left = set->words[w]; left != 0; left &= left - 1) {
        const uint32_t request = c.running[w * 64 + uint32_t(cuda::std::countr_zero(left))];
        if (set == &publishing) {
          publish_pages(c, request);
        } else {
          alloc_page(c, request);
        }
      }
    }
  }
}

// After begin_call. True if the boundary was steady: then it is over, and a step is to be launched.
template <class Group>
BLINK_FN bool steady_boundary(const Context& c, Group& g) {
  if (g.size() == 1) return false;
  g.sync();
  const Config& k = *c.config;
  const uint32_t rows = c.head->running, size = k.page_size;
  if (k.log_level >= uint32_t(LogLevel::ALL) || k.rings > STEADY_RINGS) return false;
  bool steady = g.rank() != 0 || engine_is_steady(c);
  // From the other end: rank 0 has enough to do.
  for (uint32_t r = g.size() - 1 - g.rank(); r < k.rings; r += g.size()) steady &= ring_is_steady(c, r);
  for (uint32_t place = g.rank(); place < rows; place += g.size()) steady &= row_is_steady(c, place);
  if (g.any(!steady)) return false;

  // Who needs a page, who fills one, and whose rows are which ring's.
  RowSet publishing{}, growing{}, of_ring[STEADY_RINGS]{};
  for (uint32_t w = 0; w * 64 < rows; ++w) {
    uint64_t fills = 0, grows = 0, ring_bits[STEADY_RINGS]{};
    for (uint32_t place = w * 64 + g.rank(); place < rows && place < w * 64 + 64; place += g.size()) {
      const PlanRow& row = c.plan_rows[place];
      const Request& q = c.requests[row.request];
      const uint64_t bit = uint64_t(1) << (place % 64);
      if ((q.published + 1) * size <= row.context_len && uses_prefix_cache(c, row.request)) fills |= bit;
      if (q.n_pages * size < row.context_len + 1) grows |= bit;
      ring_bits[row.ring] |= bit;
    }
    publishing.words[w] = g.sum(fills);
    growing.words[w] = g.sum(grows);
    for (uint32_t ring = 0; ring < k.rings; ++ring) of_ring[ring].words[w] = g.sum(ring_bits[ring]);
  }
  // Credits as P2 counts them after the commit, and pages without preemption or eviction. Agreed upon, because whoever is
  // first to know goes on to write.
  bool enough = growing.count(rows) <= c.head->free_pages;
  for (uint32_t ring = 0; ring < k.rings; ++ring) {
    const uint64_t events = unconsumed(c.rings[ring]) + 2 * of_ring[ring].count(rows);
    enough &= events + k.slots <= k.cq_entries;
  }
  if (g.any(!enough)) return false;
  const uint64_t step = c.head->step;

  for (uint32_t place = g.rank(); place < rows; place += g.size()) {
    const PlanRow& row = c.plan_rows[place];
    const StepResult& result = c.results[place];
    Request& q = c.requests[row.request];
    write_event(c, row.ring, c.rings[row.ring].cq_tail + of_ring[row.ring].count(place), row.slot, row.generation,
                EventKind::TOKEN, 0, q.emitted, result.token, result.logprob, step);
    c.tokens_of(row.request)[q.total] = result.token;
    q.computed = row.context_len;
    ++q.total;
    ++q.emitted;
  }
  g.sync();
  if (publishing.count(rows) + growing.count(rows) > 0) {
    if (g.rank() == 0) move_pages(c, publishing, growing);
    g.sync();
  }
  for (uint32_t place = g.rank(); place < rows; place += g.size()) fill_row(c, place, place, c.running[place], 1);
  if (g.rank() == 0) {
    for (uint32_t ring = 0; ring < k.rings; ++ring) {
      c.rings[ring].planned = of_ring[ring].count(rows);
      c.rings[ring].cq_tail += c.rings[ring].planned;
    }
    c.head->tokens += rows;
    ++c.head->committed;
    store_relaxed(&c.status->steps, c.head->committed);
    PlanHeader& plan = *c.plan;
    plan.step = c.head->step = step + 1;
    plan.n_rows = plan.n_tokens = plan.n_samples = rows;
    log_event(c, LogLevel::DECISIONS, LogKind::STEP, 0, 0, 0, rows, rows, rows);
    ++g.scratch.steady;
  }
  g.sync();
  return true;
}

}  // namespace blink
