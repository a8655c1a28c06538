// Admission of waiting requests (design section 4). Rank 0.
//
// Classes are strict: a more urgent request goes first, whatever its ring. Within a class the rings take turns by deficit
// round robin (Shreedhar and Varghese, SIGCOMM 1995), counted in tokens: a turn brings a ring `quantum` tokens, and a
// request costs prompt and max_tokens, once, however often it is preempted. Within ring and class it is first come, first
// served.
//
// A request whose turn it is and that does not fit holds the reservation: nobody of its class or below is admitted
// meanwhile, so that what becomes free is for it. After Config.reservation_steps boundaries running requests that come
// after it in order of service give way to it; if those hold too little, it gives the reservation up for one boundary, at
// which others are admitted. So it waits, at most, for the requests that came before it.
#pragma once

#include "plan.hpp"

namespace blink {

// A row and pages for a waiting request, without taking any from a running one.
BLINK_FN bool fits(const Context& c, uint32_t request) {
  if (c.head->free_rows == 0) return false;
  if (c.config->admission == uint32_t(Admission::RESERVE) &&
      c.head->committed_pages + most_pages(c, request) > c.config->pages - RESERVED_PAGES) {
    return false;
  }
  const uint32_t needed = pages_for(c, c.requests[request].total);
  if (needed <= c.head->free_pages) return true;
  const PrefixHit hit = find_prefix(c, request);
  return needed - hit.pages + hit.idle <= available_pages(c);  // pages found idle are no longer there to evict
}

// Rows paused for long give way for a waiting request.
BLINK_FN bool make_room(const Context& c, uint32_t request) {
  while (!fits(c, request)) {
    if (!preempt_paused(c)) return false;
  }
  return true;
}

// Running requests after `request` in order of service give way, last first, if all of them together could make room.
BLINK_FN bool force_room(const Context& c, uint32_t request) {
  uint32_t after = 0, pages = available_pages(c), committed = c.head->committed_pages;
  while (after < c.head->running && goes_before(c, request, c.running[c.head->running - 1 - after])) {
    const uint32_t victim = c.running[c.head->running - 1 - after++];
    pages += c.requests[victim].n_pages;
    committed -= most_pages(c, victim);
  }
  const bool reserve = c.config->admission == uint32_t(Admission::RESERVE);
  const PrefixHit hit = find_prefix(c, request);
  const uint32_t needed = pages_for(c, c.requests[request].total) - hit.pages + hit.idle;
  if (c.head->free_rows + after == 0 || pages < needed) return false;
  if (reserve && committed + most_pages(c, request) > c.config->pages - RESERVED_PAGES) return false;
  for (; after > 0 && !fits(c, request); --after) preempt(c, c.running[c.head->running - 1]);
  return fits(c, request);
}

// Tokens a first admission is charged with.
BLINK_FN int64_t admission_cost(const Context& c, uint32_t request) {
  const Request& q = c.requests[request];
  return q.admitted != 0 ? 0 : int64_t(longest(c, q.prompt_len, q.max_tokens));
}

// Rings whose head was found not to fit at this boundary, while others may go.
struct RingSet {
  uint64_t bits[4];  // at most 256 rings
  BLINK_FN bool has(uint32_t ring) const { return (bits[ring / 64] >> (ring % 64) & 1) != 0; }
  BLINK_FN void add(uint32_t ring) { bits[ring / 64] |= uint64_t(1) << (ring % 64); }
};

BLINK_FN bool may_take_turn(const Context& c, uint32_t ring, uint32_t priority, const RingSet& passed) {
  const int32_t head = first_awake(c, ring, priority);
  if (head < 0 || passed.has(ring)) return false;
  return token_credit(c, uint32_t(head));  // without credits it would hold pages and could not speak
}

// True if the ring has a head in this class and the deficit for it.
BLINK_FN bool can_afford(const Context& c, uint32_t ring, uint32_t priority, const RingSet& passed) {
  if (!may_take_turn(c, ring, priority, passed)) return false;
  return c.rings[ring].deficit[priority] >= admission_cost(c, uint32_t(first_awake(c, ring, priority)));
}

// Passes the turn in a class to the next ring, which gets its quantum if it has somebody to admit. Whoever has nobody
// keeps no credit, and whoever could not use what it has gets no more: so no deficit outgrows quantum and largest cost.
BLINK_FN void next_turn(const Context& c, uint32_t priority, const RingSet& passed) {
  uint32_t& ring = c.head->next_ring[priority];
  if (c.rings[ring].wait_head[priority] < 0) c.rings[ring].deficit[priority] = 0;
  ring = ring + 1 == c.config->rings ? 0 : ring + 1;
  RingState& rs = c.rings[ring];
  if (rs.wait_head[priority] < 0) rs.deficit[priority] = 0;
  if (may_take_turn(c, ring, priority, passed) && !can_afford(c, ring, priority, passed)) {
    rs.deficit[priority] += c.config->quantum;
  }
}

// Gives every ring with somebody to admit, none of whom can be afforded, as many quanta as leave the first of them one
// short: the rounds of turns in which nothing would happen.
BLINK_FN void skip_idle_rounds(const Context& c, uint32_t priority, const RingSet& passed) {
  int64_t rounds = -1;
  for (uint32_t ring = 0; ring < c.config->rings; ++ring) {
    if (!may_take_turn(c, ring, priority, passed)) continue;
    const RingState& rs = c.rings[ring];
    const int64_t short_of = admission_cost(c, uint32_t(first_awake(c, ring, priority))) - rs.deficit[priority];
    const int64_t needed = (short_of - 1) / c.config->quantum;
    if (rounds < 0 || needed < rounds) rounds = needed;
  }
  if (rounds <= 0) return;
  for (uint32_t ring = 0; ring < c.config->rings; ++ring) {
    if (may_take_turn(c, ring, priority, passed)) c.rings[ring].deficit[priority] += rounds * c.config->quantum;
    if (c.rings[ring].wait_head[priority] < 0) c.rings[ring].deficit[priority] = 0;
  }
}

// The request of class `priority` whose turn it is, or -1.
BLINK_FN int32_t choose_head(const Context& c, uint32_t priority, const RingSet& passed) {
  bool anyone = false, affordable = false;
  for (uint32_t ring = 0; ring < c.config->rings; ++ring) {
    anyone |= may_take_turn(c, ring, priority, passed);
    affordable |= can_afford(c, ring, priority, passed);
  }
  if (!anyone) return -1;
  if (!affordable) skip_idle_rounds(c, priority, passed);
  const uint32_t& turn = c.head->next_ring[priority];
  while (!can_afford(c, turn, priority, passed)) next_turn(c, priority, passed);  // at most one round
  return first_awake(c, turn, priority);
}

// Moves a waiting request that fits to the running ones and plans its first tokens. Returns how many.
BLINK_FN uint32_t admit(const Context& c, uint32_t request, uint32_t budget) {
  Request& q = c.requests[request];
  RingState& rs = c.rings[c.ring_of(request)];
  rs.deficit[q.priority] -= admission_cost(c, request);
  wait_remove(c, request);
  run_insert(c, request);
  ++c.head->admissions;
  attach_prefix(c, request);
  if (q.admitted++ == 0) q.cached = q.computed;
  log_event(c, LogLevel::DECISIONS, LogKind::ADMIT, c.ring_of(request), c.slot_of(request), q.generation,
            uint32_t(q.row), q.total, q.preemptions);
  const uint32_t n = tokens_now(c, request, budget);
  if (n == 0) {
    q.paused = 0;  // the boundary of its admission does not count: it could give way and come back for ever
    return 0;
  }
  reserve_pages(c, request, q.computed + n);  // finds them: `fits` counted them
  plan_row(c, request, n);
  return n;
}

BLINK_FN void log_reservation(const Context& c, uint32_t request, uint32_t what) {
  log_event(c, LogLevel::DECISIONS, LogKind::RESERVATION, c.ring_of(request), c.slot_of(request),
            c.requests[request].generation, what, uint32_t(c.head->boundaries - c.head->reserved_since), 0);
}

BLINK_FN bool reservation_is_due(const Context& c) {
  return c.head->reserved_for >= 0 && c.head->boundaries - c.head->reserved_since >= c.config->reservation_steps;
}

// Before rows are planned, because a planned one can no longer give way: enforces a reservation that is due.
BLINK_FN void enforce_reservation(const Context& c) {
  if (!reservation_is_due(c)) return;
  const uint32_t request = uint32_t(c.head->reserved_for);
  if (!token_credit(c, request)) {  // it could not run: nobody gives way to it
    drop_reservation(c, request);
    return;
  }
  if (!fits(c, request) && force_room(c, request)) log_reservation(c, request, 2);
}

// `request` does not fit: it takes the reservation or keeps it.
BLINK_FN void hold_reservation(const Context& c, uint32_t request) {
  if (c.head->reserved_for == int32_t(request)) return;
  if (c.head->reserved_for >= 0) drop_reservation(c, uint32_t(c.head->reserved_for));
  c.head->reserved_for = int32_t(request);
  c.head->reserved_since = c.head->boundaries;
  log_reservation(c, request, 1);
}

// The holder of the reservation, if it is of this class and its turn has not been overtaken; else whose turn it is; or -1.
BLINK_FN int32_t next_head(const Context& c, uint32_t priority, const RingSet& passed) {
  const int32_t holder = c.head->reserved_for;
  if (holder >= 0) {
    const uint32_t ring = c.ring_of(uint32_t(holder));
    if (first_awake(c, ring, priority) == holder && may_take_turn(c, ring, priority, passed)) return holder;
  }
  return choose_head(c, priority, passed);
}

// Admits while rows, pages and budget last. At a boundary that ends a reservation whoever fits goes, and nobody begins a
// new one; where nobody was admitted, the turn stays with whom it was.
BLINK_FN void plan_waiting(const Context& c, uint32_t budget) {
  bool open = false;
  for (uint32_t priority = 0; priority < PRIORITIES; ++priority) {
    RingSet passed{};
    int32_t turn = -1;
    while (budget > 0) {
      const int32_t head = next_head(c, priority, passed);
      if (head < 0) break;
      const uint32_t request = uint32_t(head), ring = c.ring_of(request);
      if (make_room(c, request)) {
        budget -= admit(c, request, budget);
        turn = -1;
        continue;
      }
      if (!open) {
        hold_reservation(c, request);
        if (!reservation_is_due(c)) return;
        drop_reservation(c, request);
        open = true;
        turn = int32_t(ring);
      }
      passed.add(ring);
    }
    if (turn >= 0) c.head->next_ring[priority] = uint32_t(turn);
  }
}

}  // namespace blink
