// The step boundary: commit the step that ended, then plan the next one (design section 4).
// One rule: a request has `computed` and `total` tokens; a step hands out a token budget, decodes first, oldest first.
#pragma once

#include "ring.hpp"

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
    c.pages[page].owner = -1;
    c.pages[page].state = uint32_t(page < RESERVED_PAGES ? PageState::RESERVED : PageState::FREE);
  }
  for (uint32_t page = k.pages; page-- > RESERVED_PAGES;) c.free_list[c.head->free_pages++] = page;
  for (uint32_t row = k.max_rows; row-- > 0;) c.row_stack[c.head->free_rows++] = row;
  for (uint32_t i = 0; i < k.rings * k.slots; ++i) c.requests[i].next = c.requests[i].row = -1;
  for (uint32_t ring = 0; ring < k.rings; ++ring) c.rings[ring].wait_head = c.rings[ring].wait_tail = -1;
  set_state(c, EngineState::READY);
}

BLINK_FN bool contains(const int32_t* ids, uint32_t count, int32_t id) {
  for (uint32_t i = 0; i < count; ++i) {
    if (ids[i] == id) return true;
  }
  return false;
}

// Appends a sampled token; ends the request if a rule says so.
BLINK_FN void commit_token(const Context& c, uint32_t request, int32_t token, float logprob) {
  Request& q = c.requests[request];
  const Config& k = *c.config;
  const uint32_t ring = c.ring_of(request), slot = c.slot_of(request);
  c.tokens_of(request)[q.total++] = token;
  emit(c, ring, slot, q.generation, EventKind::TOKEN, 0, q.emitted, token, logprob);
  log_event(c, LogLevel::ALL, LogKind::TOKEN, ring, slot, q.generation, q.emitted, uint32_t(token), 0);
  if (BLINK_MUTANT(TOKEN_TWICE) && c.head->tokens % 13 == 12 && q.emitted + 1 < q.max_tokens) {
    emit(c, ring, slot, q.generation, EventKind::TOKEN, 0, q.emitted, token, logprob);
  }
  ++q.emitted;
  ++c.head->tokens;
  const bool ignore_eos = (q.flags & uint32_t(SlotFlag::IGNORE_EOS)) != 0;
  if (!ignore_eos && contains(k.eos_ids, k.n_eos, token)) {
    terminate(c, request, EventKind::FINISH, uint32_t(FinishReason::EOS));
  } else if (contains(q.stop_ids, q.n_stop, token)) {
    terminate(c, request, EventKind::FINISH, uint32_t(FinishReason::STOP_TOKEN));
  } else if (q.emitted >= q.max_tokens) {
    terminate(c, request, EventKind::FINISH, uint32_t(FinishReason::LENGTH));
  } else if (q.total >= k.max_len) {
    terminate(c, request, EventKind::FINISH, uint32_t(FinishReason::CONTEXT));
  }
}

// Takes in the results of the step in flight.
BLINK_FN void commit(const Context& c) {
  if (c.head->in_flight == 0) return;
  c.head->in_flight = 0;
  for (uint32_t ring = 0; ring < c.config->rings; ++ring) c.rings[ring].planned = 0;
  drain_quarantine(c);
  const bool failed = c.plan->status != uint32_t(StepStatus::OK);
  for (uint32_t i = 0; i < c.plan->n_rows; ++i) {
    const PlanRow& row = c.plan_rows[i];
    Request& q = c.requests[row.request];
    // A request cancelled while the step ran is gone, and its slot may already have another owner.
    if (q.state != uint32_t(RequestState::RUNNING) || q.generation != row.generation) continue;
    const StepResult& result = c.results[i];
    if (failed) {
      terminate(c, row.request, EventKind::ERROR, uint32_t(ErrorReason::MODEL_ERROR));
      continue;
    }
    q.computed = row.context_len;
    if (row.sample == 0) continue;
    if (result.status != uint32_t(StepStatus::OK) || result.token < 0 || uint32_t(result.token) >= c.config->vocab) {
      const bool nan = result.status == uint32_t(StepStatus::NAN_LOGITS);
      terminate(c, row.request, EventKind::ERROR, uint32_t(nan ? ErrorReason::NAN_LOGITS : ErrorReason::MODEL_ERROR));
      continue;
    }
    commit_token(c, row.request, result.token, result.logprob);
  }
  ++c.head->committed;
  if (failed) store_release(&c.status->failures, c.status->failures + 1);
  store_release(&c.status->steps, c.head->committed);
}

// Pages so that `tokens` tokens fit. For them rows give way that were paused for long, and then the youngest: never one
// that is planned already, because rows are planned oldest first. False if `request` itself was the youngest.
BLINK_FN bool reserve_pages(const Context& c, uint32_t request, uint32_t tokens) {
  while (c.requests[request].n_pages < pages_for(c, tokens)) {
    if (alloc_page(c, request) || preempt_paused(c)) continue;
    const uint32_t youngest = c.running[c.head->running - 1];
    preempt(c, youngest);
    if (youngest == request) return false;
  }
  return true;
}

// A row and pages for all known tokens of a waiting request. Only rows paused for long give way for it.
BLINK_FN bool make_room(const Context& c, uint32_t request) {
  while (c.head->free_rows == 0 || pages_for(c, c.requests[request].total) > c.head->free_pages) {
    if (!preempt_paused(c)) return false;
  }
  return true;
}

BLINK_FN void plan_row(const Context& c, uint32_t request, uint32_t n) {
  Request& q = c.requests[request];
  const Config& k = *c.config;
  PlanHeader& plan = *c.plan;
  PlanRow& row = c.plan_rows[plan.n_rows];
  row.seed = q.seed;
  row.request = request;
  row.generation = q.generation;
  row.q_start = plan.n_tokens;
  row.q_len = n;
  row.context_len = q.computed + n;
  row.sample = q.computed + n == q.total ? 1 : 0;
  row.temperature = q.temperature;
  row.top_p = q.top_p;
  row.choice = q.choice;
  row.ring = c.ring_of(request);
  row.slot = c.slot_of(request);
  row.n_pages = q.n_pages;
  row.row = uint32_t(q.row);
  const int32_t* tokens = c.tokens_of(request);
  const uint32_t* table = c.table_of(uint32_t(q.row));
  for (uint32_t i = 0; i < n; ++i) {
    const uint32_t position = q.computed + i;
    c.plan_token_ids[plan.n_tokens + i] = tokens[position];
    c.plan_positions[plan.n_tokens + i] = int32_t(position);
    c.plan_kv_slots[plan.n_tokens + i] = int64_t(table[position / k.page_size]) * k.page_size + position % k.page_size;
  }
  if (row.sample != 0) {
    c.results[plan.n_rows].status = uint32_t(StepStatus::FAILED);  // until the model step says otherwise
    ++c.rings[row.ring].planned;
    ++plan.n_samples;
  }
  ++plan.n_rows;
  plan.n_tokens += n;
  log_event(c, LogLevel::ALL, LogKind::PLAN_ROW, row.ring, row.slot, row.generation, n, row.context_len, row.row);
}

// Requests from place `from` of the running list that need one token only.
BLINK_FN uint32_t count_decodes(const Context& c, uint32_t from) {
  uint32_t decodes = 0;
  for (uint32_t i = from; i < c.head->running; ++i) {
    const Request& q = c.requests[c.running[i]];
    decodes += q.total - q.computed == 1 ? 1 : 0;
  }
  return decodes;
}

// Plans running requests, oldest first. Every decode keeps one token of the budget, so no prefill can starve it.
BLINK_FN uint32_t plan_running(const Context& c, uint32_t budget) {
  uint32_t decodes = count_decodes(c, 0);
  for (uint32_t i = 0; i < c.head->running;) {
    const uint32_t request = c.running[i];
    Request& q = c.requests[request];
    const uint32_t remaining = q.total - q.computed;
    const bool decode = remaining == 1;
    if (decode) --decodes;
    uint32_t n = decode ? 1 : (remaining < budget - decodes ? remaining : budget - decodes);
    const RingState& rs = c.rings[c.ring_of(request)];
    if (n == remaining && !token_credit(c, rs)) {
      --n;  // a prefill may still go up to its last token
      if (n == 0) {
        ++q.paused;
        ++i;
        continue;
      }
    }
    if (n == 0) {
      ++i;
      continue;
    }
    q.paused = 0;
    const uint32_t before = c.head->running;
    // Only the youngest is ever preempted for itself, so nothing follows it.
    if (!reserve_pages(c, request, q.computed + n)) break;
    if (c.head->running != before) {
      // A long-paused elder may have gone, which shifts the list; decodes counted ahead may have gone too.
      i = 0;
      while (c.running[i] != request) ++i;
      decodes = count_decodes(c, i + 1);
    }
    plan_row(c, request, n);
    budget -= n;
    ++i;
  }
  return budget;
}

// Admits heads of the rings in turn while rows, pages and budget last. A head that does not fit holds its ring; one whose
// ring has no credit waits, because it would hold pages and could not speak. Between rings there is no fairness beyond
// whose turn it is: small requests of other rings may pass a large head for as long as they keep coming.
BLINK_FN void plan_waiting(const Context& c, uint32_t budget) {
  const uint32_t rings = c.config->rings;
  uint32_t stuck = 0;
  uint32_t ring = c.head->next_ring;
  while (stuck < rings && budget > 0) {
    const RingState& rs = c.rings[ring];
    if (rs.wait_head < 0 || !token_credit(c, rs) || !make_room(c, uint32_t(rs.wait_head))) {
      ++stuck;
    } else {
      stuck = 0;
      const uint32_t request = uint32_t(rs.wait_head);
      const Request& q = c.requests[request];
      const uint32_t n = q.total < budget ? q.total : budget;
      wait_remove(c, request);
      run_insert(c, request);
      ++c.head->admissions;
      log_event(c, LogLevel::DECISIONS, LogKind::ADMIT, ring, c.slot_of(request), q.generation, uint32_t(q.row),
                q.total, q.preemptions);
      reserve_pages(c, request, n);  // finds them free: make_room counted them
      plan_row(c, request, n);
      budget -= n;
    }
    ring = ring + 1 == rings ? 0 : ring + 1;
  }
  c.head->next_ring = ring;
}

// Ends every live request; used by stop.
BLINK_FN void abort_all(const Context& c, ErrorReason reason) {
  for (uint32_t i = 0; i < c.config->rings * c.config->slots; ++i) {
    if (c.requests[i].state != uint32_t(RequestState::FREE)) {
      terminate(c, i, EventKind::ERROR, uint32_t(reason));
    }
  }
}

// Between steps: commit, follow drain and stop, plan. Returns true if a step is to be launched.
template <class Group>
BLINK_FN bool step_boundary(const Context& c, Group& g) {
  g.sync();
  bool launch = false, stopping = false;
  if (g.rank() == 0) {
    commit(c);
    const auto state = EngineState(c.head->state);
    if (load_acquire(&c.control->stop_request) != 0) {
      stopping = state != EngineState::STOPPED;
      if (stopping) {
        abort_all(c, ErrorReason::DRAINING);
        c.head->state = uint32_t(EngineState::STOPPED);
      }
    } else if (load_acquire(&c.control->drain_request) != 0 && state == EngineState::READY) {
      set_state(c, EngineState::DRAINING);
    }
    if (EngineState(c.head->state) == EngineState::DRAINING && c.head->live == 0) set_state(c, EngineState::DRAINED);
  }
  if (g.any(stopping)) {
    poll_rings(c, g);  // refuses what was published before, as far as the ring's own credits reach
    if (g.rank() == 0) set_state(c, EngineState::STOPPED);
  }
  if (g.rank() == 0) {
    PlanHeader& plan = *c.plan;
    plan.n_rows = plan.n_tokens = plan.n_samples = 0;
    plan.status = uint32_t(StepStatus::OK);
    if (c.head->live > 0) {
      plan.step = c.head->step + 1;
      plan_waiting(c, plan_running(c, c.config->token_budget));
    }
    launch = plan.n_rows > 0;
    if (launch) {
      c.head->step = plan.step;
      c.head->in_flight = 1;
      log_event(c, LogLevel::DECISIONS, LogKind::STEP, 0, 0, 0, plan.n_rows, plan.n_tokens, plan.n_samples);
    }
  }
  return g.any(launch);
}

}  // namespace blink
