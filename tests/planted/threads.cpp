// The scheduler among real threads, for ThreadSanitizer: front ends on their rings, a group of threads that runs the
// scheduler, the model's thread. `threads GROUP REQUESTS [LEVEL [ROWS [SECONDS]]]`: group size (0: nobody serves),
// requests of each ring, level of the event log (all), rows of a step: with more than a few, one ring's plain requests
// run in all of them at once; seconds in which the front ends must be done. Exits 0 when every request got one terminal
// event and its tokens in order; 3 for what is wrong otherwise; 4 when it was not done in time, which a slow machine
// can cause: it says what; a report of the sanitizer exits otherwise. The variable BLINK_NAP_US has front ends wait so
// long before each submission, as on a slow machine. Built from woven headers, it puts the mutant of the variable
// BLINK_MUTANT in force.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "loop.hpp"
#if __has_include("mutant.hpp")
#include "mutant.hpp"
#endif

using namespace blink;

namespace {

constexpr uint32_t FEW_ROWS = 4, EPOCHS = 4, SECONDS = 120;

void require(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::exit(3);
}

// What front ends share with the group beyond the engine's memory.
struct Common {
  Clock::time_point deadline;
  std::chrono::microseconds nap;
  // Entries of the first plain batch, once all are there. Relaxed: it must not order them.
  std::atomic<uint64_t> batch{0};

  void in_time(const char* what) const {
    if (Clock::now() < deadline) return;
    std::fprintf(stderr, "not in time: %s\n", what);
    std::_Exit(4);  // another front end is likely here too, and only one thread may `exit`
  }
};

Config make_config(LogLevel level, uint32_t rows) {
  const bool few = rows <= FEW_ROWS;
  Config k{};
  k.magic = MAGIC;
  k.abi_version = ABI_VERSION;
  k.rings = few ? 2 : 1;
  k.slots = few ? 6 : rows;
  k.sq_entries = few ? 16 : 256;
  k.cq_entries = few ? 64 : 512;
  k.max_len = 40;
  k.arena_tokens = k.slots * (k.max_len + 4);
  k.page_size = 4;
  k.pages = 2 + (few ? 14 : 10 * rows);
  k.max_rows = rows;
  k.token_budget = few ? 12 : 20 * rows;
  k.vocab = 97;
  k.max_pages = 10;
  k.visibility_us = 1000000;
  k.paused_limit = 3;
  k.log_entries = 1 << 10;
  k.log_level = uint32_t(level);
  k.prefix_cache = 1;
  k.quantum = 16;
  k.reservation_steps = 3;
  k.lease_us = few ? 30000 : 0;  // lapses now and then on a busy machine, which is meant
  k.max_bias = 2;
  k.max_logprobs = 4;
  k.masks = 3;
  k.mask_words = 4;
  return k;
}

struct Memory {
  std::unique_ptr<uint8_t[]> shared, state, log, plan;
  explicit Memory(const Config& k) {
    const uint64_t nbytes = control_layout(k).nbytes + k.rings * ring_layout(k).nbytes;
    shared = std::make_unique<uint8_t[]>(nbytes);
    state = std::make_unique<uint8_t[]>(state_layout(k).nbytes);
    log = std::make_unique<uint8_t[]>(log_layout(k).nbytes);
    plan = std::make_unique<uint8_t[]>(plan_layout(k).nbytes);
    std::memcpy(shared.get(), &k, sizeof k);
  }
};

uint64_t sum_words(const void* data, uint32_t words) {
  uint64_t sum = 0;
  for (uint32_t i = 0; i < words; ++i) {
    uint32_t word;
    std::memcpy(&word, static_cast<const uint8_t*>(data) + 4 * i, 4);
    sum += mix_word(word, i);
  }
  return sum;
}

// One front end: keeps its slots busy, cancels some, posts masks, returns credits, attaches anew between batches.
class FrontEnd {
 public:
  FrontEnd(const Context& c, Common& common, uint32_t ring, uint32_t requests)
      : common_(common),
        m_(c.ring(ring)),
        k_(*c.config),
        plain_(k_.max_rows > FEW_ROWS),
        random_(ring + 1),
        left_(requests),
        slots_(k_.slots) {}

  void run() {
    const uint64_t epochs = plain_ ? 1 : EPOCHS;
    for (uint64_t epoch = 1; epoch <= epochs; ++epoch) {
      attach(epoch);
      uint32_t batch = left_ / uint32_t(epochs - epoch + 1);
      left_ -= batch;
      while (batch > 0 || (live_ > 0 && epoch == epochs)) {  // an epoch before the last leaves requests behind
        const bool refill = !plain_ || live_ == 0;  // plain ones come all at once
        for (uint32_t slot = 0; refill && slot < k_.slots && batch > 0; ++slot) {
          if (!slots_[slot].alive) submit(slot), --batch;
        }
        if (plain_ && common_.batch.load(std::memory_order_relaxed) == 0) {
          common_.batch.store(sq_, std::memory_order_relaxed);
        }
        common_.in_time("requests have not ended");
        store_release(&m_.front_end->lease, ++lease_);
        consume();
        std::this_thread::yield();
      }
    }
  }
  uint64_t ended = 0, tokens = 0, finished = 0;

 private:
  void attach(uint64_t epoch) {
    for (uint32_t i = 0; i < k_.sq_entries; ++i) store_release(&m_.sq[i], 0);
    for (uint32_t i = 0; i < k_.masks; ++i) store_release(&m_.mask_boxes[i].ready, 0);
    store_release(&m_.front_end->cq_head, 0);
    store_release(&m_.front_end->epoch, epoch);
    while (load_acquire(&m_.gpu->epoch_ack) != epoch) {
      common_.in_time("no acknowledgement of an epoch");
      std::this_thread::yield();
    }
    sq_ = head_ = live_ = 0;
    slots_.assign(k_.slots, {});
  }

  void publish(Op op, uint32_t slot) {
    while (sq_ - load_acquire(&m_.gpu->sq_head) >= k_.sq_entries) {
      common_.in_time("no room in the submission queue");
      store_release(&m_.front_end->lease, ++lease_);
      consume();
    }
    const uint64_t word = uint64_t(sq_seq(sq_)) | uint64_t(op) << SQ_OP_SHIFT | uint64_t(slot) << SQ_SLOT_SHIFT |
                          uint64_t(slots_[slot].generation) << SQ_GENERATION_SHIFT;
    store_release(&m_.sq[sq_++ & (k_.sq_entries - 1)], word);
  }

  void submit(uint32_t slot) {
    if (common_.nap.count() > 0) std::this_thread::sleep_for(common_.nap);
    Slot s{};
    s.generation = ++slots_[slot].generation;
    s.prompt_len = 1 + random_() % 20;
    s.n_bias = random_() % 3;
    s.prompt_offset = slot * (k_.max_len + 4);
    s.max_tokens = plain_ ? 16 : 1 + random_() % 12;
    s.top_p = s.repetition_penalty = 1.0f;
    s.flags = uint32_t(SlotFlag::IGNORE_EOS);
    if (!plain_) {
      s.logprobs = random_() % 5;
      s.priority = random_() % 3;
      s.deadline_us = random_() % 8 == 0 ? 3000 : 0;
    }
    slots_[slot].masked = !plain_ && slot < k_.masks && random_() % 2 == 0;
    if (slots_[slot].masked) {
      s.flags |= uint32_t(SlotFlag::MASKED);
      s.mask_box = slot;
    }
    uint32_t* payload = reinterpret_cast<uint32_t*>(m_.arena) + s.prompt_offset;
    const uint32_t text = random_() % 3;  // few beginnings: pages are shared
    for (uint32_t i = 0; i < s.prompt_len; ++i) payload[i] = (text + 5 * i) % k_.vocab;
    for (uint32_t i = 0; i < 2 * s.n_bias; ++i) payload[s.prompt_len + i] = i;
    s.prompt_checksum = sum_words(payload, s.prompt_len + 2 * s.n_bias);
    s.checksum = sum_words(&s, sizeof s / 4);
    m_.slots[slot] = s;
    slots_[slot].alive = true;
    slots_[slot].index = 0;
    ++live_;
    publish(Op::SUBMIT, slot);
    if (slots_[slot].masked) post_mask(slot);
    if (!plain_ && random_() % 6 == 0) publish(Op::CANCEL, slot);
  }

  void post_mask(uint32_t box) {
    uint32_t* bits = m_.mask_bits + box * k_.mask_words;
    for (uint32_t i = 0; i < k_.mask_words; ++i) bits[i] = ~0u << (slots_[box].index % 8);
    store_release(&m_.mask_boxes[box].checksum, sum_words(bits, k_.mask_words));
    store_release(&m_.mask_boxes[box].ready, uint64_t(slots_[box].generation) << SQ_GENERATION_SHIFT |
                                                 uint64_t(box) << SQ_SLOT_SHIFT | (slots_[box].index + 1));
  }

  // The model's alternatives in their order; it writes more of them than most requests ask for.
  static void check_pairs(const LogprobsEvent& e, uint32_t& seen) {
    for (uint32_t i = 0; i < LOGPROBS_PER_EVENT; ++i) {
      const bool used = i < e.count;
      require(e.tokens[i] == (used ? int32_t(seen) : -1), "an alternative of another place");
      require(e.logprobs[i] == (used ? -float(seen) : 0.0f), "a log-probability of another place");
      seen += used;
    }
  }

  void consume() {
    const uint64_t tail = load_acquire(&m_.gpu->cq_tail);
    for (; head_ < tail; ++head_) {
      const Event& e = m_.cq[head_ & (k_.cq_entries - 1)];
      require(e.seq == head_ + 1, "an event out of sequence");
      const uint32_t slot = e.slot;
      const Mine& mine = slots_[slot < k_.slots ? slot : 0];
      require(slot < k_.slots && mine.alive && e.generation == mine.generation, "an event of no live request");
      if (EventKind(e.kind) == EventKind::LOGPROBS) {
        check_pairs(reinterpret_cast<const LogprobsEvent&>(e), slots_[slot].pairs);
        continue;
      }
      slots_[slot].pairs = 0;
      require(e.index == slots_[slot].index, "a token out of order");
      if (EventKind(e.kind) == EventKind::TOKEN) {
        ++slots_[slot].index;
        ++tokens;
        if (slots_[slot].masked) post_mask(slot);
        continue;
      }
      finished += EventKind(e.kind) == EventKind::FINISH;
      ++ended;
      slots_[slot].alive = false;
      --live_;
    }
    store_release(&m_.front_end->cq_head, head_);
  }

  struct Mine {
    bool alive, masked;
    uint32_t generation, index, pairs;
  };

  Common& common_;
  RingMemory m_;
  const Config& k_;
  const bool plain_;
  std::minstd_rand random_;
  uint32_t left_, live_ = 0;
  uint64_t sq_ = 0, head_ = 0, lease_ = 0;
  std::vector<Mine> slots_;
};

// What a model step reads and writes, from a thread of its own.
void run_model(const Context& c, uint64_t& sink) {
  for (uint32_t r = 0; r < c.plan->n_rows; ++r) {
    const PlanRow& row = c.plan_rows[r];
    for (uint32_t i = 0; i < row.q_len; ++i) {
      sink += uint64_t(c.plan_token_ids[row.q_start + i]) + uint64_t(c.plan_positions[row.q_start + i]);
      sink += uint64_t(c.plan_kv_slots[row.q_start + i]);
    }
    for (uint32_t i = 0; i < row.n_pages; ++i) sink += c.table_of(row.row)[i];
    if (row.sample == 0) continue;
    if (row.masked != 0) {
      for (uint32_t i = 0; i < c.config->mask_words; ++i) {
        require(c.mask_of(row.row)[i] == ~0u << (row.emitted % 8), "the mask of another token");
      }
    }
    for (uint32_t i = 0; i < c.config->max_logprobs; ++i) {
      c.top_tokens[r * c.config->max_logprobs + i] = int32_t(i);
      c.top_logprobs[r * c.config->max_logprobs + i] = -float(i);
    }
    c.results[r] = {int32_t((row.context_len * 7 + row.emitted) % 97), -0.5f, uint32_t(StepStatus::OK), 0};
  }
}

// A group that holds the scheduler to the names it gives the words of front ends: one on a GPU reads them by their names
// alone, all together before a look at the rings.
struct NamingGroup : ThreadGroup {
  const Context& c;
  NamingGroup(const Context& c, Scratch& s, Team& team, uint32_t rank) : ThreadGroup(s, team, rank), c(c) {}
  uint64_t peek(uint32_t place, const uint64_t* word) {
    const uint32_t ring = place / RING_WORDS, which = place % RING_WORDS;
    require(ring < c.config->rings, "a word of no ring is asked for");
    const RingMemory m = c.ring(ring);
    if (which == 0) first_entry_ = c.rings[ring].sq_next;  // the look at this ring begins
    const uint64_t entry = first_entry_ + which - 3;
    require(word == (which == 0   ? &m.front_end->epoch
                     : which == 1 ? &m.front_end->cq_head
                     : which == 2 ? &m.front_end->lease
                                  : &m.sq[entry & (c.config->sq_entries - 1)]),
            "a word of a ring has another's name");
    return ThreadGroup::peek(place, word);
  }

 private:
  uint64_t first_entry_ = 0;
};

// What the step reads that a group launches as soon as its plan is made, before `finish_boundary`.
void check_launch(const Context& c) {
  const uint32_t size = c.config->page_size;
  for (uint32_t r = 0; r < c.plan->n_rows; ++r) {
    const PlanRow& row = c.plan_rows[r];
    require(row.context_len <= row.n_pages * size, "a row has more tokens than room in its pages");
    for (uint32_t i = 0; i < row.q_len; ++i) {
      const uint32_t at = row.q_start + i, position = row.context_len - row.q_len + i;
      const int64_t page = c.table_of(row.row)[position / size];
      require(c.plan_positions[at] == int32_t(position), "a token has another's position");
      require(c.plan_token_ids[at] == c.tokens_of(row.request)[position], "a row has another's token");
      require(page > 1 && c.plan_kv_slots[at] == page * size + position % size, "a token's page is not in its table");
    }
  }
}

// Takes the first plain batch as a whole, so that no pace of its submissions keeps every boundary from being steady.
void gather_batch(const Context& c, NamingGroup& g, const Common& common) {
  bool all;
  do {
    poll_rings(c, g, clock_us());
    const uint64_t batch = common.batch.load(std::memory_order_relaxed);
    all = g.broadcast(batch != 0 && c.rings[0].sq_next >= batch ? 1 : 0) != 0;
  } while (!all);
}

// The loop of a group of several threads, as one on a GPU runs it.
void run_group(const Context& c, NamingGroup g, const Common& common, std::atomic<uint32_t>& phase) {
  if (c.config->max_rows > FEW_ROWS) gather_batch(c, g, common);
  while (true) {
    const bool launch = begin_boundary(c, g, clock_us());
    if (launch && g.rank() == 0) check_launch(c);
    finish_boundary(c, g);
    if (g.rank() == 0) publish_events(c);
    if (g.broadcast(c.head->state == uint32_t(EngineState::STOPPED) ? 1 : 0) != 0) break;
    if (!launch) {
      poll_rings(c, g, clock_us());
      continue;
    }
    if (g.rank() == 0) phase.store(1, std::memory_order_release);
    do {
      poll_rings(c, g, clock_us());
    } while (g.broadcast(g.rank() == 0 ? phase.load(std::memory_order_acquire) : 0) != 2);
    if (g.rank() == 0) phase.store(0, std::memory_order_relaxed);
  }
  if (g.rank() == 0) phase.store(3, std::memory_order_release);
}

// Returns how many boundaries the group took together.
uint64_t serve_team(const Context& c, const Common& common, uint32_t size, uint64_t& sink) {
  Scratch scratch{};
  std::vector<NextRow> rows(std::min(c.config->max_rows, STEADY_ROWS));
  scratch.next.row = rows.data();
  scratch.next.room = uint32_t(rows.size());
  Team team(size);
  std::atomic<uint32_t> phase{0};
  std::vector<std::thread> members;
  for (uint32_t rank = 0; rank < size; ++rank) {
    members.emplace_back([&, rank] { run_group(c, NamingGroup(c, scratch, team, rank), common, phase); });
  }
  while (true) {
    const uint32_t now = phase.load(std::memory_order_acquire);
    if (now == 3) break;
    if (now == 1) {
      run_model(c, sink);
      c.plan->status = uint32_t(StepStatus::OK);
      phase.store(2, std::memory_order_release);
    } else {
      std::this_thread::yield();
    }
  }
  for (std::thread& member : members) member.join();
  const bool plain = c.config->max_rows > FEW_ROWS;
  require(!plain || scratch.steady > 0, "no boundary was taken by the group together");
  return scratch.steady;
}

// The shipped loop: a scheduler thread and its hand-over to the model.
void serve_alone(Scheduler& scheduler, uint64_t& sink) {
  scheduler.start(std::chrono::milliseconds(5000));
  for (int got; (got = scheduler.wait_plan(std::chrono::milliseconds(100))) >= 0;) {
    if (got == 0) continue;
    run_model(scheduler.context(), sink);
    scheduler.complete(uint32_t(StepStatus::OK));
  }
  scheduler.join();
}

}  // namespace

int main(int argc, char** argv) {
  require(argc >= 3 && argc <= 6, "usage: threads GROUP REQUESTS [LEVEL [ROWS [SECONDS]]]");
#if __has_include("mutant.hpp")
  if (const char* mutant = std::getenv("BLINK_MUTANT")) active_mutant = uint32_t(std::atoi(mutant));
#endif
  const uint32_t size = uint32_t(std::atoi(argv[1])), requests = uint32_t(std::atoi(argv[2]));
  require(requests > 0, "REQUESTS must be at least 1");
  const Config k = make_config(argc > 3 ? LogLevel(std::atoi(argv[3])) : LogLevel::ALL,
                               argc > 4 ? uint32_t(std::atoi(argv[4])) : FEW_ROWS);
  Memory memory(k);
  Scheduler scheduler(memory.shared.get(), memory.state.get(), memory.log.get(), memory.plan.get());
  scheduler.init();
  const Context& c = scheduler.context();
  uint64_t sink = 0, steady = 0;
  const char* nap = std::getenv("BLINK_NAP_US");
  Common common{Clock::now() + std::chrono::seconds(argc > 5 ? uint32_t(std::atoi(argv[5])) : SECONDS),
                std::chrono::microseconds(nap == nullptr ? 0 : std::atoi(nap))};
  std::thread serving([&] {
    if (size == 1) {
      serve_alone(scheduler, sink);
    } else {
      steady = serve_team(c, common, size, sink);
    }
  });
  std::vector<FrontEnd> fronts;
  for (uint32_t ring = 0; ring < k.rings; ++ring) fronts.emplace_back(c, common, ring, requests);
  std::vector<std::thread> workers;
  for (FrontEnd& front : fronts) workers.emplace_back([&] { front.run(); });
  for (std::thread& worker : workers) worker.join();
  store_release(&c.control->stop_request, 1);
  serving.join();
  uint64_t ended = 0, tokens = 0, finished = 0;
  for (const FrontEnd& front : fronts) ended += front.ended, tokens += front.tokens, finished += front.finished;
  std::printf("steps %llu ended %llu finished %llu tokens %llu evictions %llu hits %llu preemptions %llu steady %llu\n",
              (unsigned long long)c.head->committed, (unsigned long long)ended, (unsigned long long)finished,
              (unsigned long long)tokens, (unsigned long long)c.head->evictions, (unsigned long long)c.head->hits,
              (unsigned long long)c.head->preemptions, (unsigned long long)steady);
  require(c.head->live == 0 && c.head->running == 0, "requests alive at the end");
  return 0;
}
