// The scheduler's side of the rings: take submissions and cancels, validate, follow epochs and credits.
// Runs while a step runs as well as between steps. Nothing a front end wrote is trusted (design section 3).
#pragma once

#include "checksum.hpp"
#include "group.hpp"
#include "lifecycle.hpp"

namespace blink {

// Outcome of looking at one submission: taken, refused with an ErrorReason, ignored, or not yet visible.
struct Judgement {
  enum Kind : uint32_t { ACCEPT, REFUSE, IGNORE, RETRY } kind;
  ErrorReason reason;
};

BLINK_FN bool finite(float x) { return x - x == 0.0f; }

// Sequence number of the submission entry at `index`; never 0.
BLINK_FN uint32_t sq_seq(uint64_t index) { return uint32_t(index % ((1u << SEQ_BITS) - 1)) + 1; }

// Front-end memory may change under us: each word is read once, and what was read is what is judged.
BLINK_FN uint32_t read_once(const uint32_t* word) { return *static_cast<const volatile uint32_t*>(word); }

// True if generation `a` is newer than `b` in serial arithmetic of GENERATION_BITS.
BLINK_FN bool newer_generation(uint32_t a, uint32_t b) {
  const uint32_t mask = (1u << GENERATION_BITS) - 1;
  const uint32_t distance = (a - b) & mask;
  return distance != 0 && distance < (1u << (GENERATION_BITS - 1));
}

// What may be said of a descriptor by itself.
BLINK_FN ErrorReason judge_fields(const Context& c, const Slot& s, bool& ok) {
  ok = false;
  const Config& k = *c.config;
  if (s.prompt_len == 0 || s.prompt_len >= k.max_len) return ErrorReason::BAD_LENGTH;
  if (s.max_tokens == 0 || s.max_tokens > k.max_len) return ErrorReason::BAD_LENGTH;
  if (s.prompt_offset > k.arena_tokens || s.prompt_len > k.arena_tokens - s.prompt_offset) {
    return ErrorReason::BAD_EXTENT;
  }
  if (!finite(s.temperature) || s.temperature < 0.0f) return ErrorReason::BAD_PARAM;
  if (!(s.top_p > 0.0f && s.top_p <= 1.0f)) return ErrorReason::BAD_PARAM;
  if ((s.flags & ~uint32_t(SlotFlag::IGNORE_EOS)) != 0) return ErrorReason::BAD_PARAM;
  if (s.priority != 0 || s.deadline_us != 0) return ErrorReason::BAD_PARAM;
  if (s.n_stop > MAX_STOP_IDS) return ErrorReason::BAD_PARAM;
  for (uint32_t i = 0; i < s.n_stop; ++i) {
    if (s.stop_ids[i] < 0 || uint32_t(s.stop_ids[i]) >= k.vocab) return ErrorReason::BAD_TOKEN;
  }
  const uint64_t most = uint64_t(s.prompt_len) + s.max_tokens;
  const uint32_t total = most < k.max_len ? uint32_t(most) : k.max_len;
  if (pages_for(c, total - 1) > k.pages - RESERVED_PAGES) return ErrorReason::NEVER_FITS;
  ok = true;
  return ErrorReason::BAD_ENTRY;
}

// Copies the descriptor into the group's scratch and returns whether its checksum holds.
template <class Group>
BLINK_FN bool snapshot_slot(const Slot& from, Group& g) {
  const uint32_t* src = reinterpret_cast<const uint32_t*>(&from);
  uint32_t* dst = reinterpret_cast<uint32_t*>(&g.scratch.slot);
  constexpr uint32_t words = sizeof(Slot) / 4;
  constexpr uint32_t at = SLOT_CHECKSUM_OFFSET / 4;
  uint64_t sum = 0;
  for (uint32_t i = g.rank(); i < words; i += g.size()) {
    const uint32_t word = read_once(src + i);
    dst[i] = word;
    sum += mix_word(i == at || i == at + 1 ? 0 : word, i);
  }
  sum = g.sum(sum);
  g.sync();
  return sum == g.scratch.slot.checksum;
}

// Copies the prompt into the token pool; checks it there, so that a later change by the front end cannot matter.
template <class Group>
BLINK_FN Judgement take_prompt(const Context& c, const RingMemory& m, uint32_t request, Group& g) {
  const Slot& s = g.scratch.slot;
  const uint32_t* src = reinterpret_cast<const uint32_t*>(m.arena) + s.prompt_offset;
  int32_t* dst = c.tokens_of(request);
  uint64_t sum = 0;
  bool bad = false;
  for (uint32_t i = g.rank(); i < s.prompt_len; i += g.size()) {
    const int32_t token = int32_t(read_once(src + i));
    dst[i] = token;
    sum += mix_word(uint32_t(token), i);
    bad |= token < 0 || uint32_t(token) >= c.config->vocab;
  }
  sum = g.sum(sum);
  bad = g.any(bad);
  if (sum != s.prompt_checksum) return {Judgement::RETRY, ErrorReason::CHECKSUM};
  if (bad) return {Judgement::REFUSE, ErrorReason::BAD_TOKEN};
  return {Judgement::ACCEPT, ErrorReason::BAD_ENTRY};
}

template <class Group>
BLINK_FN Judgement judge_submit(const Context& c, const RingMemory& m, uint32_t ring, uint32_t slot,
                                uint32_t generation, Group& g) {
  if (slot >= c.config->slots) return {Judgement::REFUSE, ErrorReason::BAD_ENTRY};
  const uint32_t request = c.request_index(ring, slot);
  const Request& q = c.requests[request];
  if (generation == q.judged) return {Judgement::IGNORE, ErrorReason::BAD_GENERATION};
  if (!newer_generation(generation, q.judged)) return {Judgement::REFUSE, ErrorReason::BAD_GENERATION};
  if (q.state != uint32_t(RequestState::FREE)) return {Judgement::REFUSE, ErrorReason::SLOT_BUSY};
  if (c.head->state != uint32_t(EngineState::READY)) return {Judgement::REFUSE, ErrorReason::DRAINING};
  if (!snapshot_slot(m.slots[slot], g)) return {Judgement::RETRY, ErrorReason::CHECKSUM};
  const Slot& s = g.scratch.slot;
  if (s.generation != generation) return {Judgement::RETRY, ErrorReason::BAD_GENERATION};
  bool ok;
  const ErrorReason reason = judge_fields(c, s, ok);
  if (!ok) return {Judgement::REFUSE, reason};
  return take_prompt(c, m, request, g);
}

// Rank 0: a valid submission becomes a waiting request.
BLINK_FN void accept(const Context& c, uint32_t ring, uint32_t slot, const Slot& s, uint64_t sq_index) {
  const uint32_t request = c.request_index(ring, slot);
  Request& q = c.requests[request];
  q.arrival = c.head->arrivals++;
  q.seed = s.seed;
  q.tag = s.tag;
  q.generation = q.judged = s.generation;
  q.prompt_len = s.prompt_len;
  q.max_tokens = s.max_tokens;
  q.total = s.prompt_len;
  q.computed = q.emitted = q.n_pages = q.preemptions = q.paused = 0;
  q.row = -1;
  q.temperature = s.temperature;
  q.top_p = s.top_p;
  q.choice = s.choice;
  q.flags = s.flags;
  q.n_stop = s.n_stop;
  for (uint32_t i = 0; i < MAX_STOP_IDS; ++i) q.stop_ids[i] = s.stop_ids[i];
  ++c.rings[ring].live;
  ++c.head->live;
  log_event(c, LogLevel::DECISIONS, LogKind::ACCEPT, ring, slot, s.generation, s.prompt_len, s.max_tokens,
            uint32_t(sq_index));
  wait_insert(c, request);
}

// Rank 0: refuses an entry that never became a request.
BLINK_FN void refuse(const Context& c, uint32_t ring, uint32_t slot, uint32_t generation, ErrorReason reason,
                     uint64_t sq_index) {
  // A generation that got its terminal event here must not be accepted later, or it would get a second one. An entry of
  // an unknown operation says nothing of its slot.
  if (slot < c.config->slots && reason != ErrorReason::BAD_ENTRY) {
    Request& q = c.requests[c.request_index(ring, slot)];
    if (newer_generation(generation, q.judged)) q.judged = generation;
  }
  log_event(c, LogLevel::DECISIONS, LogKind::REJECT, ring, slot, generation, uint32_t(reason), 0, uint32_t(sq_index));
  emit(c, ring, slot, generation, EventKind::ERROR, uint32_t(reason), 0, -1, 0.0f);
}

BLINK_FN void cancel(const Context& c, uint32_t ring, uint32_t slot, uint32_t generation, uint64_t sq_index) {
  bool live = false;
  if (slot < c.config->slots) {
    const uint32_t request = c.request_index(ring, slot);
    const Request& q = c.requests[request];
    live = q.state != uint32_t(RequestState::FREE) && q.generation == generation;
    log_event(c, LogLevel::DECISIONS, LogKind::CANCEL, ring, slot, generation, live ? 1 : 0, 0, uint32_t(sq_index));
    if (live) terminate(c, request, EventKind::FINISH, uint32_t(FinishReason::CANCELLED));
  }
  if (!live) ++c.rings[ring].stale_cancels;
}

// Rank 0: a new front end has attached. Its predecessor's requests end without events, which nobody would read.
BLINK_FN void change_epoch(const Context& c, uint32_t ring, uint64_t epoch) {
  RingState& rs = c.rings[ring];
  uint32_t dropped = 0;
  for (uint32_t slot = 0; slot < c.config->slots; ++slot) {
    const uint32_t request = c.request_index(ring, slot);
    Request& q = c.requests[request];
    if (q.state == uint32_t(RequestState::RUNNING)) {
      release_pages(c, request);
      run_remove(c, request);
      ++dropped;
    } else if (q.state == uint32_t(RequestState::WAITING)) {
      ++dropped;
    }
    q.state = uint32_t(RequestState::FREE);
    q.generation = q.judged = 0;
  }
  c.head->live -= dropped;
  rs.epoch = epoch;
  rs.sq_next = rs.cq_tail = rs.cq_published = rs.cq_head = 0;
  rs.wait_head = rs.wait_tail = -1;
  rs.waiting = rs.live = rs.retries = 0;
  GpuLine* gpu = c.ring(ring).gpu;
  store_release(&gpu->sq_head, 0);
  store_release(&gpu->cq_tail, 0);
  log_event(c, LogLevel::DECISIONS, LogKind::EPOCH, ring, 0, 0, uint32_t(epoch), dropped, 0);
  store_release(&gpu->epoch_ack, epoch);
}

// Takes the visible entries of one ring in order, at most one lap. Returns the number taken. A cancel needs no credit
// itself, but waits behind a submission that lacks terminal credit or is still torn (the latter for at most
// visibility_polls looks): entries are never taken out of order.
template <class Group>
BLINK_FN uint32_t poll_ring(const Context& c, uint32_t ring, Group& g) {
  const RingMemory m = c.ring(ring);
  RingState& rs = c.rings[ring];
  const uint64_t epoch = g.broadcast(g.rank() == 0 ? load_acquire(&m.front_end->epoch) : 0);
  if (epoch != rs.epoch) {
    g.sync();
    if (g.rank() == 0) change_epoch(c, ring, epoch);
    g.sync();
    return 1;
  }
  if (epoch == 0) return 0;  // no front end yet
  if (g.rank() == 0) {
    const uint64_t head = load_acquire(&m.front_end->cq_head);
    if (head >= rs.cq_head && head <= rs.cq_published) {
      rs.cq_head = head;
    } else if (head != 0) {  // a front end about to attach has cleared it
      ++rs.bad_heads;
    }
  }
  uint32_t taken = 0;
  constexpr uint32_t seq_mask = (1u << SEQ_BITS) - 1;
  while (taken < c.config->sq_entries) {
    const uint64_t index = rs.sq_next;
    const uint64_t word =
        g.broadcast(g.rank() == 0 ? load_acquire(&m.sq[index & (c.config->sq_entries - 1)]) : 0);
    if ((uint32_t(word >> SQ_SEQ_SHIFT) & seq_mask) != sq_seq(index)) break;
    const uint32_t op = uint32_t(word >> SQ_OP_SHIFT) & 0xF;
    const uint32_t slot = uint32_t(word >> SQ_SLOT_SHIFT) & (MAX_SLOTS - 1);
    const uint32_t generation = uint32_t(word >> SQ_GENERATION_SHIFT);
    Judgement j{Judgement::REFUSE, ErrorReason::BAD_ENTRY};
    const bool is_cancel = op == uint32_t(Op::CANCEL);
    if (!is_cancel) {
      if (g.any(g.rank() == 0 && !terminal_credit(c, rs))) break;
      if (op == uint32_t(Op::SUBMIT)) j = judge_submit(c, m, ring, slot, generation, g);
    }
    bool stop = false;
    g.sync();
    if (g.rank() == 0) {
      if (is_cancel) {
        cancel(c, ring, slot, generation, index);
      } else if (j.kind == Judgement::RETRY && rs.retries < c.config->visibility_polls) {
        if (rs.retries++ == 0) ++rs.torn;
        stop = true;
      } else if (j.kind == Judgement::ACCEPT) {
        accept(c, ring, slot, g.scratch.slot, index);
      } else if (j.kind == Judgement::IGNORE) {
        ++rs.duplicates;
      } else {
        refuse(c, ring, slot, generation, j.reason, index);
      }
      if (!stop) {
        rs.retries = 0;
        ++rs.sq_next;
      }
    }
    if (g.any(stop)) break;
    ++taken;
  }
  if (taken > 0 && g.rank() == 0) store_release(&m.gpu->sq_head, rs.sq_next);
  return taken;
}

// Rank 0: shows every ring and the host that the scheduler lives.
BLINK_FN void beat(const Context& c) {
  const uint64_t next = c.status->heartbeat + 1;
  store_release(&c.status->heartbeat, next);
  for (uint32_t ring = 0; ring < c.config->rings; ++ring) store_release(&c.ring(ring).gpu->heartbeat, next);
}

// Looks at every ring once, publishes events and the heartbeat. Returns entries taken.
template <class Group>
BLINK_FN uint32_t poll_rings(const Context& c, Group& g) {
  uint32_t taken = 0;
  for (uint32_t ring = 0; ring < c.config->rings; ++ring) taken += poll_ring(c, ring, g);
  if (g.rank() == 0) {
    publish_events(c);
    beat(c);
  }
  g.sync();
  return taken;
}

}  // namespace blink
