// The scheduler's side of the rings: take submissions and cancels, validate, follow epochs and credits.
// Runs while a step runs as well as between steps. Nothing a front end wrote is trusted (design section 3).
#pragma once

#include <cuda/std/bit>

#include "checksum.hpp"
#include "group.hpp"
#include "lease.hpp"
#include "mask.hpp"

namespace blink {

// Outcome of looking at one submission: taken, refused with an ErrorReason, ignored, or not yet visible.
struct Judgement {
  enum Kind : uint32_t { ACCEPT, REFUSE, IGNORE, RETRY } kind;
  ErrorReason reason;
};

BLINK_FN bool finite(float x) { return x - x == 0.0f; }

BLINK_FN float float_of(uint32_t bits) { return cuda::std::bit_cast<float>(bits); }
BLINK_FN uint32_t bits_of(float value) { return cuda::std::bit_cast<uint32_t>(value); }

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

inline constexpr uint32_t KNOWN_FLAGS =
    uint32_t(SlotFlag::IGNORE_EOS) | uint32_t(SlotFlag::NO_PREFIX_CACHE) | uint32_t(SlotFlag::MASKED);

// 32-bit words of a request's payload in the arena: prompt, then logit-bias pairs.
BLINK_FN uint64_t payload_words(const Slot& s) { return uint64_t(s.prompt_len) + 2 * uint64_t(s.n_bias); }

// What may be said of a descriptor by itself.
BLINK_FN ErrorReason judge_fields(const Context& c, const Slot& s, bool& ok) {
  ok = false;
  const Config& k = *c.config;
  if (s.prompt_len == 0 || s.prompt_len >= k.max_len) return ErrorReason::BAD_LENGTH;
  if (s.max_tokens == 0 || s.max_tokens > k.max_len) return ErrorReason::BAD_LENGTH;
  if (s.prompt_offset > k.arena_tokens || s.prompt_len > k.arena_tokens - s.prompt_offset) {
    return ErrorReason::BAD_EXTENT;
  }
  if (s.n_bias > k.max_bias) return ErrorReason::BAD_PARAM;
  if (payload_words(s) > k.arena_tokens - s.prompt_offset) return ErrorReason::BAD_EXTENT;
  if (!(finite(s.temperature) && s.temperature >= 0.0f)) return ErrorReason::BAD_PARAM;
  if (!(s.top_p > 0.0f && s.top_p <= 1.0f)) return ErrorReason::BAD_PARAM;
  if (!(s.min_p >= 0.0f && s.min_p <= 1.0f)) return ErrorReason::BAD_PARAM;
  if (!(finite(s.repetition_penalty) && s.repetition_penalty > 0.0f)) return ErrorReason::BAD_PARAM;
  if (!finite(s.presence_penalty) || !finite(s.frequency_penalty)) return ErrorReason::BAD_PARAM;
  if (s.min_tokens > s.max_tokens || s.priority >= PRIORITIES) return ErrorReason::BAD_PARAM;
  // A token and its alternatives must fit into the completion queue beside every slot's terminal event.
  if (s.logprobs > k.max_logprobs || 1 + logprobs_events(s.logprobs) + k.slots > k.cq_entries) {
    return ErrorReason::BAD_PARAM;
  }
  if ((s.flags & ~KNOWN_FLAGS) != 0) return ErrorReason::BAD_PARAM;
  const bool masked = (s.flags & uint32_t(SlotFlag::MASKED)) != 0;
  if (masked ? s.mask_box >= k.masks : s.mask_box != 0) return ErrorReason::BAD_PARAM;
  if (s.n_stop > MAX_STOP_IDS) return ErrorReason::BAD_PARAM;
  for (uint32_t i = 0; i < s.n_stop; ++i) {
    if (s.stop_ids[i] < 0 || uint32_t(s.stop_ids[i]) >= k.vocab) return ErrorReason::BAD_TOKEN;
  }
  if (pages_for(c, longest(c, s.prompt_len, s.max_tokens) - 1) > k.pages - RESERVED_PAGES) {
    return ErrorReason::NEVER_FITS;
  }
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

// Copies prompt and logit bias into engine memory; checks them there, so that a later change by the front end cannot
// matter. The slot's previous request may still be in a step whose result will be dropped: it may read what is written.
template <class Group>
BLINK_FN Judgement take_payload(const Context& c, const RingMemory& m, uint32_t request, Group& g) {
  const Slot& s = g.scratch.slot;
  const uint32_t* src = reinterpret_cast<const uint32_t*>(m.arena) + s.prompt_offset;
  int32_t* dst = c.tokens_of(request);
  uint64_t sum = 0;
  bool bad_token = false, bad_bias = false;
  for (uint32_t i = g.rank(); i < s.prompt_len; i += g.size()) {
    const int32_t token = int32_t(read_once(src + i));
    dst[i] = token;
    sum += mix_word(uint32_t(token), i);
    bad_token |= token < 0 || uint32_t(token) >= c.config->vocab;
  }
  BiasPair* pairs = c.bias_of(request);
  for (uint32_t i = g.rank(); i < s.n_bias; i += g.size()) {
    const uint32_t at = s.prompt_len + 2 * i, token = read_once(src + at), bits = read_once(src + at + 1);
    pairs[i] = {int32_t(token), float_of(bits)};
    sum += mix_word(token, at) + mix_word(bits, at + 1);
    bad_token |= token >= c.config->vocab;
    bad_bias |= !finite(pairs[i].bias);
  }
  sum = g.sum(sum);
  bad_token = g.any(bad_token);
  bad_bias = g.any(bad_bias);
  if (sum != s.prompt_checksum) return {Judgement::RETRY, ErrorReason::CHECKSUM};
  if (bad_token) return {Judgement::REFUSE, ErrorReason::BAD_TOKEN};
  if (bad_bias) return {Judgement::REFUSE, ErrorReason::BAD_PARAM};
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
  return take_payload(c, m, request, g);
}

// Clock at which a request ends that may take `deadline_us`; 0: never.
BLINK_FN uint64_t expiry(uint64_t clock, uint64_t deadline_us) {
  if (deadline_us == 0) return 0;
  return deadline_us < ~uint64_t(0) - clock ? clock + deadline_us : ~uint64_t(0);
}

// Rank 0: a valid submission becomes a waiting request.
BLINK_FN void accept(const Context& c, uint32_t ring, uint32_t slot, const Slot& s, uint64_t sq_index) {
  const uint32_t request = c.request_index(ring, slot);
  Request& q = c.requests[request];
  q.arrival = c.head->arrivals++;
  q.tag = s.tag;
  q.expires = expiry(c.head->clock, s.deadline_us);
  if (q.expires != 0 && (c.head->next_expiry == 0 || q.expires < c.head->next_expiry)) c.head->next_expiry = q.expires;
  q.chain = 0;
  q.generation = q.judged = s.generation;
  q.priority = s.priority;
  q.prompt_len = s.prompt_len;
  q.max_tokens = s.max_tokens;
  q.total = s.prompt_len;
  q.computed = q.emitted = q.n_pages = q.published = q.cached = q.preemptions = q.paused = q.admitted = 0;
  q.mask_index = 0;
  q.mask_box = s.mask_box;
  q.row = -1;
  Sampling& p = c.sampling[request];
  p.seed = s.seed;
  p.temperature = s.temperature;
  p.top_p = s.top_p;
  p.min_p = s.min_p;
  p.top_k = s.top_k;
  p.repetition_penalty = s.repetition_penalty;
  p.presence_penalty = s.presence_penalty;
  p.frequency_penalty = s.frequency_penalty;
  p.min_tokens = s.min_tokens;
  p.prompt_len = s.prompt_len;
  p.n_bias = s.n_bias;
  p.logprobs = s.logprobs;
  p.flags = s.flags;
  p.choice = s.choice;
  p.n_stop = s.n_stop;
  for (uint32_t i = 0; i < MAX_STOP_IDS; ++i) p.stop_ids[i] = s.stop_ids[i];
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

// Rank 0: a descriptor or prompt was found torn. True once that has lasted for the visibility deadline.
BLINK_FN bool out_of_sight(const Context& c, RingState& rs) {
  if (rs.retries++ == 0) {
    rs.retry_at = c.head->clock;
    ++rs.torn;
    store_release(&c.status->torn, c.status->torn + 1);
  }
  return c.head->clock - rs.retry_at >= c.config->visibility_us;
}

// Rank 0: acts on one entry that has been judged, and moves on.
BLINK_FN void settle(const Context& c, uint32_t ring, uint64_t word, uint64_t index, const Judgement& j, const Slot& s) {
  RingState& rs = c.rings[ring];
  const uint32_t slot = uint32_t(word >> SQ_SLOT_SHIFT) & (MAX_SLOTS - 1);
  const uint32_t generation = uint32_t(word >> SQ_GENERATION_SHIFT);
  log_event(c, LogLevel::ALL, LogKind::SQ_ENTRY, ring, slot, generation, uint32_t(word), uint32_t(word >> 32),
            uint32_t(index));
  if ((uint32_t(word >> SQ_OP_SHIFT) & 0xF) == uint32_t(Op::CANCEL)) {
    cancel(c, ring, slot, generation, index);
  } else if (j.kind == Judgement::ACCEPT) {
    accept(c, ring, slot, s, index);
  } else if (j.kind == Judgement::IGNORE) {
    ++rs.duplicates;
  } else {
    refuse(c, ring, slot, generation, j.reason, index);
  }
  rs.lease_at = c.head->clock;  // a sign of life
  rs.retries = 0;
  ++rs.sq_next;
}

// Takes the visible entries of one ring in order, at most one lap. Returns the number taken. A cancel needs no credit
// itself, but waits behind a submission that lacks terminal credit or is still torn (the latter for at most
// visibility_us): entries are never taken out of order.
template <class Group>
BLINK_FN uint32_t poll_ring(const Context& c, uint32_t ring, Group& g) {
  const RingMemory m = c.ring(ring);
  RingState& rs = c.rings[ring];
  const uint32_t words = ring * RING_WORDS;
  const uint64_t epoch = g.broadcast(g.rank() == 0 ? g.peek(words, &m.front_end->epoch) : 0);
  if (epoch != rs.epoch) {
    g.sync();
    if (g.rank() == 0) change_epoch(c, ring, epoch);
    g.sync();
    return 1;
  }
  if (epoch == 0) return 0;  // no front end yet
  if (g.rank() == 0) {
    const uint64_t head = g.peek(words + 1, &m.front_end->cq_head);
    if (head >= rs.cq_head && head <= rs.cq_published) {
      if (head != rs.cq_head) {
        log_event(c, LogLevel::ALL, LogKind::CREDITS, ring, 0, 0, uint32_t(head), uint32_t(head >> 32), 0);
      }
      rs.cq_head = head;
    } else if (head != 0) {  // a front end about to attach has cleared it
      ++rs.bad_heads;
    }
    if (c.config->lease_us != 0) watch_lease(c, ring, g.peek(words + 2, &m.front_end->lease));
  }
  g.sync();
  uint32_t taken = 0;
  constexpr uint32_t seq_mask = (1u << SEQ_BITS) - 1;
  while (taken < c.config->sq_entries) {
    const uint64_t index = rs.sq_next;
    const uint64_t* entry = &m.sq[index & (c.config->sq_entries - 1)];
    const uint64_t word =
        g.broadcast(g.rank() != 0 ? 0 : taken < PEEKED_ENTRIES ? g.peek(words + 3 + taken, entry) : load_acquire(entry));
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
    bool torn = false;
    g.sync();
    if (g.rank() == 0) {
      torn = j.kind == Judgement::RETRY && !is_cancel && !out_of_sight(c, rs);
      if (!torn) settle(c, ring, word, index, j, g.scratch.slot);
    }
    if (g.any(torn)) break;
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

// Looks at every ring once, takes masks, publishes events and the heartbeat. Returns what it took.
template <class Group>
BLINK_FN uint32_t look_at_rings(const Context& c, Group& g) {
  uint32_t taken = 0;
  if (g.rank() == 0) expire(c);  // also while a step runs, however long it takes
  g.sync();
  for (uint32_t ring = 0; ring < c.config->rings; ++ring) taken += poll_ring(c, ring, g);
  if (c.config->masks > 0) taken += poll_masks(c, g);
  if (g.rank() == 0) {
    publish_events(c);
    if (g.beats()) beat(c);
  }
  g.sync();
  return taken;
}

// One poll at `now`, in microseconds.
template <class Group>
BLINK_FN uint32_t poll_rings(const Context& c, Group& g, uint64_t now) {
  if (g.rank() == 0) begin_call(c, false, now);
  return look_at_rings(c, g);
}

}  // namespace blink
