// The plan of a step: which tokens of which running requests (design section 4). Rank 0.
// One rule: a request has `computed` and `total` tokens; a step hands out a token budget, decodes first, in order of
// service.
#pragma once

#include "mask.hpp"

namespace blink {

// Pages so that `tokens` tokens fit. For them rows give way that were paused for long, and then the last in order of
// service: never one that is planned already, because rows are planned in that order. False if `request` was itself last.
BLINK_FN bool reserve_pages(const Context& c, uint32_t request, uint32_t tokens) {
  while (c.requests[request].n_pages < pages_for(c, tokens)) {
    if (alloc_page(c, request) || preempt_paused(c)) continue;
    const uint32_t last = c.running[c.head->running - 1];
    preempt(c, last);
    if (last == request) return false;
  }
  return true;
}

// Row `place` of the plan: the next `n` tokens of `request`, whose place in the step's arrays is `start`.
BLINK_FN const PlanRow& fill_row(const Context& c, uint32_t place, uint32_t start, uint32_t request, uint32_t n) {
  const Request& q = c.requests[request];
  const Config& k = *c.config;
  PlanRow& row = c.plan_rows[place];
  row.request = request;
  row.generation = q.generation;
  row.q_start = start;
  row.q_len = n;
  row.context_len = q.computed + n;
  row.sample = q.computed + n == q.total ? 1 : 0;
  row.emitted = q.emitted;
  row.masked = row.sample != 0 && is_masked(c, request) ? 1 : 0;
  row.ring = c.ring_of(request);
  row.slot = c.slot_of(request);
  row.n_pages = q.n_pages;
  row.row = uint32_t(q.row);
  row.serial = q.arrival;
  const int32_t* tokens = c.tokens_of(request);
  const uint32_t* table = c.table_of(uint32_t(q.row));
  for (uint32_t i = 0; i < n; ++i) {
    const uint32_t position = q.computed + i;
    c.plan_token_ids[start + i] = tokens[position];
    c.plan_positions[start + i] = int32_t(position);
    c.plan_kv_slots[start + i] = int64_t(table[position / k.page_size]) * k.page_size + position % k.page_size;
  }
  if (row.sample != 0) c.results[place].status = uint32_t(StepStatus::FAILED);  // until the model step says otherwise
  return row;
}

BLINK_FN void plan_row(const Context& c, uint32_t request, uint32_t n) {
  PlanHeader& plan = *c.plan;
  const PlanRow& row = fill_row(c, plan.n_rows, plan.n_tokens, request, n);
  if (row.sample != 0) {
    c.rings[row.ring].planned += token_events(c, request);
    ++plan.n_samples;
  }
  ++plan.n_rows;
  plan.n_tokens += n;
  log_event(c, LogLevel::ALL, LogKind::PLAN_ROW, row.ring, row.slot, row.generation, n, row.context_len, row.row);
}

// Tokens that a running request may compute now, of at most `most`. A prefill without credits or mask may still go up to
// its last token, in pages that nobody has to give up for it; what has nothing left then is paused.
BLINK_FN uint32_t tokens_now(const Context& c, uint32_t request, uint32_t most) {
  Request& q = c.requests[request];
  const uint32_t remaining = q.total - q.computed;
  uint32_t n = remaining < most ? remaining : most;
  const bool speaks = token_credit(c, request) && has_mask(c, request);
  if (!speaks && n > 0) {
    const uint32_t room = (q.n_pages + available_pages(c)) * c.config->page_size - q.computed;
    if (n == remaining) --n;
    if (n > room) n = room;
    if (n == 0) ++q.paused;
  }
  if (speaks || n > 0) q.paused = 0;
  return n;
}

// Whether a request needs one token only and could have it when planning began.
BLINK_FN bool is_ready_decode(const Context& c, uint32_t request) {
  const Request& q = c.requests[request];
  return q.total - q.computed == 1 && credit_beside(c, request, 0) && has_mask(c, request);
}

// Such requests from place `from` of the running list.
BLINK_FN uint32_t count_decodes(const Context& c, uint32_t from) {
  uint32_t decodes = 0;
  for (uint32_t i = from; i < c.head->running; ++i) decodes += is_ready_decode(c, c.running[i]) ? 1 : 0;
  return decodes;
}

// Plans running requests in order of service. Every decode that can have its token keeps one of the budget, so no prefill
// can starve it. Returns what is left of the budget.
BLINK_FN uint32_t plan_running(const Context& c, uint32_t budget) {
  uint32_t decodes = count_decodes(c, 0);
  for (uint32_t i = 0; i < c.head->running;) {
    const uint32_t request = c.running[i];
    const Request& q = c.requests[request];
    const bool decode = q.total - q.computed == 1;
    if (is_ready_decode(c, request)) --decodes;
    const uint32_t n = tokens_now(c, request, decode ? 1 : budget - decodes);
    if (n == 0) {
      ++i;
      continue;
    }
    const uint32_t before = c.head->running;
    // Only the last is ever preempted for itself, so nothing follows it.
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

}  // namespace blink
