// The step boundary: commit the step that ended, then plan the next one (design section 4).
#pragma once

#include "steady.hpp"

namespace blink {

BLINK_FN void set_state(const Context& c, EngineState state) {
  c.head->state = uint32_t(state);
  log_event(c, LogLevel::DECISIONS, LogKind::STATE, 0, 0, 0, uint32_t(state), 0, 0);
  store_release(&c.status->state, uint64_t(state));
  for (uint32_t ring = 0; ring < c.config->rings; ++ring) store_release(&c.ring(ring).gpu->state, uint64_t(state));
}

// First call, on engine memory that is zero but for the adopted configuration.
BLINK_FN void init_state(const Context& c) {
  const Config& k = *c.config;
  for (uint32_t page = 0; page < k.pages; ++page) {
    Page& p = c.pages[page];
    p.owner = p.bucket_next = p.lru_prev = p.lru_next = -1;
    c.buckets[page] = -1;
    p.state = uint32_t(page < RESERVED_PAGES ? PageState::RESERVED : PageState::FREE);
  }
  for (uint32_t page = k.pages; page-- > RESERVED_PAGES;) c.free_list[c.head->free_pages++] = page;
  for (uint32_t row = k.max_rows; row-- > 0;) c.row_stack[c.head->free_rows++] = row;
  for (uint32_t i = 0; i < k.rings * k.slots; ++i) c.requests[i].next = c.requests[i].row = -1;
  for (uint32_t ring = 0; ring < k.rings; ++ring) {
    for (uint32_t p = 0; p < PRIORITIES; ++p) c.rings[ring].wait_head[p] = c.rings[ring].wait_tail[p] = -1;
  }
  for (uint32_t p = 0; p < PRIORITIES; ++p) c.head->next_ring[p] = k.rings - 1;  // ring 0 has the first turn
  c.head->reserved_for = c.head->lru_head = c.head->lru_tail = -1;
  set_state(c, EngineState::READY);
}

// Follows what the host process asks for. True if this boundary is the one that stops.
BLINK_FN bool follow_control(const Context& c) {
  const auto state = EngineState(c.head->state);
  if (load_acquire(&c.control->stop_request) != 0) {
    if (state == EngineState::STOPPED) return false;
    log_event(c, LogLevel::DECISIONS, LogKind::CONTROL, 0, 0, 0, 2, 0, 0);
    for (uint32_t ring = 0; ring < c.config->rings; ++ring) terminate_ring(c, ring, ErrorReason::DRAINING);
    c.head->state = uint32_t(EngineState::STOPPED);
    return true;
  }
  if (load_acquire(&c.control->drain_request) != 0 && state == EngineState::READY) {
    log_event(c, LogLevel::DECISIONS, LogKind::CONTROL, 0, 0, 0, 1, 0, 0);
    set_state(c, EngineState::DRAINING);
  }
  if (EngineState(c.head->state) == EngineState::DRAINING && c.head->live == 0) set_state(c, EngineState::DRAINED);
  return false;
}

// Writes the plan of the next step. True if there is anything to launch.
BLINK_FN bool make_plan(const Context& c) {
  PlanHeader& plan = *c.plan;
  plan.n_rows = plan.n_tokens = plan.n_samples = 0;
  plan.status = uint32_t(StepStatus::OK);
  if (c.head->live > 0) {
    plan.step = c.head->step + 1;
    enforce_reservation(c);
    plan_waiting(c, plan_running(c, c.config->token_budget));
  }
  if (plan.n_rows == 0) return false;
  c.head->step = plan.step;
  c.head->in_flight = 1;
  log_event(c, LogLevel::DECISIONS, LogKind::STEP, 0, 0, 0, plan.n_rows, plan.n_tokens, plan.n_samples);
  return true;
}

// Between steps: commit, follow drain and stop, plan. `now`: microseconds. Returns true if a step is to be launched. Then
// `finish_boundary` is due, before anything else but the launch.
template <class Group>
BLINK_FN bool begin_boundary(const Context& c, Group& g, uint64_t now) {
  g.sync();
  bool launch = false, stopping = false;
  if (g.rank() == 0) begin_call(c, true, now);
  if (steady_boundary(c, g)) return true;
  if (g.rank() == 0) {
    commit(c);
    expire(c);
    stopping = follow_control(c);
  }
  if (g.any(stopping)) {
    look_at_rings(c, g);  // refuses what was published before, as far as the ring's own credits reach
    if (g.rank() == 0) set_state(c, EngineState::STOPPED);
  }
  if (g.rank() == 0) launch = make_plan(c);
  return g.any(launch);
}

// A whole boundary.
template <class Group>
BLINK_FN bool step_boundary(const Context& c, Group& g, uint64_t now) {
  const bool launch = begin_boundary(c, g, now);
  finish_boundary(c, g);
  return launch;
}

}  // namespace blink
