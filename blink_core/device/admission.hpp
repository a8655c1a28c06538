// Admission of waiting requests (design section 4). Rank 0.
//
// Classes are strict: a more urgent request goes first, whatever its ring. Within a class the rings take turns by deficit
// round robin (Shreedhar and Varghese, SIGCOMM 1995), counted in tokens: a turn brings a ring `quantum` tokens, and a
// request costs prompt and max_tokens, once, however often it is preempted. Within ring and class it is first come, first
// served.
//
// A request whose turn it is and that does not fit holds the reservation: nobody of its class or below is admitted
// meanwhile, so that what becomes free is for it. After Config.reservation_steps boundaries running requests that come
// after it in order of service give way to it; if those hold too little, it gives the reservation up until its ring's
// turn comes again. So it waits, at most, for the requests that came before it.
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
  if (c.head->free_rows + after == 0 || pages < pages_for(c, c.requests[request].total)) return false;
  if (reserve && committed + most_pages(c, request) > c.config->pages - RESERVED_PAGES) return false;
  for (; after > 0 && !fits(c, request); --after) preempt(c, c.running[c.head->running - 1]);
  return fits(c, request);
}

// Tokens a first admission is charged with.
BLINK_FN int64_t admission_cost(const Context& c, uint32_t request) {
  const Request& q = c.requests[request];
  return q.admitted != 0 ? 0 : int64_t(longest(c, q.prompt_len, q.max_tokens));
}

BLINK_FN bool may_take_turn(const Context& c, uint32_t ring, uint32_t priority) {
  const int32_t head = c.rings[ring].wait_head[priority];
  return head >= 0 && token_credit(c, uint32_t(head));  // without credits it would hold pages and could not speak
}

// Passes the turn to the next ring, which gets its quantum if it has somebody to admit.
BLINK_FN void next_turn(const Context& c, uint32_t priority) {
  c.head->next_ring = c.head->next_ring + 1 == c.config->rings ? 0 : c.head->next_ring + 1;
  RingState& rs = c.rings[c.head->next_ring];
  if (rs.waiting == 0) rs.deficit = 0;
  if (may_take_turn(c, c.head->next_ring, priority)) rs.deficit += c.config->quantum;
}

// The request of class `priority` whose turn it is, or -1.
BLINK_FN int32_t choose_head(const Context& c, uint32_t priority) {
  bool anyone = false;
  for (uint32_t ring = 0; ring < c.config->rings; ++ring) anyone |= may_take_turn(c, ring, priority);
  if (!anyone) return -1;
  while (true) {  // every round brings each ring a quantum: it ends
    const uint32_t ring = c.head->next_ring;
    if (may_take_turn(c, ring, priority)) {
      const int32_t head = c.rings[ring].wait_head[priority];
      if (c.rings[ring].deficit >= admission_cost(c, uint32_t(head))) return head;
    }
    next_turn(c, priority);
  }
}

// Moves a waiting request that fits to the running ones and plans its first tokens. Returns how many.
BLINK_FN uint32_t admit(const Context& c, uint32_t request, uint32_t budget) {
  Request& q = c.requests[request];
  RingState& rs = c.rings[c.ring_of(request)];
  rs.deficit -= admission_cost(c, request);
  wait_remove(c, request);
  run_insert(c, request);
  ++c.head->admissions;
  attach_prefix(c, request);
  if (q.admitted++ == 0) q.cached = q.computed;
  log_event(c, LogLevel::DECISIONS, LogKind::ADMIT, c.ring_of(request), c.slot_of(request), q.generation,
            uint32_t(q.row), q.total, q.preemptions);
  const uint32_t n = tokens_now(c, request, budget);
  if (n == 0) return 0;
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
BLINK_FN int32_t next_head(const Context& c, uint32_t priority) {
  const int32_t holder = c.head->reserved_for;
  if (holder >= 0) {
    const RingState& rs = c.rings[c.ring_of(uint32_t(holder))];
    if (rs.wait_head[priority] == holder && token_credit(c, uint32_t(holder))) return holder;
  }
  return choose_head(c, priority);
}

// Admits while rows, pages and budget last.
BLINK_FN void plan_waiting(const Context& c, uint32_t budget) {
  for (uint32_t priority = 0; priority < PRIORITIES; ++priority) {
    while (budget > 0) {
      const int32_t head = next_head(c, priority);
      if (head < 0) break;
      const uint32_t request = uint32_t(head);
      if (make_room(c, request)) {
        budget -= admit(c, request, budget);
        continue;
      }
      hold_reservation(c, request);
      if (!reservation_is_due(c)) return;
      drop_reservation(c, request);  // whoever comes next and does not fit begins a new one
      c.head->next_ring = c.ring_of(request);
      next_turn(c, priority);
    }
  }
}

}  // namespace blink
