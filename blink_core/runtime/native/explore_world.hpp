// One engine with its environment in one flat block of memory, and the transitions of both. The scheduler is the compiled
// one, called as the engine's loop calls it; front ends, NIC, clock, host and model are modelled.
#pragma once

#include "explore_block.hpp"

namespace blink::explore {

enum Action : uint32_t { POLL, BOUNDARY, TICK, HOST, CRASH, DELIVER, SKIP, CONSUME, CREDIT, RENEW, SUPERSEDE, ACTIONS };

// A transition: action in the low byte, ring above it, detail (outcome vector, part) in the upper half.
using Label = uint32_t;
constexpr Label label_of(Action action, uint32_t ring = 0, uint32_t detail = 0) {
  return action | ring << 8 | detail << 16;
}
constexpr Action action_of(Label l) { return Action(l & 255); }
constexpr uint32_t ring_of(Label l) { return l >> 8 & 255; }
constexpr uint32_t detail_of(Label l) { return l >> 16; }
inline constexpr uint32_t ELDER = 1u << 15;  // of a detail: the move is the predecessor's, its operation below
inline constexpr uint32_t RIVAL = 1u << 14;  // ... which attaches itself: one of the words of that

// Epoch word of a successor that clears the ring: nobody's epoch, so that whoever was there finds itself superseded.
inline constexpr uint64_t FENCE = uint64_t(1) << 31;

inline constexpr int64_t POISON = INT64_MIN;

// R3, as a front end counts.
constexpr uint64_t sequence_number(uint64_t index) { return index % ((uint64_t(1) << SEQ_BITS) - 1) + 1; }

class World {
 public:
  World(const Config& config, const Scope& scope)
      : config_(config), scope_(scope), layout_(config), now(config, layout_), was(config, layout_) {
    init_state(now.c);
    for (uint64_t i = 0; i < uint64_t(config.pages) * config.page_size; ++i) now.kv[i] = POISON;
    now.env->ticks = scope.ticks;
    for (uint32_t r = 0; r < config.rings; ++r) {
      now.env->front_ends[r].epoch = 1;
      store_release(&now.c.ring(r).front_end->epoch, 1);
    }
    SoloGroup group(scratch_);
    poll_rings(now.c, group, 0);  // all front ends are attached
    was.copy(now);
  }

  // ---- which transitions there are in `now`

  void enabled(std::vector<Label>& out) const {
    out.clear();
    const bool stopped = now.c.head->state == uint32_t(EngineState::STOPPED);
    if (!stopped) {
      out.push_back(label_of(POLL));
      if (now.c.head->in_flight == 0) {
        out.push_back(label_of(BOUNDARY));
      } else if (!(scope_.plant == PLANT_NO_BOUNDARY && was_cancelled())) {
        const uint32_t n = vectors();
        for (uint32_t i = 0; i < n; ++i) out.push_back(label_of(BOUNDARY, 0, i));
      }
      if (scope_.ticks != 0 && now.env->ticks != 0) out.push_back(label_of(TICK));
      const ControlLine& asked = *now.c.control;
      const bool drains = scope_.host == HOST_DRAIN || scope_.host == HOST_DRAIN_THEN_STOP;
      const bool stops = scope_.host == HOST_STOP || scope_.host == HOST_DRAIN_THEN_STOP;
      if (drains && asked.drain_request == 0) {
        out.push_back(label_of(HOST));
      } else if (stops && asked.stop_request == 0) {
        out.push_back(label_of(HOST, 0, 1));
      }
    }
    for (uint32_t r = 0; r < config_.rings; ++r) front_end_moves(r, out);
  }

  // ---- one transition. Afterwards `was` must still be the state before it.

  void apply(Label label) {
    const uint32_t r = ring_of(label);
    switch (action_of(label)) {
      case POLL: {
        SoloGroup group(scratch_);
        if (scope_.plant == PLANT_DEAF) deafen();
        poll_rings(now.c, group, now.env->now);
        return after_scheduler();
      }
      case BOUNDARY: return boundary(detail_of(label));
      case TICK:
        now.env->now += scope_.tick_us;
        if (now.env->ticks > 0) --now.env->ticks;
        return;
      case HOST: {
        ControlLine& line = *now.c.control;
        return store_release(detail_of(label) == 0 ? &line.drain_request : &line.stop_request, 1);
      }
      case CRASH: return crash(r);
      case SUPERSEDE: return supersede(r);
      case DELIVER:
        return (detail_of(label) & ELDER) != 0 ? deliver_elder(r) : deliver(r, front_end(r), detail_of(label));
      case SKIP: ++mover(label).op; return;
      case CONSUME: return consume(r, mover(label));
      case CREDIT: return store_release(&now.c.ring(r).front_end->cq_head, mover(label).consumed);
      case RENEW: {
        uint64_t& lease = now.c.ring(r).front_end->lease;
        return store_release(&lease, lease + 1);
      }
      default: throw std::logic_error("unknown action");
    }
  }

  // Request of the program, or -1. `epoch`: of the front end that its ring follows.
  int32_t find(uint32_t ring, uint32_t slot, uint32_t generation, uint64_t epoch) const {
    for (uint32_t i = 0; i < scope_.requests.size(); ++i) {
      const ProgramRequest& q = scope_.requests[i];
      if (q.ring == ring && q.slot == slot && q.generation == generation && q.epoch == epoch) return int32_t(i);
    }
    return -1;
  }
  int32_t find(uint32_t request, uint32_t generation) const {
    const uint32_t ring = now.c.ring_of(request);
    return find(ring, now.c.slot_of(request), generation, now.c.rings[ring].epoch);
  }

  // Token that the model gives request `id` of the program as its output `index`: neither end-of-sequence nor a stop id.
  int32_t output(uint32_t id, uint32_t index) const {
    return int32_t(config_.vocab - 1 - (id * 7 + index) % (config_.vocab / 2));
  }

  // KV of a token: with the prefix cache, pages of equal tokens are one and the same.
  int64_t tag(int32_t token, uint32_t position, int32_t id) const {
    const int64_t owner = config_.prefix_cache != 0 ? 0 : id + 1;
    return owner << 48 | int64_t(position) << 32 | uint32_t(token);
  }

  // Whether the ring follows the word of a successor that has not attached yet: its requests are nobody's.
  bool fenced(uint32_t r) const { return (now.c.rings[r].epoch & FENCE) != 0; }

  const Config& config() const { return config_; }
  const Scope& scope() const { return scope_; }
  bool launched = false;        // the last transition was a boundary that launched a step

  // Number of outcome vectors of the step in flight.
  uint32_t vectors() const {
    const uint32_t kinds = row_outcomes();
    uint32_t n = 1;
    for (uint32_t i = 0; i < now.c.plan->n_samples; ++i) n *= kinds;
    return n + ((scope_.outcomes >> STEP_FAILED & 1) != 0 ? 1 : 0);
  }

  // Outcome of sampled row `sample` in vector `detail`.
  Outcome outcome(uint32_t detail, uint32_t sample) const {
    const uint32_t kinds = row_outcomes();
    for (uint32_t i = 0; i < sample; ++i) detail /= kinds;
    uint32_t nth = detail % kinds;
    for (uint32_t kind = OK; kind < STEP_FAILED; ++kind) {
      if ((scope_.outcomes >> kind & 1) != 0 && nth-- == 0) return Outcome(kind);
    }
    return OK;
  }
  bool fails(uint32_t detail) const {
    return (scope_.outcomes >> STEP_FAILED & 1) != 0 && detail + 1 == vectors();
  }

 private:
  FrontEnd& front_end(uint32_t r) { return now.env->front_ends[r]; }
  FrontEnd& mover(Label label) {
    return ((detail_of(label) & ELDER) != 0 ? now.env->elders : now.env->front_ends)[ring_of(label)];
  }
  uint32_t row_outcomes() const { return uint32_t(__builtin_popcount(scope_.outcomes & ((1u << STEP_FAILED) - 1))); }

  bool was_cancelled() const {
    for (uint32_t i = 0; i < now.env->n_flight; ++i) {
      const Request& q = now.c.requests[now.env->flight[i].request];
      if (q.state != uint32_t(RequestState::RUNNING) || q.generation != now.env->flight[i].generation) return true;
    }
    return false;
  }

  void front_end_moves(uint32_t r, std::vector<Label>& out) const {
    const FrontEnd& f = now.env->front_ends[r];
    if (f.dead) return;
    const std::vector<Op>& ops = scope_.programs[r];
    const bool at_end = f.op >= ops.size();
    const bool attaching = !at_end && ops[f.op].kind == OpKind::ATTACH;
    const bool acknowledged = now.c.ring(r).gpu->epoch_ack == f.epoch;
    bool successor = false, beside = false, during = false;
    for (size_t i = f.op + (f.crashed ? 1 : 0); i < ops.size(); ++i) {
      if (ops[i].kind != OpKind::ATTACH) continue;
      if (!successor) beside = ops[i].optional, during = ops[i].during;
      successor = true;
    }
    const FrontEnd& e = now.env->elders[r];
    successor &= f.alone == 0 && !(e.lives && e.crashed);  // of rivals one has the ring in the end
    if (successor || (scope_.may_die >> r & 1) != 0) out.push_back(label_of(CRASH, r));
    if (beside && successor && !f.crashed && f.part == 0 && acknowledged) out.push_back(label_of(SUPERSEDE, r));
    if (during && successor && f.crashed && !e.lives) out.push_back(label_of(SUPERSEDE, r));
    if (now.env->elders[r].lives) elder_moves(r, out);
    if (!f.crashed && acknowledged) {
      if (f.consumed < now.c.ring(r).gpu->cq_tail) out.push_back(label_of(CONSUME, r));
      if (now.c.ring(r).front_end->cq_head != f.consumed) out.push_back(label_of(CREDIT, r));
      if (config_.lease_us != 0 && now.c.ring(r).front_end->lease == now.c.rings[r].lease) {
        out.push_back(label_of(RENEW, r));
      }
    }
    if (at_end || (attaching ? !f.crashed : !acknowledged)) return;
    const Op& op = ops[f.op];
    if (op.kind == OpKind::ATTACH) return out.push_back(label_of(DELIVER, r));
    if (op.optional && f.part == 0) out.push_back(label_of(SKIP, r));
    const bool ready = may_publish(r, f, op);
    if (op.kind == OpKind::CANCEL) {
      if (ready) out.push_back(label_of(DELIVER, r));
      return;
    }
    if (f.part == 0 && !ready) return;
    if (!scope_.unordered) return out.push_back(label_of(DELIVER, r, next_part(f.part)));
    for (uint32_t part = 0; part < 4; ++part) {
      if ((f.part >> part & 1) == 0) out.push_back(label_of(DELIVER, r, part));
    }
  }

  // Room for the entry, and for a submission a slot whose last request has ended.
  bool may_publish(uint32_t r, const FrontEnd& f, const Op& op) const {
    const ProgramRequest& q = scope_.requests[op.arg];
    const bool reused = scope_.plant == PLANT_EARLY_REUSE || q.after < 0 || now.env->watch[q.after].seen != 0;
    const bool space = f.sq_tail - now.c.ring(r).gpu->sq_head < config_.sq_entries;
    return space && (reused || op.kind == OpKind::CANCEL);
  }

  // A predecessor that lives: it has not found another epoch yet, for each of its operations looks first.
  void elder_moves(uint32_t r, std::vector<Label>& out) const {
    const FrontEnd& e = now.env->elders[r];
    if (e.crashed) return out.push_back(label_of(DELIVER, r, ELDER | RIVAL | e.op));
    if (now.c.ring(r).gpu->epoch_ack != e.epoch) return;
    if (e.consumed < now.c.ring(r).gpu->cq_tail) out.push_back(label_of(CONSUME, r, ELDER));
    if (now.c.ring(r).front_end->cq_head != e.consumed) out.push_back(label_of(CREDIT, r, ELDER));
    const Op& op = scope_.programs[r][e.op];
    if (op.kind == OpKind::ATTACH) return;
    if (op.optional) out.push_back(label_of(SKIP, r, ELDER | e.op));
    if (may_publish(r, e, op)) out.push_back(label_of(DELIVER, r, ELDER | e.op));
  }

  uint32_t next_part(uint8_t delivered) const {
    constexpr uint32_t in_order[4] = {0, 1, 2, 3}, early[4] = {0, 1, 3, 2};
    return (scope_.plant == PLANT_ENTRY_FIRST ? early : in_order)[__builtin_popcount(delivered)];
  }

  void publish(uint32_t r, FrontEnd& f, ::blink::Op op, uint32_t id) {
    const ProgramRequest& q = scope_.requests[id];
    const uint64_t word = sequence_number(f.sq_tail) << SQ_SEQ_SHIFT | uint64_t(op) << SQ_OP_SHIFT |
                          uint64_t(q.slot) << SQ_SLOT_SHIFT | uint64_t(q.generation) << SQ_GENERATION_SHIFT;
    store_release(&now.c.ring(r).sq[f.sq_tail & (config_.sq_entries - 1)], word);
    if (op == ::blink::Op::SUBMIT) {
      now.env->watch[id].published = 1;
      now.env->watch[id].entry = uint8_t(f.sq_tail);
    } else {
      now.env->watch[id].cancelled = 1;
    }
    ++f.sq_tail;
  }

  // The NIC delivers one write of the front end: payload, a part of a descriptor, or an aligned word.
  void deliver(uint32_t r, FrontEnd& f, uint32_t part) {
    const Op& op = scope_.programs[r][f.op];
    const RingMemory m = now.c.ring(r);
    if (op.kind == OpKind::ATTACH) return deliver_attach(r, &f == &now.env->elders[r], op.arg);
    if (op.kind == OpKind::CANCEL) {
      publish(r, f, ::blink::Op::CANCEL, op.arg);
      return done(f);
    }
    const ProgramRequest& q = scope_.requests[op.arg];
    uint8_t* slot = reinterpret_cast<uint8_t*>(&m.slots[q.slot]);
    const uint8_t* from = reinterpret_cast<const uint8_t*>(&q.descriptor);
    constexpr size_t line = 64;  // a descriptor may become visible cache line by cache line
    if (part == 0) {
      std::memcpy(m.arena + q.descriptor.prompt_offset, q.payload.data(), q.payload.size() * sizeof(int32_t));
    } else if (part == 3) {
      publish(r, f, ::blink::Op::SUBMIT, op.arg);
    } else if (part == 1) {
      std::memcpy(slot, from, line);
    } else {
      std::memcpy(slot + line, from + line, sizeof(Slot) - line);
    }
    f.part = uint8_t(f.part | 1u << part);
    if (f.part == 15) done(f);
  }

  // All words of one operation, for nobody looks at the epoch between them (RingClient.check_epoch).
  void deliver_elder(uint32_t r) {
    FrontEnd& e = now.env->elders[r];
    const uint8_t op = e.op;
    if (e.crashed) return deliver(r, e, 0);  // a word of an attach
    for (uint32_t part = 0; part < 4 && e.op == op; ++part) deliver(r, e, part);
    if (front_end(r).part != 0) e.wrote = 1;
  }

  // Words of an attach, in the order of blink_core/frontend/ring_client.py: queue and head, so that nothing old is taken
  // under the fence; the fence; queue and head again, for what a predecessor wrote meanwhile; lease, epoch. Before the
  // second clearing and before the epoch it looks for its fence, and gives up if that is not the last word.
  //
  // second: it is the elder of two that attach at once, or of one that attaches and one that is attached.
  void deliver_attach(uint32_t r, bool second, uint32_t epoch) {
    FrontEnd &f = (second ? now.env->elders : now.env->front_ends)[r];
    FrontEnd &other = (second ? now.env->front_ends : now.env->elders)[r];
    const RingMemory m = now.c.ring(r);
    const bool rival = second || other.lives;
    const uint32_t cleared = config_.sq_entries + 1, again = 2 * cleared + 1;
    if (scope_.plant == PLANT_ATTACH_ONCE && f.part == cleared) f.part = uint8_t(again);
    const bool looks = (f.part == cleared + 1 || f.part == again + 1) && scope_.plant != PLANT_NO_LOOK;
    if (looks && scope_.plant != PLANT_ATTACH_ONCE && m.front_end->epoch != (epoch | FENCE)) return leave(r, second);
    if (f.part < cleared || (f.part > cleared && f.part < again)) {
      clear_word(m, f.part++ % (cleared + 1));
    } else if (f.part == cleared) {
      store_release(&m.front_end->epoch, epoch | FENCE), ++f.part;
      if (rival && !other.crashed) leave(r, !second);  // attached: each of its operations looks first
    } else if (f.part == again) {
      store_release(&m.front_end->lease, m.front_end->lease + 1), ++f.part;
    } else {
      // What the other posted behind a look at its fence is there by now: one that is frozen in between is not modelled.
      if (rival && other.crashed && other.part > cleared + 1 && other.part < again) {
        while (other.part < again) clear_word(m, other.part++ % (cleared + 1));
      }
      store_release(&m.front_end->epoch, epoch);
      f.epoch = epoch;
      f.consumed = f.sq_tail = f.crashed = 0;
      done(f);
      const bool goes_on = other.crashed && (other.part <= cleared || scope_.plant == PLANT_NO_LOOK);
      if (rival && !goes_on) leave(r, !second);  // its fence is not the last word
    }
  }

  void clear_word(const RingMemory& m, uint32_t at) const {
    store_release(at < config_.sq_entries ? &m.sq[at] : &m.front_end->cq_head, 0);
  }

  // A front end finds itself shut out by another that attached with it: that one has the ring, and nobody follows it.
  void leave(uint32_t r, bool elder) {
    FrontEnd &f = now.env->front_ends[r], &e = now.env->elders[r];
    if (!elder) f = e, f.alone = 1;
    e = {};
  }

  static void done(FrontEnd& f) {
    f.executed |= 1u << f.op;
    ++f.op;
    f.part = 0;
  }

  void crash(uint32_t r) {
    FrontEnd& f = front_end(r);
    const std::vector<Op>& ops = scope_.programs[r];
    if (!f.crashed) f.crash_op = f.op, f.crash_part = f.part;
    if (f.crashed) ++f.op;  // died while it attached: another one does
    while (f.op < ops.size() && ops[f.op].kind != OpKind::ATTACH) ++f.op;
    f.part = 0;
    (f.op < ops.size() ? f.crashed : f.dead) = 1;
  }

  // A successor begins to attach beside a front end that lives, or attaches itself, and goes on.
  void supersede(uint32_t r) {
    FrontEnd& f = front_end(r);
    now.env->elders[r] = f;
    now.env->elders[r].lives = 1;
    if (f.crashed) ++f.op, f.part = 0;
    while (scope_.programs[r][f.op].kind != OpKind::ATTACH) ++f.op;
    f.crashed = 1;
  }

  void consume(uint32_t r, FrontEnd& f) {
    const RingMemory m = now.c.ring(r);
    if (scope_.plant == PLANT_READS_AGAIN && f.consumed > m.front_end->cq_head) {
      f.consumed = m.front_end->cq_head;
      return;
    }
    do {
      const Event& e = m.cq[f.consumed & (config_.cq_entries - 1)];
      if (e.seq != f.consumed + 1) {
        throw Violation{"R9", "ring " + std::to_string(r) + ": event " + std::to_string(f.consumed) +
                                  " is published and shows seq " + std::to_string(e.seq)};
      }
      ++f.consumed;
      if (e.kind == uint8_t(EventKind::FINISH) || e.kind == uint8_t(EventKind::ERROR)) {
        const int32_t id = find(r, e.slot, e.generation, f.epoch);
        if (id >= 0) now.env->watch[id].seen = 1;
      }
    } while (scope_.consume_all && f.consumed < m.gpu->cq_tail);
  }

  // The step in flight, if any, ends with the given outcomes, and the scheduler goes over the boundary.
  void boundary(uint32_t detail) {
    if (now.c.head->in_flight != 0) complete(detail);
    SoloGroup group(scratch_);
    uint64_t& stop = now.c.control->stop_request;
    const uint64_t asked = stop;
    if (scope_.plant == PLANT_NEVER_STOPS && now.c.head->state != uint32_t(EngineState::READY)) stop = 0;
    launched = step_boundary(now.c, group, now.env->now);
    stop = asked;
    if (now.c.head->state == uint32_t(EngineState::STOPPED)) publish_events(now.c);  // as the loop does at its end
    if (launched) launch();
    after_scheduler();
  }

  // The fake model, as late as it may be: all writes, then all reads, after whatever happened while the step ran.
  void complete(uint32_t detail) {
    const Context& c = now.c;
    for (uint32_t place = 0; place < c.plan->n_rows; ++place) {
      const PlanRow& row = c.plan_rows[place];
      const int32_t id = find(row.ring, row.slot, row.generation, now.env->flight[place].epoch);
      for (uint32_t i = row.q_start; i < row.q_start + row.q_len; ++i) {
        uint64_t at = uint64_t(c.plan_kv_slots[i]);
        if (scope_.plant == PLANT_KV_ELSEWHERE && place > 0 && i == row.q_start) at = c.plan_kv_slots[0];
        now.kv[at] = tag(c.plan_token_ids[i], uint32_t(c.plan_positions[i]), id);
      }
    }
    uint32_t sample = 0;
    for (uint32_t place = 0; place < c.plan->n_rows; ++place) {
      const PlanRow& row = c.plan_rows[place];
      const int32_t id = find(row.ring, row.slot, row.generation, now.env->flight[place].epoch);
      const Request& q = c.requests[row.request];
      const bool lives = q.state == uint32_t(RequestState::RUNNING) && q.generation == row.generation &&
                         c.rings[row.ring].epoch == now.env->flight[place].epoch;
      if (lives) read_context(row, id);
      if (row.sample == 0) continue;
      const Outcome out = outcome(detail, sample++);
      StepResult& result = c.results[place];
      result.token = out == EOS ? config_.eos_ids[0] : out == BAD_ID ? int32_t(config_.vocab) : output(id, row.emitted);
      result.logprob = -1.0f;
      result.status = uint32_t(out == NAN_ROW        ? StepStatus::NAN_LOGITS
                               : out == NO_TOKEN_ROW ? StepStatus::NO_TOKEN
                                                     : StepStatus::OK);
    }
    if (fails(detail)) c.plan->status = uint32_t(StepStatus::FAILED);
  }

  // What attention reads for a row: every position of its context, through its block table.
  void read_context(const PlanRow& row, int32_t id) const {
    const uint32_t size = config_.page_size;
    const int32_t* tokens = now.c.tokens_of(row.request);
    for (uint32_t i = 0; i < row.context_len; ++i) {
      const uint32_t page = now.c.table_of(row.row)[i / size];
      if (page < config_.pages && now.kv[uint64_t(page) * size + i % size] == tag(tokens[i], i, id)) continue;
      throw Violation{"K1", "request " + std::to_string(row.request) + " reads position " + std::to_string(i) +
                                " from page " + std::to_string(page) + ", which holds something else"};
    }
  }

  void launch() {
    const Context& c = now.c;
    Env& env = *now.env;
    env.n_flight = c.plan->n_rows;
    for (uint32_t place = 0; place < c.plan->n_rows && place < MAX_ROWS; ++place) {
      const PlanRow& row = c.plan_rows[place];
      Flight& f = env.flight[place];
      f = {c.rings[row.ring].epoch, row.request, row.generation, 0, 0};
      for (uint32_t i = 0; i < row.n_pages && i < config_.max_pages; ++i) {
        f.pages |= 1u << (c.table_of(row.row)[i] & (MAX_PAGES - 1));
      }
    }
  }

  // PLANT_DEAF: what the scheduler sees of a cancel is one of nobody.
  void deafen() {
    for (uint32_t r = 0; r < config_.rings; ++r) {
      for (uint32_t i = 0; i < config_.sq_entries; ++i) {
        uint64_t& word = now.c.ring(r).sq[i];
        if ((word >> SQ_OP_SHIFT & 0xF) == uint64_t(::blink::Op::CANCEL)) word |= uint64_t(1) << 63;
      }
    }
  }

  // What nobody owns holds nothing that could be mistaken for KV. Plants that corrupt the scheduler's memory act here.
  void after_scheduler() {
    const Context& c = now.c;
    if (c.head->in_flight == 0) now.env->n_flight = 0;
    if (scope_.plant == PLANT_FREED_IN_STEP && c.head->quarantined > 0) {
      const uint32_t page = c.quarantine[--c.head->quarantined];
      c.pages[page].state = uint32_t(PageState::FREE);
      c.free_list[c.head->free_pages++] = page;
    }
    if (scope_.plant == PLANT_LOST_EVENT) {
      for (uint32_t r = 0; r < config_.rings; ++r) {
        RingState& rs = c.rings[r];
        const Event& last = c.ring(r).cq[(rs.cq_tail - 1) & (config_.cq_entries - 1)];
        if (rs.cq_tail > was.c.rings[r].cq_tail && rs.cq_tail > 2 && last.kind == uint8_t(EventKind::FINISH)) {
          --rs.cq_tail;
        }
      }
    }
    for (uint32_t page = RESERVED_PAGES; page < config_.pages; ++page) {
      if (c.pages[page].state != uint32_t(PageState::FREE)) continue;
      int64_t* kv = now.kv + uint64_t(page) * config_.page_size;
      for (uint32_t i = 0; i < config_.page_size; ++i) kv[i] = POISON;
    }
  }

  Config config_;
  const Scope& scope_;
  BlockLayout layout_;
  Scratch scratch_{};

 public:
  Block now, was;
};

}  // namespace blink::explore
