// Request life cycle shared by ring and scheduler: waiting lists, running list, events, the terminal transition.
// All of it runs on rank 0 of the group.
#pragma once

#include "atomics.hpp"
#include "kv.hpp"

namespace blink {

BLINK_FN void emit(const Context& c, uint32_t ring, uint32_t slot, uint32_t generation, EventKind kind, uint32_t reason,
                   uint32_t index, int32_t token, float logprob) {
  RingState& rs = c.rings[ring];
  Event& e = c.ring(ring).cq[rs.cq_tail & (c.config->cq_entries - 1)];
  e.seq = rs.cq_tail + 1;
  e.slot = uint16_t(slot);
  e.kind = uint8_t(kind);
  e.reason = uint8_t(reason);
  e.generation = generation;
  e.index = index;
  e.token = token;
  e.logprob = logprob;
  e.step = uint32_t(c.head->step);
  ++rs.cq_tail;
}

// Tells front ends of the events written since the last call.
BLINK_FN void publish_events(const Context& c) {
  for (uint32_t ring = 0; ring < c.config->rings; ++ring) {
    RingState& rs = c.rings[ring];
    if (rs.cq_published == rs.cq_tail) continue;
    store_release(&c.ring(ring).gpu->cq_tail, rs.cq_tail);
    rs.cq_published = rs.cq_tail;
  }
}

BLINK_FN uint64_t unconsumed(const RingState& rs) { return rs.cq_tail - rs.cq_head; }

// True if one more terminal event fits beside those that live requests own and the tokens of the step in flight. Always
// so for a front end that reuses a slot only after it has returned the credit of the slot's terminal event. One that does
// not holds up its own ring, the cancels behind that entry included, until it returns credits.
BLINK_FN bool terminal_credit(const Context& c, const RingState& rs) {
  return unconsumed(rs) + rs.planned + rs.live + 1 <= c.config->cq_entries;
}

// True if a token event can be planned: the completion queue keeps room for one terminal event of every slot.
BLINK_FN bool token_credit(const Context& c, const RingState& rs) {
  return unconsumed(rs) + rs.planned + 1 + c.config->slots <= c.config->cq_entries;
}

BLINK_FN bool older(const Context& c, uint32_t a, uint32_t b) {
  return c.requests[a].arrival < c.requests[b].arrival;
}

// Inserts by age. A fresh arrival is the youngest, so the common case appends.
BLINK_FN void wait_insert(const Context& c, uint32_t request) {
  RingState& rs = c.rings[c.ring_of(request)];
  Request& q = c.requests[request];
  q.state = uint32_t(RequestState::WAITING);
  ++rs.waiting;
  const bool front = BLINK_MUTANT(ADMIT_YOUNGEST_FIRST);
  if (rs.wait_tail < 0) {
    q.next = -1;
    rs.wait_head = rs.wait_tail = int32_t(request);
  } else if (!front && older(c, uint32_t(rs.wait_tail), request)) {
    q.next = -1;
    c.requests[rs.wait_tail].next = int32_t(request);
    rs.wait_tail = int32_t(request);
  } else {
    int32_t before = -1, at = rs.wait_head;
    while (!front && at >= 0 && older(c, uint32_t(at), request)) {
      before = at;
      at = c.requests[at].next;
    }
    q.next = at;
    if (before < 0) {
      rs.wait_head = int32_t(request);
    } else {
      c.requests[before].next = int32_t(request);
    }
  }
}

BLINK_FN void wait_remove(const Context& c, uint32_t request) {
  RingState& rs = c.rings[c.ring_of(request)];
  int32_t before = -1;
  for (int32_t at = rs.wait_head; at >= 0; at = c.requests[at].next) {
    if (uint32_t(at) == request) {
      const int32_t next = c.requests[at].next;
      if (before < 0) {
        rs.wait_head = next;
      } else {
        c.requests[before].next = next;
      }
      if (rs.wait_tail == at) rs.wait_tail = before;
      c.requests[at].next = -1;
      --rs.waiting;
      return;
    }
    before = at;
  }
}

// Enters the running list, oldest first, with a block-table row. The caller has checked that a row is free.
BLINK_FN void run_insert(const Context& c, uint32_t request) {
  Request& q = c.requests[request];
  q.state = uint32_t(RequestState::RUNNING);
  q.paused = 0;
  q.row = int32_t(c.row_stack[--c.head->free_rows]);
  uint32_t at = c.head->running++;
  while (at > 0 && older(c, request, c.running[at - 1])) {
    c.running[at] = c.running[at - 1];
    --at;
  }
  c.running[at] = request;
}

BLINK_FN void run_remove(const Context& c, uint32_t request) {
  Request& q = c.requests[request];
  uint32_t at = 0;
  while (c.running[at] != request) ++at;
  --c.head->running;
  for (; at < c.head->running; ++at) c.running[at] = c.running[at + 1];
  c.row_stack[c.head->free_rows++] = uint32_t(q.row);
  q.row = -1;
}

// Back to waiting with its age; KV is recomputed from prompt and output when it is admitted again.
BLINK_FN void preempt(const Context& c, uint32_t request) {
  Request& q = c.requests[request];
  const uint32_t computed = q.computed, row = uint32_t(q.row);
  const uint32_t released = release_pages(c, request);
  run_remove(c, request);
  ++q.preemptions;
  ++c.head->preemptions;
  log_event(c, LogLevel::DECISIONS, LogKind::PREEMPT, c.ring_of(request), c.slot_of(request), q.generation, row,
            computed, released);
  wait_insert(c, request);
}

// Preempts the youngest row that has been without credits for long. False if there is none. Such a row is in no plan.
BLINK_FN bool preempt_paused(const Context& c) {
  for (uint32_t i = c.head->running; i-- > 0;) {
    if (c.requests[c.running[i]].paused >= c.config->paused_limit) {
      preempt(c, c.running[i]);
      return true;
    }
  }
  return false;
}

// The one terminal transition: releases everything and writes the terminal event. `kind` is FINISH or ERROR.
BLINK_FN void terminate(const Context& c, uint32_t request, EventKind kind, uint32_t reason) {
  Request& q = c.requests[request];
  const uint32_t ring = c.ring_of(request), slot = c.slot_of(request);
  uint32_t released = 0;
  if (q.state == uint32_t(RequestState::RUNNING)) {
    if (BLINK_MUTANT(LEAK_PAGE_ON_CANCEL) && reason == uint32_t(FinishReason::CANCELLED) && q.n_pages > 0) --q.n_pages;
    released = release_pages(c, request);
    run_remove(c, request);
  } else {
    wait_remove(c, request);
  }
  q.state = uint32_t(RequestState::FREE);
  --c.rings[ring].live;
  --c.head->live;
  log_event(c, LogLevel::DECISIONS, kind == EventKind::FINISH ? LogKind::FINISH : LogKind::ERROR, ring, slot,
            q.generation, reason, q.emitted, released);
  emit(c, ring, slot, q.generation, kind, reason, q.emitted, -1, 0.0f);
}

}  // namespace blink
