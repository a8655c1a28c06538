// What must hold after every transition, recounted from raw memory: the safety clauses of docs/rules.md that small scopes
// can reach. A broken one is thrown as a Violation that names its clause.
#pragma once

#include "explore_recount.hpp"

namespace blink::explore {

class Clauses : public Recount {
 public:
  using Recount::Recount;

  // After the transition `label` from w.was to w.now.
  void after(Label label) {
    const Action action = action_of(label);
    if (action != POLL && action != BOUNDARY) return;  // the engine's memory is as it was
    events();
    epochs();
    cancels();
    requests();
    lists();
    pages();
    tables();
    in_flight();
    if (w_.config().prefix_cache != 0) cache();
    service_order();
    life_of_engine(action);
    times(action);
    if (action == BOUNDARY) reservation();
    if (w_.launched && action == BOUNDARY) plan();
    if (w_.scope().plant == PLANT_MISSTATED && now().head->preemptions > 0) fail("L1", "planted: somebody is preempted");
    look(label);
  }

  // All work is done, all events are read, everything is given back; front ends have nothing left that they must do.
  bool quiescent() const {
    const Context& c = now();
    if (c.head->live != 0 || c.head->in_flight != 0) return false;
    const bool stopped = c.head->state == uint32_t(EngineState::STOPPED);
    for (uint32_t r = 0; r < config().rings; ++r) {
      const FrontEnd& f = env().front_ends[r];
      if (f.dead) continue;
      if (f.crashed || c.ring(r).gpu->epoch_ack != f.epoch) return false;
      const std::vector<Op>& ops = w_.scope().programs[r];
      for (size_t i = f.op; i < ops.size() && ops[i].kind != OpKind::ATTACH; ++i) {
        if (!stopped && (!ops[i].optional || f.part != 0)) return false;
      }
      const RingState& rs = c.rings[r];
      if (f.consumed != rs.cq_tail || c.ring(r).front_end->cq_head != f.consumed) return false;
      if (!stopped && rs.cq_head != f.consumed) return false;
    }
    for (uint32_t i = 0; i < w_.scope().requests.size(); ++i) {
      const ProgramRequest& q = w_.scope().requests[i];
      const Watch& watch = env().watch[i];
      const FrontEnd& f = env().front_ends[q.ring];
      if (!watch.published || watch.terminal || f.dead || q.epoch != f.epoch) continue;
      if (!stopped || watch.entry < c.rings[q.ring].sq_next) return false;
    }
    return true;
  }

 private:
  // Events written by the transition: L1, C3, C4, R9, R10, R2.
  void events() {
    for (uint32_t r = 0; r < config().rings; ++r) {
      const RingState &rs = now().rings[r], &before = was().rings[r];
      uint64_t at = before.cq_tail;
      if (rs.epoch != before.epoch) {
        expect(rs.cq_tail == 0 && rs.cq_published == 0, "R2", "events before the new epoch's front end may read", r);
        continue;
      }
      expect(rs.cq_tail >= at, "R9", "the completion queue went back: ring, tail", r, rs.cq_tail);
      expect(rs.cq_published <= rs.cq_tail && rs.cq_head <= rs.cq_published, "R4", "heads and tails of ring", r);
      for (; at < rs.cq_tail; ++at) event(r, rs, at);
      const uint64_t full = rs.cq_tail - rs.cq_head + rs.planned + rs.live;
      expect(full <= config().cq_entries, "P3", "credits exceeded: ring, events with those reserved", r, full);
      const FrontEnd &f = env().front_ends[r], &e = env().elders[r];
      const FrontEnd& reader = e.lives && !e.crashed ? e : f;
      if (reader.epoch == rs.epoch && !f.dead && !reader.crashed) {
        expect(rs.cq_tail - reader.consumed <= config().cq_entries, "R4", "an unread event is overwritten: ring", r);
      }
      if (now().ring(r).gpu->cq_tail != was().ring(r).gpu->cq_tail) {
        expect(now().ring(r).gpu->cq_tail == rs.cq_published, "R9", "published tail of ring", r);
      }
    }
  }

  void event(uint32_t r, const RingState& rs, uint64_t at) {
    const Event& e = now().ring(r).cq[at & (config().cq_entries - 1)];
    expect(e.seq == at + 1, "R9", "event and its sequence number", at, e.seq);
    if (w_.fenced(r)) return;  // nobody reads it
    const int32_t id = w_.find(r, e.slot, e.generation, rs.epoch);
    if (id < 0) fail("R1", "ring " + str(r) + ": event for slot " + str(e.slot) + " generation " + str(e.generation) +
                               ", which nobody submitted in epoch " + str(rs.epoch));
    Watch& watch = env().watch[id];
    const ProgramRequest& q = w_.scope().requests[id];
    expect(watch.published != 0, "R6", "event of a request whose entry is not there: request", uint64_t(id));
    expect(watch.terminal == 0, "L1", "event after the terminal event of request", uint64_t(id));
    expect(e.index == watch.tokens, e.kind == uint8_t(EventKind::TOKEN) ? "C3" : "L1", "request, index of its event",
           uint64_t(id), e.index);
    if (e.kind == uint8_t(EventKind::TOKEN)) {
      last_token_ = e.token;
      const bool known = e.token == config().eos_ids[0] || e.token == w_.output(uint32_t(id), watch.tokens);
      expect(known, "C3", "token of another request or index: request, token", uint64_t(id), uint64_t(e.token));
      ++watch.tokens;
      return;
    }
    const bool finish = e.kind == uint8_t(EventKind::FINISH);
    expect(finish || e.kind == uint8_t(EventKind::ERROR), "L1", "kind of an event", e.kind);
    const uint32_t allowed = finish ? q.finishes : q.errors;
    if ((allowed >> e.reason & 1) == 0) {
      fail(finish ? "C4" : "R6", "request " + str(id) + " ends with " + (finish ? "FINISH " : "ERROR ") +
                                     str(e.reason) + ", which nothing in this scope can cause");
    }
    if (finish) finish_reason(e, watch, q);
    if (!finish) error_reason(r, e);
    watch.terminal = 1;
  }

  void error_reason(uint32_t r, const Event& e) {
    const RingState& before = was().rings[r];
    const uint64_t clock = env().now;
    switch (ErrorReason(e.reason)) {
      case ErrorReason::DEADLINE:
        saw(S_DEADLINE);
        return expect(was().requests[was().request_index(r, e.slot)].expires <= clock, "L3", "DEADLINE early: slot", e.slot);
      case ErrorReason::LEASE_LOST:
        saw(S_LEASE_LOST);
        expect(now().ring(r).front_end->lease == before.lease, "L4", "lapsed although the word has changed: ring", r);
        return expect(clock - before.lease_at >= config().lease_us, "L4", "lapsed early: ring", r);
      case ErrorReason::CHECKSUM:
      case ErrorReason::BAD_GENERATION:
        saw(S_TORN_REFUSED);
        return expect(before.retries > 0 && clock - before.retry_at >= config().visibility_us, "R8",
                      "a torn entry is refused before its time: ring", r);
      case ErrorReason::DRAINING: {
        const Request& q = was().requests[was().request_index(r, e.slot)];
        const bool lived = q.state != uint32_t(RequestState::FREE) && q.generation == e.generation;
        expect(!lived || now().control->stop_request != 0, "L6", "a drain ends an accepted request: slot", e.slot);
        return expect(now().head->state != uint32_t(EngineState::READY), "L6", "DRAINING from one that is ready: slot", e.slot);
      }
      case ErrorReason::NAN_LOGITS: return saw(S_NAN);
      case ErrorReason::MODEL_ERROR: return saw(S_STEP_FAILED);
      default: return;
    }
  }

  // L3, L4, R8: nothing outlives its time at a look of the scheduler.
  void times(Action action) const {
    const Context& c = now();
    const uint64_t clock = env().now;
    for (uint32_t q = 0; q < config().rings * config().slots; ++q) {
      const Request& x = c.requests[q];
      const bool over = x.state != uint32_t(RequestState::FREE) && x.expires != 0 && x.expires <= clock;
      expect(!over || x.arrival >= was().head->arrivals, "L3", "lives beyond its deadline: request", q);
    }
    if (action != POLL) return;
    for (uint32_t r = 0; r < config().rings; ++r) {
      const RingState& rs = c.rings[r];
      if (rs.epoch == 0 || rs.epoch != was().rings[r].epoch) continue;
      expect(rs.retries == 0 || w_.scope().unordered, "R8", "a torn entry although writes arrive in order: ring", r);
      expect(rs.retries == 0 || clock - rs.retry_at < config().visibility_us, "R8", "a torn entry outlives its time", r);
      const bool lapsed = config().lease_us != 0 && rs.live > 0 && clock - rs.lease_at >= config().lease_us;
      expect(!lapsed, "L4", "requests outlive their lease: ring", r);
    }
  }

  void finish_reason(const Event& e, const Watch& watch, const ProgramRequest& q) {
    const Slot& d = q.descriptor;
    switch (FinishReason(e.reason)) {
      case FinishReason::CANCELLED:
        return expect(watch.cancelled != 0, "R10", "CANCELLED, and nobody cancelled: slot", e.slot);
      case FinishReason::LENGTH:
        saw(S_LENGTH);
        return expect(watch.tokens == d.max_tokens, "C4", "LENGTH after tokens, of", watch.tokens, d.max_tokens);
      case FinishReason::CONTEXT:
        return expect(watch.tokens + d.prompt_len == config().max_len, "C4", "CONTEXT after tokens", watch.tokens);
      case FinishReason::EOS:
        saw(S_END_OF_SEQUENCE);
        return expect(watch.tokens > 0 && last_token_ == config().eos_ids[0], "C4", "EOS behind token", last_token_);
      default: return;
    }
  }

  // R2: a new epoch is acknowledged when nothing of the old one is left, in the step in flight included.
  void epochs() {
    for (uint32_t r = 0; r < config().rings; ++r) {
      const uint64_t ack = now().ring(r).gpu->epoch_ack;
      if (ack == was().ring(r).gpu->epoch_ack) continue;
      expect(ack == now().rings[r].epoch, "R2", "ring, epoch acknowledged but not followed", r, ack);
      if (now().head->in_flight != 0 && was().head->in_flight != 0 && !w_.launched) {
        for (uint32_t i = 0; i < env().n_flight; ++i) {
          const Flight& f = env().flight[i];
          expect(now().ring_of(f.request) != r || f.epoch == ack, "R2",
                 "acknowledged while a step of the old epoch runs: ring", r);
        }
      }
    }
    if (action_changed_epoch()) {
      for (uint32_t r = 0; r < config().rings; ++r) {
        if (now().rings[r].epoch == was().rings[r].epoch) continue;
        expect(now().rings[r].live == 0, "R2", "requests of the old epoch live: ring", r);
        if (was().head->in_flight != 0 && now().head->in_flight != 0) {
          saw(S_EPOCH_IN_STEP);
          if (now().ring(r).gpu->epoch_ack != now().rings[r].epoch) saw(S_LATE_ACK);
        }
      }
    }
  }
  bool action_changed_epoch() const {
    for (uint32_t r = 0; r < config().rings; ++r) {
      if (now().rings[r].epoch != was().rings[r].epoch) return true;
    }
    return false;
  }

  // R10: a cancel that was taken has ended its request.
  void cancels() const {
    for (uint32_t r = 0; r < config().rings; ++r) {
      if (now().rings[r].epoch != was().rings[r].epoch) continue;
      for (uint64_t at = was().rings[r].sq_next; at < now().rings[r].sq_next; ++at) {
        const uint64_t word = was().ring(r).sq[at & (config().sq_entries - 1)];
        if ((word >> SQ_OP_SHIFT & 0xF) != uint64_t(::blink::Op::CANCEL)) continue;
        const uint32_t request = now().request_index(r, uint32_t(word >> SQ_SLOT_SHIFT) & (MAX_SLOTS - 1));
        const Request& q = now().requests[request];
        expect(q.state == uint32_t(RequestState::FREE) || q.generation != uint32_t(word >> SQ_GENERATION_SHIFT), "R10",
               "lives although its cancel was taken: request", request);
      }
    }
  }

  // L1, C2, C4, R10: each live request by itself, and its tokens.
  void requests() {
    uint32_t live = 0;
    for (uint32_t r = 0; r < config().rings; ++r) {
      uint32_t of_ring = 0;
      for (uint32_t s = 0; s < config().slots; ++s) {
        const uint32_t request = now().request_index(r, s);
        const Request& q = now().requests[request];
        if (q.state == uint32_t(RequestState::FREE)) {
          expect(q.row == -1 && q.n_pages == 0, "K4", "a request that is over holds a row or pages: request", request);
          continue;
        }
        ++of_ring;
        if (w_.fenced(r)) continue;  // taken from a predecessor that was shut out: dropped with the epoch that follows
        const int32_t id = w_.find(request, q.generation);
        if (id < 0) fail("R6", str("request", request) + " has generation " + str(q.generation) + " of nobody");
        const Watch& watch = env().watch[id];
        expect(watch.published && !watch.terminal, "L1", "lives without entry or after its end: request", request);
        expect(q.emitted == watch.tokens && q.total == q.prompt_len + q.emitted, "C3", "tokens of request", request);
        expect(q.computed < q.total || q.state == uint32_t(RequestState::RUNNING), "C2", "computed of", request);
        expect(q.computed <= q.total && q.total <= config().max_len, "C4", "length of request", request);
        tokens_of(request, q, uint32_t(id));
      }
      expect(of_ring == now().rings[r].live, "L1", "live requests of ring", r, of_ring);
      live += of_ring;
    }
    expect(live == now().head->live, "L1", "live requests", live);
  }

  void tokens_of(uint32_t request, const Request& q, uint32_t id) {
    const std::vector<int32_t>& prompt = w_.scope().requests[id].payload;
    const int32_t* tokens = now().tokens_of(request);
    for (uint32_t i = 0; i < q.total; ++i) {
      const bool right = i < q.prompt_len ? tokens[i] == prompt[i] : tokens[i] == w_.output(id, i - q.prompt_len);
      expect(right, "L1", "token pool: request, position", request, i);
    }
  }

  // A2, L2: within ring and class nobody is admitted before an elder that waits all the while. No scope has masks, so
  // nobody sleeps.
  void service_order() {
    const Context& c = now();
    for (uint32_t i = 0; i < c.head->running; ++i) {
      const uint32_t young = c.running[i];
      const Request& y = c.requests[young];
      const Request& y0 = was().requests[young];
      if (y0.state != uint32_t(RequestState::WAITING) || y0.generation != y.generation) continue;
      for (uint32_t q = 0; q < config().rings * config().slots; ++q) {
        const Request& other = c.requests[q];
        const bool waits = other.state == uint32_t(RequestState::WAITING);
        if (waits && other.priority > y.priority && is_elder(q, young)) saw(S_CLASSES);
      }
      for (uint32_t slot = 0; slot < config().slots; ++slot) {
        const uint32_t elder = c.request_index(c.ring_of(young), slot);
        const Request &e = c.requests[elder], &e0 = was().requests[elder];
        const bool waits = e.state == uint32_t(RequestState::WAITING) && e0.state == e.state &&
                           e0.generation == e.generation && e.preemptions == e0.preemptions;
        if (elder == young || !waits || e.priority != y.priority || !is_elder(elder, young)) continue;
        fail("A2", str("request", young) + " is admitted before " + str("request", elder) + " of its ring and class");
      }
    }
  }

  // A5, A7: a reservation keeps others waiting, and for a limited time.
  void reservation() const {
    const Context& c = now();
    const int32_t holder = c.head->reserved_for;
    if (holder < 0) return;
    const uint64_t held = c.head->boundaries - c.head->reserved_since;
    const bool budget_left = !w_.launched || c.plan->n_tokens < config().token_budget;
    expect(held < config().reservation_steps || !budget_left, "A7", "holds a reservation that is due: request, boundaries",
           uint64_t(holder), held);
    if (holder != was().head->reserved_for || held == 0) return;
    const uint32_t ring = c.ring_of(uint32_t(holder)), priority = c.requests[holder].priority;
    const RingState& rs = c.rings[ring];
    const bool credits = rs.cq_tail - rs.cq_head + rs.planned + 1 + config().slots <= config().cq_entries;
    if (!credits || rs.wait_head[priority] != holder) return;
    for (uint32_t i = 0; i < c.head->running; ++i) {
      const Request &q = c.requests[c.running[i]], &before = was().requests[c.running[i]];
      const bool admitted = before.state == uint32_t(RequestState::WAITING) && before.generation == q.generation;
      expect(!admitted || q.priority < priority, "A5", "admitted past the holder of the reservation: request", c.running[i]);
    }
  }

  // L6, L7.
  void life_of_engine(Action action) {
    const Context& c = now();
    const auto state = EngineState(c.head->state), before = EngineState(was().head->state);
    expect(uint32_t(state) >= uint32_t(before), "L6", "the engine went back, from and to", uint32_t(before), uint32_t(state));
    for (uint32_t r = 0; r < config().rings; ++r) {
      expect(c.ring(r).gpu->state == uint64_t(state), "L6", "state that a ring shows", c.ring(r).gpu->state, uint32_t(state));
    }
    if (action == BOUNDARY) {
      const bool stops = c.control->stop_request != 0;
      expect(!stops || state == EngineState::STOPPED, "L7", "asked to stop, and goes on in state", uint32_t(state));
      expect(c.control->drain_request == 0 || state != EngineState::READY, "L6", "asked to drain, and goes on");
      expect(state != EngineState::DRAINING || c.head->live > 0, "L6", "nothing lives and it is not drained");
    }
    if (state == EngineState::STOPPED && before == EngineState::DRAINED) saw(S_STOPPED_DRAINED);
    if (state == EngineState::STOPPED && before == EngineState::DRAINING && was().head->live > 0) saw(S_STOPPED_DRAINING);
    if (state == EngineState::DRAINED || state == EngineState::STOPPED) {
      expect(c.head->live == 0, "L6", "requests live in an engine that is drained or stopped", c.head->live);
      expect(c.head->in_flight == 0, "L7", "a step runs in an engine that is drained or stopped");
    }
    if (state == EngineState::DRAINED) saw(S_DRAINED);
    if (state == EngineState::STOPPED) saw(S_STOPPED);
    if (state != EngineState::READY) expect(c.head->arrivals == was().head->arrivals, "L6", "accepted while draining");
  }

  // P1 to P4, A4: the plan that was just written.
  void plan() {
    const Context& c = now();
    const PlanHeader& h = *c.plan;
    uint32_t at = 0, samples = 0, decodes = 0, prefills = 0, rings = 0, planned[MAX_RINGS] = {};
    expect(h.n_rows > 0 && h.n_rows <= config().max_rows, "P1", "rows of the plan", h.n_rows);
    for (uint32_t i = 0; i < h.n_rows; ++i) {
      const PlanRow& row = c.plan_rows[i];
      const Request& q = c.requests[row.request];
      expect(q.state == uint32_t(RequestState::RUNNING) && q.generation == row.generation &&
                 uint32_t(q.row) == row.row, "P1", "plan row of one that does not run: request", row.request);
      for (uint32_t k = 0; k < i; ++k) expect(c.plan_rows[k].request != row.request, "P1", "planned twice", row.request);
      expect(row.q_start == at && row.q_len > 0, "P2", "tokens of plan row", i);
      expect(row.context_len == q.computed + row.q_len && row.context_len <= q.total, "P2", "context of plan row", i);
      expect((row.sample != 0) == (row.context_len == q.total), "P2", "plan row samples too early or late", i);
      expect(row.emitted == q.emitted, "C3", "output index of plan row", i);
      expect(row.n_pages == q.n_pages && row.n_pages >= pages_of(row.context_len), "P4", "pages of plan row", i);
      for (uint32_t k = 0; k < row.q_len; ++k) planned_token(row, q, k);
      at += row.q_len;
      samples += row.sample;
      planned[row.ring] += row.sample;
      (row.q_len == 1 && q.emitted > 0 ? decodes : prefills) += 1;
      if (row.sample == 0) saw(S_CHUNKED_PREFILL);
      rings |= 1u << row.ring;
    }
    expect(at == h.n_tokens && at <= config().token_budget, "P1", "tokens of the plan", at);
    expect(samples == h.n_samples, "P2", "samples of the plan", samples);
    for (uint32_t r = 0; r < config().rings; ++r) {
      expect(planned[r] <= c.rings[r].planned, "P3", "credits kept for the plan: ring", r, c.rings[r].planned);
      if (planned[r] == 0) continue;
      const uint64_t used = c.rings[r].cq_tail - c.rings[r].cq_head + c.rings[r].planned + config().slots;
      expect(used <= config().cq_entries, "P3", "planned without credits: ring, events", r, used);
    }
    if (decodes > 0 && prefills > 0) saw(S_MIXED_STEP);
    if ((rings & (rings - 1)) != 0) saw(S_RINGS_IN_STEP);
  }

  void planned_token(const PlanRow& row, const Request& q, uint32_t k) const {
    const Context& c = now();
    const uint32_t i = row.q_start + k, position = q.computed + k, size = config().page_size;
    expect(c.plan_positions[i] == int32_t(position), "P2", "position of planned token", i, position);
    expect(c.plan_token_ids[i] == c.tokens_of(row.request)[position], "P2", "id of planned token", i);
    const uint32_t page = c.table_of(uint32_t(q.row))[position / size];
    expect(c.plan_kv_slots[i] == int64_t(page) * size + position % size, "P4", "KV slot of planned token", i, page);
    expect(c.pages[page].state == uint32_t(PageState::OWNED), "P4", "a step writes into a shared page", page);
  }

  // Situations that the two states show.
  void look(Label label) {
    const Context &c = now(), &b = was();
    if (c.head->preemptions > b.head->preemptions) saw(S_PREEMPTION);
    if (c.head->evictions > b.head->evictions) saw(S_EVICTION);
    if (c.head->hits > b.head->hits) saw(S_PREFIX_HIT);
    if (c.head->reserved_for >= 0) saw(S_RESERVATION);
    if (c.head->free_pages + c.head->idle_cached == 0) saw(S_POOL_EXHAUSTED);
    if (c.head->free_rows == 0) saw(S_ROWS_EXHAUSTED);
    for (uint32_t page = RESERVED_PAGES; page < config().pages; ++page) look_at_page(page);
    for (uint32_t r = 0; r < config().rings; ++r) look_at_ring(r, label);
    for (uint32_t q = 0; q < config().rings * config().slots; ++q) {
      const Request &x = c.requests[q], &y = b.requests[q];
      if (x.state == uint32_t(RequestState::RUNNING)) {
        if (x.paused > 0) saw(S_CREDIT_STALL);
        if (x.paused >= config().paused_limit) saw(S_PAUSED_LONG);
        if (x.preemptions > 0) saw(S_RESUMED);
      }
      if (x.state == uint32_t(RequestState::WAITING) && y.state == uint32_t(RequestState::RUNNING) &&
          y.paused >= config().paused_limit) {
        saw(S_PAUSED_GAVE_WAY);
      }
      const bool ended = y.state != uint32_t(RequestState::FREE) && x.state == uint32_t(RequestState::FREE);
      if (!ended || action_of(label) != POLL) continue;
      const int32_t id = w_.find(c.ring_of(q), c.slot_of(q), y.generation, b.rings[c.ring_of(q)].epoch);
      if (id < 0 || !env().watch[id].cancelled) continue;
      if (y.state == uint32_t(RequestState::WAITING)) saw(S_CANCEL_WAITING);
      for (uint32_t i = 0; i < env().n_flight && b.head->in_flight != 0; ++i) {
        if (env().flight[i].request == q && env().flight[i].generation == y.generation) saw(S_CANCEL_IN_STEP);
      }
    }
  }

  void look_at_page(uint32_t page) {
    const Page &x = now().pages[page], &y = was().pages[page];  // a free page keeps its last owner's generation
    if (x.state != uint32_t(PageState::OWNED) || y.state == uint32_t(PageState::OWNED) || y.generation == 0) return;
    if (x.generation != y.generation || x.owner != y.owner) saw(S_PAGE_REUSE);
  }

  void look_at_ring(uint32_t r, Label label) {
    const RingState &x = now().rings[r], &y = was().rings[r];
    const FrontEnd& f = env().front_ends[r];
    const FrontEnd& elder = env().elders[r];
    if ((f.dead || f.crashed) && !elder.lives && x.live > 0 && !w_.fenced(r)) saw(S_FRONT_END_DIED);
    if (elder.lives && f.part > 0 && x.live > 0) saw(S_TWO_FRONT_ENDS);
    if (elder.lives && elder.crashed && f.crashed && x.live > 0) saw(S_TWO_ATTACHES);
    if (f.alone && !f.crashed && x.live > 0 && !w_.fenced(r)) saw(S_EARLIER_ATTACH_LAST);
    if (elder.lives && elder.wrote) saw(S_ELDER_WROTE);
    if (x.cq_tail > config().cq_entries) saw(S_CQ_WRAP);
    if (x.sq_next > config().sq_entries) saw(S_SQ_WRAP);
    if (x.stale_cancels > y.stale_cancels) saw(S_CANCEL_STALE);
    if (x.retries > 0) saw(S_TORN);
    if (y.retries > 0 && x.sq_next > y.sq_next && now().head->arrivals > was().head->arrivals) saw(S_TORN_ACCEPTED);
    for (uint32_t slot = 0; slot < config().slots; ++slot) {
      const Request& q = now().requests[now().request_index(r, slot)];
      if (q.state != uint32_t(RequestState::FREE) && q.generation > 1) saw(S_SLOT_REUSE);
    }
    if (action_of(label) != POLL || x.retries > 0) return;
    const uint64_t word = now().ring(r).sq[x.sq_next & (config().sq_entries - 1)];
    const bool there = (word & ((1u << SEQ_BITS) - 1)) == sequence_number(x.sq_next) && x.epoch == y.epoch;
    if (there && x.cq_tail - x.cq_head + x.planned + x.live + 1 > config().cq_entries) saw(S_ENTRY_HELD);
  }

  int32_t last_token_ = -1;
};

}  // namespace blink::explore
