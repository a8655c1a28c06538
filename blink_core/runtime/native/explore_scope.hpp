// A small scope for the explorer: what front ends, NIC, clock, host and model may do (verification/explore/encode.py
// writes it as 64-bit words), and the state of that environment beside the engine's memory.
#pragma once

#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "scheduler.hpp"

namespace blink::explore {

inline constexpr uint32_t MAX_RINGS = 3, MAX_REQUESTS = 8, MAX_ROWS = 4, MAX_PAGES = 32, MAX_TOKENS = 64;

// How a sampled row of a step may come out; STEP_FAILED is of the whole step.
enum Outcome : uint32_t { OK, EOS, NAN_ROW, NO_TOKEN_ROW, BAD_ID, STEP_FAILED };

enum class OpKind : uint32_t { SUBMIT = 1, CANCEL, ATTACH };

enum Host : uint32_t { HOST_NONE, HOST_DRAIN, HOST_STOP, HOST_DRAIN_THEN_STOP };

// Faults of the environment or of the explorer itself: each must give a counterexample, or the explorer is broken.
enum Plant : uint32_t {
  PLANT_NONE,
  PLANT_MISSTATED,       // a clause that does not hold is claimed: nobody is ever preempted
  PLANT_KV_ELSEWHERE,    // the model writes a step's first token into another page
  PLANT_EARLY_REUSE,     // the front end reuses a slot before its terminal event
  PLANT_FREED_IN_STEP,   // a page released during a step is free at once
  PLANT_LOST_EVENT,      // a terminal event is taken back
  PLANT_NO_BOUNDARY,     // no boundary follows a step in which somebody was cancelled
  PLANT_ENTRY_FIRST,     // the entry is delivered before the descriptor's second part
  PLANT_BLIND,           // the canonical form forgets for how long rows have been paused
  PLANT_READS_AGAIN,     // a front end goes back to the events that it has not told of, for ever
  PLANT_DEAF,            // cancels are taken and nobody ends
  PLANT_NEVER_STOPS,     // an engine that drains or is drained does not look for a stop
  PLANT_ATTACH_ONCE,     // a successor clears the ring and writes its epoch, without the word that shuts others out first
  PLANT_NO_LOOK,         // one that attaches does not look whether the last fence is its own
  PLANT_LAST = PLANT_NO_LOOK
};

struct Op {
  OpKind kind;
  uint32_t arg;  // SUBMIT, CANCEL: request; ATTACH: epoch
  bool optional;  // ATTACH: its predecessor may live on
  bool during;    // ATTACH: it may begin while the one before it is under way
};

struct ProgramRequest {
  uint32_t ring, slot, generation;
  uint32_t finishes, errors;  // bits of the reasons that it may end with
  int32_t after;              // request whose terminal event its slot waits for, or -1
  uint64_t epoch;             // of the front end that submits it
  std::vector<int32_t> payload;
  Slot descriptor;
};

struct Scope {
  uint32_t outcomes = 0;  // bit set of Outcome
  bool unordered = false, consume_all = false;
  uint64_t tick_us = 0;
  int64_t ticks = 0;  // -1: the clock goes on for ever
  uint32_t may_die = 0, host = 0, plant = 0;
  std::vector<ProgramRequest> requests;
  std::vector<std::vector<Op>> programs;  // by ring

  Scope(const Config& c, const int64_t* at, size_t n) : at_(at), end_(at + n) {
    outcomes = uint32_t(below(64, "outcomes")) | 1u;
    unordered = below(2, "unordered") != 0;
    consume_all = below(2, "consume_all") != 0;
    tick_us = below(1u << 30, "tick_us");
    ticks = next();
    may_die = uint32_t(below(1u << MAX_RINGS, "may_die"));
    host = uint32_t(below(4, "host"));
    plant = uint32_t(below(PLANT_LAST + 1, "plant"));
    requests.resize(below(MAX_REQUESTS + 1, "requests"));
    for (ProgramRequest& q : requests) read_request(c, q);
    for (uint32_t ring = 0; ring < c.rings; ++ring) programs.push_back(read_program(ring));
    if (at_ != end_) throw std::out_of_range("the scope goes on behind its end");
    check(c);
  }

 private:
  int64_t next() {
    if (at_ == end_) throw std::out_of_range("the scope ends too early");
    return *at_++;
  }
  uint64_t below(uint64_t limit, const char* what) {
    const int64_t value = next();
    if (value < 0 || uint64_t(value) >= limit) {
      throw std::out_of_range(std::string(what) + " is " + std::to_string(value) + ", must be below " +
                              std::to_string(limit));
    }
    return uint64_t(value);
  }

  void read_request(const Config& c, ProgramRequest& q) {
    q.ring = uint32_t(below(c.rings, "ring"));
    q.slot = uint32_t(below(c.slots, "slot"));
    q.generation = uint32_t(below(1u << GENERATION_BITS, "generation"));
    q.finishes = uint32_t(below(1u << 8, "finishes"));
    q.errors = uint32_t(below(1u << 20, "errors"));
    q.after = int32_t(next());
    if (q.after < -1 || q.after >= int32_t(requests.size())) throw std::out_of_range("after names no request");
    q.epoch = 1;
    q.payload.resize(below(c.arena_tokens + 1, "payload"));
    for (int32_t& word : q.payload) word = int32_t(next());
    uint64_t words[sizeof(Slot) / 8];
    for (uint64_t& word : words) word = uint64_t(next());
    std::memcpy(&q.descriptor, words, sizeof words);
    if (uint64_t(q.descriptor.prompt_offset) + q.payload.size() > c.arena_tokens) {
      throw std::out_of_range("a prompt lies outside the arena");
    }
  }

  std::vector<Op> read_program(uint32_t ring) {
    std::vector<Op> ops(below(32, "operations"));
    uint64_t epoch = 1;
    for (Op& op : ops) {
      op.kind = OpKind(below(4, "operation"));
      op.arg = uint32_t(below(1u << 16, "argument"));
      const uint64_t how = below(3, "optional");
      op.optional = how == 1, op.during = how == 2;
      if (op.kind == OpKind::ATTACH) {
        epoch = op.arg;
        continue;
      }
      if (op.arg >= requests.size() || requests[op.arg].ring != ring) throw std::out_of_range("no such request");
      if (op.kind == OpKind::SUBMIT) requests[op.arg].epoch = epoch;
    }
    return ops;
  }

  static void check(const Config& c) {
    if (c.rings > MAX_RINGS || c.max_rows > MAX_ROWS || c.pages > MAX_PAGES || c.rings * c.slots > 16) {
      throw std::out_of_range("the engine is too large for a small scope: at most 3 rings, 4 rows, 32 pages");
    }
    if (c.max_len > MAX_TOKENS || c.page_size > MAX_TOKENS || c.token_budget > MAX_TOKENS || c.sq_entries > MAX_TOKENS) {
      throw std::out_of_range("max_len, page_size, token_budget and sq_entries of a small scope are at most 64");
    }
    if (c.masks != 0) throw std::out_of_range("grammar masks are not modelled");
    if (c.n_eos == 0) throw std::out_of_range("the configuration names no end-of-sequence id");
    if (c.log_level != uint32_t(LogLevel::OFF)) throw std::out_of_range("the event log must be off");
  }

  const int64_t* at_;
  const int64_t* end_;
};

// One front end, as far as its program and its own knowledge go.
struct FrontEnd {
  uint64_t consumed;  // events read
  uint64_t epoch;
  uint32_t executed;  // operations carried out, by bit
  uint32_t sq_tail;   // entries published
  uint8_t op, part;   // next operation; its words delivered (a bit set where their order is free, else a count)
  uint8_t dead;       // writes and reads no more
  uint8_t crashed;    // 1: its successor attaches
  uint8_t crash_op, crash_part;  // where its predecessor stood
  uint8_t lives;      // of a predecessor: it goes on beside its successor, until it finds the successor's epoch
  uint8_t wrote;      // ... and it has written an entry since the successor began
  uint8_t alone;      // it shut out one that attached with it: nobody comes after it
  uint8_t pad[7];
};

// What was seen of one request of the program.
struct Watch {
  uint8_t published, cancelled;  // its entries are delivered
  uint8_t tokens, terminal;      // events written
  uint8_t seen;                  // the front end has read its terminal event
  uint8_t entry;                 // index of its SUBMIT
  uint8_t pad[2];
};

// A row of the step in flight, as it was launched.
struct Flight {
  uint64_t epoch;
  uint32_t request, generation;
  uint32_t pages;  // bit set
  uint32_t pad;
};

struct Env {
  uint64_t now;
  int64_t ticks;
  uint32_t n_flight, pad;
  FrontEnd front_ends[MAX_RINGS];
  FrontEnd elders[MAX_RINGS];  // predecessors that live beside their successors
  Watch watch[MAX_REQUESTS];
  Flight flight[MAX_ROWS];
};
static_assert(sizeof(Env) % 8 == 0);

// A broken clause; `clause` is a number of docs/rules.md.
struct Violation {
  std::string clause, message;
};

enum Situation : uint32_t {
  S_PREEMPTION, S_POOL_EXHAUSTED, S_PAGE_REUSE, S_QUARANTINE, S_CANCEL_IN_STEP, S_CANCEL_WAITING, S_CANCEL_STALE,
  S_CREDIT_STALL, S_ENTRY_HELD, S_PAUSED_LONG, S_SLOT_REUSE, S_EPOCH_IN_STEP, S_LATE_ACK, S_RESERVATION,
  S_PREFIX_HIT, S_PAGE_SHARED, S_EVICTION, S_TORN, S_TORN_ACCEPTED, S_TORN_REFUSED, S_LEASE_LOST, S_DEADLINE,
  S_END_OF_SEQUENCE, S_LENGTH, S_NAN, S_STEP_FAILED, S_CHUNKED_PREFILL, S_MIXED_STEP, S_RINGS_IN_STEP, S_RESUMED,
  S_DRAINED, S_STOPPED, S_CQ_WRAP, S_SQ_WRAP, S_ROWS_EXHAUSTED,
  S_PAUSED_GAVE_WAY, S_FRONT_END_DIED, S_CLASSES, S_STOPPED_DRAINING, S_STOPPED_DRAINED, S_TWO_FRONT_ENDS,
  S_ELDER_WROTE, S_TWO_ATTACHES, S_EARLIER_ATTACH_LAST, S_COUNT
};
inline constexpr const char* SITUATIONS[S_COUNT] = {
    "preemption", "pool exhausted", "page reuse", "quarantine", "cancel in step", "cancel while waiting",
    "stale cancel", "credit stall", "entry held for credits", "paused for long", "slot reuse", "epoch change in step",
    "epoch acknowledged late", "reservation", "prefix hit", "page shared", "eviction", "torn entry",
    "torn entry accepted", "torn entry refused", "lease lost", "deadline passed", "end of sequence", "length reached",
    "NaN row", "step failed", "chunked prefill", "decode and prefill in a step", "rings in a step",
    "resumed after preemption", "drained", "stopped", "completion queue wraps", "submission queue wraps",
    "rows exhausted", "paused row gave way",
    "front end died at work", "urgent class overtook", "stopped while draining", "stopped after draining",
    "two front ends at work", "entry written beside an attach", "two attaches at once",
    "earlier attach has the last fence"};

}  // namespace blink::explore
