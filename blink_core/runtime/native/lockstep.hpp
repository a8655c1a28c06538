// A whole program on one small engine in one call, for lock-step with the executable specification (design section 9).
// The program writes the words that front ends and the host write, calls the scheduler, and lets a fake model compute
// the step in flight; after every call all observables are recorded. Encodings: verification/lockstep/driver.py and
// observe.py.
#pragma once

#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "loop.hpp"

namespace blink {

class Lockstep {
 public:
  using Words = std::vector<int64_t>;

  Lockstep(const Config& config, uint32_t group_size)
      : c_(config),
        rl_(ring_layout(c_)),
        sl_(state_layout(c_)),
        pl_(plan_layout(c_)),
        ring_base_(control_layout(c_).nbytes),
        shared_(ring_base_ + c_.rings * rl_.nbytes),
        state_(sl_.nbytes),
        log_(log_layout(c_).nbytes),
        plan_(pl_.nbytes),
        kv_(uint64_t(c_.pages) * c_.page_size, INT64_MIN),
        seen_(c_.rings, 0),
        epochs_(c_.rings, 0),
        scheduler_(copy_config(), state_.data(), log_.data(), plan_.data(), group_size) {
    scheduler_.init();
  }

  // Runs `n` words of program; returns the records of all calls, each preceded by its length.
  // Throws std::out_of_range for a program that addresses what is not there.
  Words run(const int64_t* program, size_t n) {
    at_ = program;
    end_ = program + n;
    observe(0);
    while (at_ != end_) step(next());
    return std::move(out_);
  }

 private:
  enum Op { ARENA = 1, SLOT, SQ, EPOCH, LEASE, CQ_HEAD, BOX, CONTROL, BOUNDARY, POLL, FAULT };
  enum Fault { NONE, NAN_ROW, NO_TOKEN_ROW, FAILED_ROW, LEFT_OUT, BAD_ID, NEGATIVE_ID, UNKNOWN_STATUS, WHOLE_STEP };

  void step(int64_t op) {
    switch (op) {
      case ARENA: {
        int32_t* words = ring<int32_t>(rl_.arena);
        const uint64_t offset = below(c_.arena_tokens + 1), count = below(c_.arena_tokens - offset + 1);
        for (uint64_t i = 0; i < count; ++i) words[offset + i] = int32_t(next());
        return;
      }
      case SLOT: return write_slot();
      case SQ: {
        uint64_t* sq = ring<uint64_t>(rl_.sq);
        const uint64_t index = below(c_.sq_entries);
        return store_release(&sq[index], uint64_t(next()));
      }
      case EPOCH:
      case LEASE:
      case CQ_HEAD: {
        FrontEndLine* line = ring<FrontEndLine>(rl_.front_end);
        uint64_t* word = op == EPOCH ? &line->epoch : op == LEASE ? &line->lease : &line->cq_head;
        return store_release(word, uint64_t(next()));
      }
      case BOX: return write_box();
      case CONTROL: {
        ControlLine* line = reinterpret_cast<ControlLine*>(&shared_[control_layout(c_).control]);
        uint64_t* word = below(2) ? &line->stop_request : &line->drain_request;
        return store_release(word, uint64_t(next()));
      }
      case BOUNDARY: {
        launched_ = scheduler_.boundary(uint64_t(next()));
        if (launched_) compute();
        faults_.clear();
        return observe(1 + launched_);
      }
      case POLL:
        scheduler_.poll(uint64_t(next()));
        return observe(3);
      case FAULT:
        faults_.push_back(next());
        return;
      default: throw std::out_of_range("unknown operation " + std::to_string(op));
    }
  }

  int64_t next() {
    if (at_ == end_) throw std::out_of_range("the program ends inside an operation");
    return *at_++;
  }

  uint64_t below(uint64_t limit) {
    const int64_t value = next();
    if (value < 0 || uint64_t(value) >= limit)
      throw std::out_of_range("index " + std::to_string(value) + " is not below " + std::to_string(limit));
    return uint64_t(value);
  }

  // A section of the ring whose index comes next in the program.
  template <class T>
  T* ring(uint64_t offset) {
    return ring_at<T>(below(c_.rings), offset);
  }
  template <class T>
  T* ring_at(uint64_t index, uint64_t offset) {
    return reinterpret_cast<T*>(&shared_[ring_base_ + index * rl_.nbytes + offset]);
  }
  template <class T>
  T* state(uint64_t offset) {
    return reinterpret_cast<T*>(&state_[offset]);
  }
  template <class T>
  T* plan(uint64_t offset) {
    return reinterpret_cast<T*>(&plan_[offset]);
  }

  uint8_t* copy_config() {
    std::memcpy(&shared_[control_layout(c_).config], &c_, sizeof c_);
    return shared_.data();
  }

  static uint64_t sum(const uint32_t* words, size_t n) {
    uint64_t total = 0;
    for (size_t i = 0; i < n; ++i) total += mix_word(words[i], i);
    return total;
  }

  static float as_float(int64_t bits) {
    const uint32_t word = uint32_t(bits);
    float value;
    std::memcpy(&value, &word, sizeof value);
    return value;
  }
  static int64_t bits_of(float value) {
    uint32_t word;
    std::memcpy(&word, &value, sizeof word);
    return word;
  }

  // ring slot intact, the fields of Slot but checksums in order, count and words that the payload checksum is of
  void write_slot() {
    Slot* slots = ring<Slot>(rl_.slots);
    const uint64_t index = below(c_.slots);
    const bool intact = below(2);
    Slot s{};
    s.generation = uint32_t(next());
    s.prompt_len = uint32_t(next());
    s.prompt_offset = uint32_t(next());
    s.max_tokens = uint32_t(next());
    s.temperature = as_float(next());
    s.top_p = as_float(next());
    s.seed = uint64_t(next());
    s.choice = uint32_t(next());
    s.flags = uint32_t(next());
    s.n_stop = uint32_t(next());
    s.priority = uint32_t(next());
    s.deadline_us = uint64_t(next());
    for (uint32_t i = 0; i < MAX_STOP_IDS; ++i) s.stop_ids[i] = int32_t(next());
    s.tag = uint64_t(next());
    s.top_k = uint32_t(next());
    s.min_p = as_float(next());
    s.repetition_penalty = as_float(next());
    s.presence_penalty = as_float(next());
    s.frequency_penalty = as_float(next());
    s.min_tokens = uint32_t(next());
    s.n_bias = uint32_t(next());
    s.logprobs = uint32_t(next());
    s.mask_box = uint32_t(next());
    std::vector<uint32_t> payload(below(uint64_t(end_ - at_)));
    for (uint32_t& word : payload) word = uint32_t(next());
    s.prompt_checksum = sum(payload.data(), payload.size());
    uint32_t words[sizeof s / 4];
    std::memcpy(words, &s, sizeof s);
    s.checksum = sum(words, sizeof s / 4) + (intact ? 0 : 1);
    slots[index] = s;
  }

  // ring box ready intact bits
  void write_box() {
    const uint64_t r = below(c_.rings), index = below(c_.masks);
    const uint64_t ready = uint64_t(next());
    const bool intact = below(2);
    uint32_t* bits = ring_at<uint32_t>(r, rl_.mask_bits) + index * c_.mask_words;
    for (uint32_t i = 0; i < c_.mask_words; ++i) bits[i] = uint32_t(next());
    MaskBox* box = ring_at<MaskBox>(r, rl_.mask_boxes) + index;
    box->checksum = sum(bits, c_.mask_words) + (intact ? 0 : 1);
    store_release(&box->ready, ready);
  }

  // The fake model: KV keeps each token and its position; a sampled token is a function of all the KV that its block
  // table leads to, of the seed and of the mask. Faults name a row by the low 8 bits, their kind above.
  void compute() {
    PlanHeader* header = plan<PlanHeader>(pl_.header);
    const PlanRow* rows = plan<PlanRow>(pl_.rows);
    const int32_t* ids = plan<int32_t>(pl_.token_ids);
    const int32_t* positions = plan<int32_t>(pl_.positions);
    const int64_t* kv_slots = plan<int64_t>(pl_.kv_slots);
    for (uint32_t i = 0; i < header->n_tokens; ++i) {
      if (uint64_t(kv_slots[i]) >= kv_.size()) throw std::out_of_range("kv slot " + std::to_string(kv_slots[i]));
      kv_[kv_slots[i]] = int64_t(ids[i]) + 31 * int64_t(positions[i]);
    }
    for (int64_t f : faults_)
      if ((f >> 8) == WHOLE_STEP) header->status = uint32_t(StepStatus::FAILED);
    for (uint32_t r = 0; r < header->n_rows; ++r) {
      if (!rows[r].sample) continue;
      Fault fault = NONE;
      for (int64_t f : faults_)
        if (uint64_t(f & 255) % header->n_rows == r) fault = Fault(f >> 8);
      sample(rows[r], r, fault);
    }
  }

  void sample(const PlanRow& row, uint32_t r, Fault fault) {
    if (fault == LEFT_OUT) return;
    const Sampling& how = state<Sampling>(sl_.sampling)[row.request];
    const uint32_t* table = state<uint32_t>(sl_.block_tables) + uint64_t(row.row) * c_.max_pages;
    int64_t h = int64_t(how.seed & 0x7FFFFFFF);
    for (uint32_t i = 0; i < row.context_len; ++i) {
      const int64_t stored = kv_.at(uint64_t(table[i / c_.page_size]) * c_.page_size + i % c_.page_size);
      h = (h * 33 + stored + 7) & 0x7FFFFFFF;
    }
    StepResult& result = plan<StepResult>(pl_.results)[r];
    int32_t token = int32_t((h >> 4) % c_.vocab);
    StepStatus status = StepStatus::OK;
    if (row.masked) {
      const uint32_t* bits = state<uint32_t>(sl_.masks) + uint64_t(row.row) * c_.mask_words;
      uint32_t tried = 0;
      for (; tried < c_.vocab && !(bits[token / 32] >> (token % 32) & 1); ++tried)
        token = int32_t((token + 1) % c_.vocab);
      if (tried == c_.vocab) status = StepStatus::NO_TOKEN;
    }
    if (fault == NAN_ROW) status = StepStatus::NAN_LOGITS;
    if (fault == NO_TOKEN_ROW) status = StepStatus::NO_TOKEN;
    if (fault == FAILED_ROW) status = StepStatus::FAILED;
    if (fault == BAD_ID) token = int32_t(c_.vocab);
    if (fault == NEGATIVE_ID) token = -1;
    result.token = token;
    result.logprob = as_float((h & 0x3FFFFFFF) | 0x80000000);
    result.status = fault == UNKNOWN_STATUS ? 9 : uint32_t(status);
    for (uint32_t j = 0; j < how.logprobs && j < c_.max_logprobs; ++j) {
      plan<int32_t>(pl_.top_tokens)[r * c_.max_logprobs + j] = int32_t((uint32_t(token) + j) % c_.vocab);
      plan<float>(pl_.top_logprobs)[r * c_.max_logprobs + j] = as_float(((h + j) & 0x3FFFFFFF) | 0x80000000);
    }
  }

  // ---- records

  template <class... T>
  void put(T... values) {
    (out_.push_back(int64_t(values)), ...);
  }
  template <class T>
  void put_list(const T* values, uint64_t n) {
    put(int64_t(n));
    for (uint64_t i = 0; i < n; ++i) put(int64_t(values[i]));
  }

  void observe(int64_t call) {
    const size_t start = out_.size();
    put(0);
    put(call);
    const StateHeader& h = *state<StateHeader>(sl_.header);
    put(h.step, h.committed, h.boundaries, h.clock, h.arrivals, h.admissions, h.preemptions, h.tokens, h.lookups,
        h.hits, h.evictions, h.state, h.live, h.in_flight, h.idle_cached, h.committed_pages, h.reserved_for,
        h.reserved_for < 0 ? 0 : h.reserved_since);
    for (uint32_t turn : h.next_ring) put(turn);
    for (uint32_t r = 0; r < c_.rings; ++r) observe_ring(r);
    for (uint32_t q = 0; q < c_.rings * c_.slots; ++q) observe_request(q);
    observe_pages(h);
    put_list(state<uint32_t>(sl_.running), h.running);
    put_list(state<uint32_t>(sl_.row_stack), h.free_rows);
    if (call == 2) observe_plan();
    observe_events();
    observe_log(h);
    out_[start] = int64_t(out_.size() - start - 1);
  }

  void observe_ring(uint32_t r) {
    const RingState& s = state<RingState>(sl_.rings)[r];
    const GpuLine& g = *ring_at<GpuLine>(r, rl_.gpu);
    put(g.epoch_ack, g.sq_head, g.cq_tail, g.lapses, s.epoch, s.sq_next, s.cq_tail, s.cq_published, s.cq_head, s.lease,
        s.lease_at);
    for (int64_t tokens : s.deficit) put(tokens);
    put(s.waiting, s.live, s.torn, s.duplicates, s.stale_cancels, s.bad_heads, s.bad_masks, s.planned, s.lapsed);
    for (uint32_t k = 0; k < PRIORITIES; ++k) {  // each waiting list in order; a broken one shows as -2
      uint32_t steps = 0;
      int32_t last = -1;
      for (int32_t q = s.wait_head[k]; q >= 0; q = state<Request>(sl_.requests)[q].next) {
        if (++steps > c_.rings * c_.slots) break;
        put(last = q);
      }
      put(s.wait_tail[k] == last ? -1 : -2);
    }
  }

  void observe_request(uint32_t index) {
    const Request& q = state<Request>(sl_.requests)[index];
    put(q.judged, q.state);
    if (q.state == uint32_t(RequestState::FREE)) return;
    const Sampling& s = state<Sampling>(sl_.sampling)[index];
    put(q.arrival, q.tag, q.expires, q.generation, q.priority, q.prompt_len, q.max_tokens, q.computed, q.emitted,
        q.published, q.cached, q.row, q.preemptions);
    put(q.row < 0 ? 0 : q.paused, q.mask_index, q.admitted != 0, q.mask_box);
    put(s.seed, bits_of(s.temperature), bits_of(s.top_p), bits_of(s.min_p), s.top_k, bits_of(s.repetition_penalty),
        bits_of(s.presence_penalty), bits_of(s.frequency_penalty), s.min_tokens, s.prompt_len, s.n_bias, s.logprobs,
        s.flags, s.choice, s.n_stop);
    for (uint32_t i = 0; i < MAX_STOP_IDS; ++i) put(s.stop_ids[i]);
    const BiasPair* bias = state<BiasPair>(sl_.bias) + uint64_t(index) * c_.max_bias;
    for (uint32_t i = 0; i < s.n_bias && i < c_.max_bias; ++i) put(bias[i].token, bits_of(bias[i].bias));
    put_list(state<int32_t>(sl_.tokens) + uint64_t(index) * c_.max_len, q.total < c_.max_len ? q.total : c_.max_len);
    if (q.row < 0) return;
    put_list(state<uint32_t>(sl_.block_tables) + uint64_t(q.row) * c_.max_pages, q.n_pages);
    const uint32_t* mask = state<uint32_t>(sl_.masks) + uint64_t(q.row) * c_.mask_words;
    if (q.mask_index == q.emitted + 1) put_list(mask, c_.mask_words);
  }

  void observe_pages(const StateHeader& h) {
    const Page* pages = state<Page>(sl_.pages);
    for (uint32_t p = 0; p < c_.pages; ++p) {
      put(pages[p].state);
      if (pages[p].state == uint32_t(PageState::OWNED)) put(pages[p].owner, pages[p].generation);
      if (pages[p].state == uint32_t(PageState::CACHED)) {
        put(pages[p].refs, pages[p].parent, pages[p].children);
        for (uint32_t i = 0; i < c_.page_size; ++i) put(state<int32_t>(sl_.page_tokens)[p * c_.page_size + i]);
      }
    }
    put_list(state<uint32_t>(sl_.free_list), h.free_pages);
    put_list(state<uint32_t>(sl_.quarantine), h.quarantined);
    uint32_t steps = 0;
    int32_t last = -1;
    for (int32_t p = h.lru_head; p >= 0 && steps++ <= c_.pages; p = pages[p].lru_next) put(last = p);
    put(h.lru_tail == last ? -1 : -2);
  }

  void observe_plan() {
    const PlanHeader& h = *plan<PlanHeader>(pl_.header);
    put(h.step, h.n_rows, h.n_tokens, h.n_samples);
    for (uint32_t r = 0; r < h.n_rows; ++r) {
      const PlanRow& w = plan<PlanRow>(pl_.rows)[r];
      put(w.request, w.generation, w.q_start, w.q_len, w.context_len, w.sample, w.emitted, w.masked, w.ring, w.slot,
          w.n_pages, w.row);
    }
    for (uint32_t i = 0; i < h.n_tokens; ++i)
      put(plan<int32_t>(pl_.token_ids)[i], plan<int32_t>(pl_.positions)[i], plan<int64_t>(pl_.kv_slots)[i]);
  }

  // Events written since the last record, published or not; a new epoch starts over.
  void observe_events() {
    for (uint32_t r = 0; r < c_.rings; ++r) {
      const RingState& s = state<RingState>(sl_.rings)[r];
      if (s.epoch != epochs_[r]) epochs_[r] = s.epoch, seen_[r] = 0;
      put(int64_t(s.cq_tail - seen_[r]));
      for (; seen_[r] < s.cq_tail; ++seen_[r]) {
        const Event& e = ring_at<Event>(r, rl_.cq)[seen_[r] % c_.cq_entries];
        put(e.seq, e.slot, e.kind, e.reason, e.generation);
        if (e.kind == uint8_t(EventKind::LOGPROBS)) {
          LogprobsEvent p;
          std::memcpy(&p, &e, sizeof p);
          for (uint32_t i = 0; i < p.count && i < LOGPROBS_PER_EVENT; ++i) put(p.tokens[i], bits_of(p.logprobs[i]));
        } else {
          put(e.index, e.token, bits_of(e.logprob), e.step);
        }
      }
    }
  }

  void observe_log(const StateHeader& h) {
    put(int64_t(h.log_tail - logged_));
    if (h.log_tail - logged_ > c_.log_entries) throw std::out_of_range("log_entries is too small for one call");
    const LogEntry* log = reinterpret_cast<const LogEntry*>(log_.data());
    for (; logged_ < h.log_tail; ++logged_) {
      const LogEntry& e = log[logged_ % c_.log_entries];
      put(e.step, e.kind, e.ring, e.slot, e.generation, e.a, e.b, e.c);
    }
  }

  Config c_;
  RingLayout rl_;
  StateLayout sl_;
  PlanLayout pl_;
  uint64_t ring_base_;
  std::vector<uint8_t> shared_, state_, log_, plan_;
  std::vector<int64_t> kv_, faults_;
  std::vector<uint64_t> seen_, epochs_;
  uint64_t logged_ = 0;
  bool launched_ = false;
  const int64_t* at_ = nullptr;
  const int64_t* end_ = nullptr;
  Words out_;
  Scheduler scheduler_;
};

}  // namespace blink
