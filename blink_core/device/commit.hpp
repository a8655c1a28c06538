// Taking in the results of the step that ended: tokens, stop rules, events (design section 4). Rank 0.
#pragma once

#include "ring.hpp"

namespace blink {

BLINK_FN bool contains(const int32_t* ids, uint32_t count, int32_t id) {
  for (uint32_t i = 0; i < count; ++i) {
    if (ids[i] == id) return true;
  }
  return false;
}

// Appends a sampled token; ends the request if a rule says so. `place`: its row in the plan.
BLINK_FN void commit_token(const Context& c, uint32_t request, int32_t token, float logprob, uint32_t place) {
  Request& q = c.requests[request];
  const Sampling& s = c.sampling[request];
  const Config& k = *c.config;
  const uint32_t ring = c.ring_of(request), slot = c.slot_of(request);
  c.tokens_of(request)[q.total++] = token;
  if (s.logprobs > 0) {
    const uint64_t top = uint64_t(place) * k.max_logprobs;
    emit_logprobs(c, ring, slot, q.generation, s.logprobs, c.top_tokens + top, c.top_logprobs + top);
  }
  emit(c, ring, slot, q.generation, EventKind::TOKEN, 0, q.emitted, token, logprob);
  log_event(c, LogLevel::ALL, LogKind::TOKEN, ring, slot, q.generation, q.emitted, uint32_t(token), 0);
  ++q.emitted;
  ++c.head->tokens;
  const bool ignore_eos = (s.flags & uint32_t(SlotFlag::IGNORE_EOS)) != 0;
  const bool may_stop = q.emitted > s.min_tokens;  // the sampler bars these ids before
  if (may_stop && !ignore_eos && contains(k.eos_ids, k.n_eos, token)) {
    terminate(c, request, EventKind::FINISH, uint32_t(FinishReason::EOS));
  } else if (may_stop && contains(s.stop_ids, s.n_stop, token)) {
    terminate(c, request, EventKind::FINISH, uint32_t(FinishReason::STOP_TOKEN));
  } else if (q.emitted >= q.max_tokens) {
    terminate(c, request, EventKind::FINISH, uint32_t(FinishReason::LENGTH));
  } else if (q.total >= k.max_len) {
    terminate(c, request, EventKind::FINISH, uint32_t(FinishReason::CONTEXT));
  }
}

BLINK_FN ErrorReason error_of(StepStatus status) {
  if (status == StepStatus::NAN_LOGITS) return ErrorReason::NAN_LOGITS;
  return status == StepStatus::NO_TOKEN ? ErrorReason::NO_TOKEN : ErrorReason::MODEL_ERROR;
}

// One row of the step that ended. Pages enter the prefix cache only behind a token that was chosen from finite logits:
// a NaN in their keys or values would have shown there, so what others may share is known to be sound.
BLINK_FN void commit_row(const Context& c, uint32_t place, bool failed) {
  const PlanRow& row = c.plan_rows[place];
  Request& q = c.requests[row.request];
  // A request that ended while the step ran is gone, and its slot may already have another owner.
  if (q.state != uint32_t(RequestState::RUNNING) || q.generation != row.generation) return;
  if (failed) {
    terminate(c, row.request, EventKind::ERROR, uint32_t(ErrorReason::MODEL_ERROR));
    return;
  }
  q.computed = row.context_len;
  if (row.sample == 0) return;
  const StepResult& result = c.results[place];
  log_event(c, LogLevel::ALL, LogKind::RESULT, row.ring, row.slot, row.generation, uint32_t(result.token),
            result.status, bits_of(result.logprob));
  if (result.status != uint32_t(StepStatus::OK) || result.token < 0 || uint32_t(result.token) >= c.config->vocab) {
    terminate(c, row.request, EventKind::ERROR, uint32_t(error_of(StepStatus(result.status))));
    return;
  }
  publish_pages(c, row.request);
  commit_token(c, row.request, result.token, result.logprob, place);
}

// Takes in the results of the step in flight.
BLINK_FN void commit(const Context& c) {
  if (c.head->in_flight == 0) return;
  c.head->in_flight = 0;
  for (uint32_t ring = 0; ring < c.config->rings; ++ring) c.rings[ring].planned = 0;
  drain_quarantine(c);
  acknowledge_epochs(c);
  const bool failed = c.plan->status != uint32_t(StepStatus::OK);
  for (uint32_t place = 0; place < c.plan->n_rows; ++place) commit_row(c, place, failed);
  ++c.head->committed;
  if (failed) store_release(&c.status->failures, c.status->failures + 1);
  store_release(&c.status->steps, c.head->committed);
}

}  // namespace blink
