// Request life cycle shared by ring and scheduler: waiting lists, running list, events, the terminal transition.
// All of it runs on rank 0 of the group.
#pragma once

#include "atomics.hpp"
#include "kv.hpp"

namespace blink {

// Puts event number `at` of a ring in its place; `step`: the one that made it.
BLINK_FN void write_event(const Context& c, uint32_t ring, uint64_t at, uint32_t slot, uint32_t generation,
                          EventKind kind, uint32_t reason, uint32_t index, int32_t token, float logprob,
                          uint64_t step) {
  alignas(16) Event e;  // made here and stored whole: on the GPU each store goes to host memory
  e.seq = at + 1;
  e.slot = uint16_t(slot);
  e.kind = uint8_t(kind);
  e.reason = uint8_t(reason);
  e.generation = generation;
  e.index = index;
  e.token = token;
  e.logprob = logprob;
  e.step = uint32_t(step);
  Event* place = &c.ring(ring).cq[at & (c.config->cq_entries - 1)];
#if defined(__CUDA_ARCH__)
  const uint4* halves = reinterpret_cast<const uint4*>(&e);
  reinterpret_cast<uint4*>(place)[0] = halves[0];
  reinterpret_cast<uint4*>(place)[1] = halves[1];
#else
  *place = e;
#endif
}

BLINK_FN void emit(const Context& c, uint32_t ring, uint32_t slot, uint32_t generation, EventKind kind, uint32_t reason,
                   uint32_t index, int32_t token, float logprob) {
  RingState& rs = c.rings[ring];
  write_event(c, ring, rs.cq_tail, slot, generation, kind, reason, index, token, logprob, c.head->step);
  ++rs.cq_tail;
}

// LOGPROBS events of one token, which they precede.
BLINK_FN uint32_t logprobs_events(uint32_t alternatives) {
  return (alternatives + LOGPROBS_PER_EVENT - 1) / LOGPROBS_PER_EVENT;
}

// `count` alternatives, best first, from where the model step put them.
BLINK_FN void emit_logprobs(const Context& c, uint32_t ring, uint32_t slot, uint32_t generation, uint32_t count,
                            const int32_t* tokens, const float* logprobs) {
  static_assert(sizeof(LogprobsEvent) == sizeof(Event));
  RingState& rs = c.rings[ring];
  for (uint32_t at = 0; at < count; at += LOGPROBS_PER_EVENT) {
    Event& place = c.ring(ring).cq[rs.cq_tail & (c.config->cq_entries - 1)];
    LogprobsEvent& e = reinterpret_cast<LogprobsEvent&>(place);
    e.seq = rs.cq_tail + 1;
    e.slot = uint16_t(slot);
    e.kind = uint8_t(EventKind::LOGPROBS);
    e.count = uint8_t(count - at < LOGPROBS_PER_EVENT ? count - at : LOGPROBS_PER_EVENT);
    e.generation = generation;
    for (uint32_t i = 0; i < LOGPROBS_PER_EVENT; ++i) {
      e.tokens[i] = i < e.count ? tokens[at + i] : -1;
      e.logprobs[i] = i < e.count ? logprobs[at + i] : 0.0f;
    }
    ++rs.cq_tail;
  }
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

// Events that one sampled token of `request` makes, its terminal event aside.
BLINK_FN uint32_t token_events(const Context& c, uint32_t request) {
  return 1 + logprobs_events(c.sampling[request].logprobs);
}

// True if a token of `request` fits beside `planned` events of others: the completion queue keeps room for one terminal
// event of every slot.
BLINK_FN bool credit_beside(const Context& c, uint32_t request, uint64_t planned) {
  const RingState& rs = c.rings[c.ring_of(request)];
  return unconsumed(rs) + planned + token_events(c, request) + c.config->slots <= c.config->cq_entries;
}

// True if a token of `request` can be planned.
BLINK_FN bool token_credit(const Context& c, uint32_t request) {
  return credit_beside(c, request, c.rings[c.ring_of(request)].planned);
}

BLINK_FN bool older(const Context& c, uint32_t a, uint32_t b) {
  return c.requests[a].arrival < c.requests[b].arrival;
}

// Order of service: by priority class, then by age.
BLINK_FN bool goes_before(const Context& c, uint32_t a, uint32_t b) {
  const uint32_t pa = c.requests[a].priority, pb = c.requests[b].priority;
  return pa != pb ? pa < pb : older(c, a, b);
}

// Inserts into its class by age. A fresh arrival is the youngest, so the common case appends.
BLINK_FN void wait_insert(const Context& c, uint32_t request) {
  RingState& rs = c.rings[c.ring_of(request)];
  Request& q = c.requests[request];
  int32_t &head = rs.wait_head[q.priority], &tail = rs.wait_tail[q.priority];
  q.state = uint32_t(RequestState::WAITING);
  ++rs.waiting;
  if (tail < 0) {
    q.next = -1;
    head = tail = int32_t(request);
  } else if (older(c, uint32_t(tail), request)) {
    q.next = -1;
    c.requests[tail].next = int32_t(request);
    tail = int32_t(request);
  } else {
    int32_t before = -1, at = head;
    while (at >= 0 && older(c, uint32_t(at), request)) {
      before = at;
      at = c.requests[at].next;
    }
    q.next = at;
    if (before < 0) {
      head = int32_t(request);
    } else {
      c.requests[before].next = int32_t(request);
    }
  }
}

// A waiting request gives up the reservation when it is admitted or over.
BLINK_FN void drop_reservation(const Context& c, uint32_t request) {
  if (c.head->reserved_for != int32_t(request)) return;
  c.head->reserved_for = -1;
  log_event(c, LogLevel::DECISIONS, LogKind::RESERVATION, c.ring_of(request), c.slot_of(request),
            c.requests[request].generation, 0, uint32_t(c.head->boundaries - c.head->reserved_since), 0);
}

BLINK_FN void wait_remove(const Context& c, uint32_t request) {
  RingState& rs = c.rings[c.ring_of(request)];
  const uint32_t priority = c.requests[request].priority;
  drop_reservation(c, request);
  int32_t before = -1;
  for (int32_t at = rs.wait_head[priority]; at >= 0; at = c.requests[at].next) {
    if (uint32_t(at) == request) {
      const int32_t next = c.requests[at].next;
      if (before < 0) {
        rs.wait_head[priority] = next;
      } else {
        c.requests[before].next = next;
      }
      if (rs.wait_tail[priority] == at) rs.wait_tail[priority] = before;
      c.requests[at].next = -1;
      --rs.waiting;
      return;
    }
    before = at;
  }
}

// Tokens a request has at its end, if no rule ends it earlier.
BLINK_FN uint32_t longest(const Context& c, uint32_t prompt_len, uint32_t max_tokens) {
  const uint64_t most = uint64_t(prompt_len) + max_tokens;
  return most < c.config->max_len ? uint32_t(most) : c.config->max_len;
}

// Pages a request may need at most: the last token's KV is never computed.
BLINK_FN uint32_t most_pages(const Context& c, uint32_t request) {
  const Request& q = c.requests[request];
  return pages_for(c, longest(c, q.prompt_len, q.max_tokens) - 1);
}

// Enters the running list, in order of service, with a block-table row. The caller has checked that a row is free.
BLINK_FN void run_insert(const Context& c, uint32_t request) {
  Request& q = c.requests[request];
  q.state = uint32_t(RequestState::RUNNING);
  q.paused = q.mask_index = 0;
  q.row = int32_t(c.row_stack[--c.head->free_rows]);
  c.head->committed_pages += most_pages(c, request);
  uint32_t at = c.head->running++;
  while (at > 0 && goes_before(c, request, c.running[at - 1])) {
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
  c.head->committed_pages -= most_pages(c, request);
  q.row = -1;
}

// Back to waiting with its age; what is not in the prefix cache is recomputed when it is admitted again.
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

// Preempts the last row in order of service that has been without credits or mask for long. False if there is none. Such
// a row is in no plan.
BLINK_FN bool preempt_paused(const Context& c) {
  for (uint32_t i = c.head->running; i-- > 0;) {
    if (c.requests[c.running[i]].paused >= c.config->paused_limit) {
      preempt(c, c.running[i]);
      return true;
    }
  }
  return false;
}

// Takes a live request off its list and gives back all it holds. Returns the pages released.
BLINK_FN uint32_t let_go(const Context& c, uint32_t request) {
  Request& q = c.requests[request];
  uint32_t released = 0;
  if (q.state == uint32_t(RequestState::RUNNING)) {
    released = release_pages(c, request);
    run_remove(c, request);
  } else {
    wait_remove(c, request);
  }
  q.state = uint32_t(RequestState::FREE);
  --c.rings[c.ring_of(request)].live;
  --c.head->live;
  return released;
}

// The one terminal transition: releases everything and writes the terminal event. `kind` is FINISH or ERROR.
BLINK_FN void terminate(const Context& c, uint32_t request, EventKind kind, uint32_t reason) {
  Request& q = c.requests[request];
  const uint32_t ring = c.ring_of(request), slot = c.slot_of(request);
  const uint32_t released = let_go(c, request);
  const bool finish = kind == EventKind::FINISH;
  log_event(c, LogLevel::DECISIONS, finish ? LogKind::FINISH : LogKind::ERROR, ring, slot, q.generation, reason,
            q.emitted, released);
  emit(c, ring, slot, q.generation, kind, reason, q.emitted, finish ? int32_t(q.cached) : -1, 0.0f);
}

// Ends every live request of a ring. Returns how many.
BLINK_FN uint32_t terminate_ring(const Context& c, uint32_t ring, ErrorReason reason) {
  uint32_t ended = 0;
  for (uint32_t slot = 0; slot < c.config->slots && c.rings[ring].live > 0; ++slot) {
    const uint32_t request = c.request_index(ring, slot);
    if (c.requests[request].state == uint32_t(RequestState::FREE)) continue;
    terminate(c, request, EventKind::ERROR, uint32_t(reason));
    ++ended;
  }
  return ended;
}

// Ends requests whose deadline has passed. The next deadline is remembered, so that most calls look at nothing.
BLINK_FN void expire(const Context& c) {
  if (c.head->next_expiry == 0 || c.head->clock < c.head->next_expiry) return;
  uint64_t next = 0;
  for (uint32_t request = 0; request < c.config->rings * c.config->slots; ++request) {
    const Request& q = c.requests[request];
    if (q.state == uint32_t(RequestState::FREE) || q.expires == 0) continue;
    if (q.expires <= c.head->clock) {
      terminate(c, request, EventKind::ERROR, uint32_t(ErrorReason::DEADLINE));
    } else if (next == 0 || q.expires < next) {
      next = q.expires;
    }
  }
  c.head->next_expiry = next;
}

}  // namespace blink
