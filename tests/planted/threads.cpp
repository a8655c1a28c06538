// The scheduler among real threads, for ThreadSanitizer: front ends on their rings, a group of threads that runs the
// scheduler, the model's thread. `threads GROUP REQUESTS [LEVEL]`: group size, requests of each ring, level of the event
// log (all). Exits 0 when every request got one terminal event and its tokens in order; a report of the sanitizer exits
// otherwise. Built from woven headers, it puts the mutant of the variable BLINK_MUTANT in force.
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

constexpr uint32_t RINGS = 2, SLOTS = 6, EPOCHS = 4;

void require(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::exit(3);
}

Config make_config(LogLevel level) {
  Config k{};
  k.magic = MAGIC;
  k.abi_version = ABI_VERSION;
  k.rings = RINGS;
  k.slots = SLOTS;
  k.sq_entries = 16;
  k.cq_entries = 64;
  k.max_len = 40;
  k.arena_tokens = SLOTS * (k.max_len + 4);
  k.page_size = 4;
  k.pages = 2 + 14;
  k.max_rows = 4;
  k.token_budget = 12;
  k.vocab = 97;
  k.max_pages = 10;
  k.visibility_us = 1000000;
  k.paused_limit = 3;
  k.log_entries = 1 << 10;
  k.log_level = uint32_t(level);
  k.prefix_cache = 1;
  k.quantum = 16;
  k.reservation_steps = 3;
  k.lease_us = 30000;  // lapses now and then on a busy machine, which is meant
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
  FrontEnd(const Context& c, uint32_t ring, uint32_t requests)
      : c_(c), m_(c.ring(ring)), k_(*c.config), random_(ring + 1), left_(requests) {}

  void run() {
    for (uint64_t epoch = 1; epoch <= EPOCHS; ++epoch) {
      attach(epoch);
      uint32_t batch = left_ / uint32_t(EPOCHS - epoch + 1);
      left_ -= batch;
      while (batch > 0 || (live_ > 0 && epoch == EPOCHS)) {  // an epoch before the last leaves requests behind
        for (uint32_t slot = 0; slot < SLOTS && batch > 0; ++slot) {
          if (!alive_[slot]) submit(slot), --batch;
        }
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
    const auto deadline = Clock::now() + std::chrono::seconds(20);
    while (load_acquire(&m_.gpu->epoch_ack) != epoch) {
      require(Clock::now() < deadline, "no acknowledgement of an epoch");
      std::this_thread::yield();
    }
    sq_ = head_ = live_ = 0;
    for (uint32_t i = 0; i < SLOTS; ++i) {
      alive_[i] = false;
      generation_[i] = 0;
    }
  }

  void publish(Op op, uint32_t slot) {
    const auto deadline = Clock::now() + std::chrono::seconds(20);
    while (sq_ - load_acquire(&m_.gpu->sq_head) >= k_.sq_entries) {
      require(Clock::now() < deadline, "no room in the submission queue");
      store_release(&m_.front_end->lease, ++lease_);
      consume();
    }
    const uint64_t word = uint64_t(sq_seq(sq_)) | uint64_t(op) << SQ_OP_SHIFT | uint64_t(slot) << SQ_SLOT_SHIFT |
                          uint64_t(generation_[slot]) << SQ_GENERATION_SHIFT;
    store_release(&m_.sq[sq_++ & (k_.sq_entries - 1)], word);
  }

  void submit(uint32_t slot) {
    Slot s{};
    s.generation = ++generation_[slot];
    s.prompt_len = 1 + random_() % 20;
    s.n_bias = random_() % 3;
    s.prompt_offset = slot * (k_.max_len + 4);
    s.max_tokens = 1 + random_() % 12;
    s.top_p = s.repetition_penalty = 1.0f;
    s.logprobs = random_() % 5;
    s.priority = random_() % 3;
    s.deadline_us = random_() % 8 == 0 ? 3000 : 0;
    s.flags = uint32_t(SlotFlag::IGNORE_EOS);
    masked_[slot] = slot < k_.masks && random_() % 2 == 0;
    if (masked_[slot]) {
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
    alive_[slot] = true;
    index_[slot] = 0;
    ++live_;
    publish(Op::SUBMIT, slot);
    if (masked_[slot]) post_mask(slot);
    if (random_() % 6 == 0) publish(Op::CANCEL, slot);
  }

  void post_mask(uint32_t box) {
    uint32_t* bits = m_.mask_bits + box * k_.mask_words;
    for (uint32_t i = 0; i < k_.mask_words; ++i) bits[i] = ~0u << (index_[box] % 8);
    store_release(&m_.mask_boxes[box].checksum, sum_words(bits, k_.mask_words));
    store_release(&m_.mask_boxes[box].ready, uint64_t(generation_[box]) << SQ_GENERATION_SHIFT |
                                                 uint64_t(box) << SQ_SLOT_SHIFT | (index_[box] + 1));
  }

  void consume() {
    const uint64_t tail = load_acquire(&m_.gpu->cq_tail);
    for (; head_ < tail; ++head_) {
      const Event& e = m_.cq[head_ & (k_.cq_entries - 1)];
      require(e.seq == head_ + 1, "an event out of sequence");
      const uint32_t slot = e.slot;
      require(slot < SLOTS && alive_[slot] && e.generation == generation_[slot], "an event of no live request");
      if (EventKind(e.kind) == EventKind::LOGPROBS) continue;
      require(e.index == index_[slot], "a token out of order");
      if (EventKind(e.kind) == EventKind::TOKEN) {
        ++index_[slot];
        ++tokens;
        if (masked_[slot]) post_mask(slot);
        continue;
      }
      finished += EventKind(e.kind) == EventKind::FINISH;
      ++ended;
      alive_[slot] = false;
      --live_;
    }
    store_release(&m_.front_end->cq_head, head_);
  }

  const Context& c_;
  RingMemory m_;
  const Config& k_;
  std::minstd_rand random_;
  uint32_t left_, live_ = 0;
  uint64_t sq_ = 0, head_ = 0, lease_ = 0;
  bool alive_[SLOTS] = {}, masked_[SLOTS] = {};
  uint32_t generation_[SLOTS] = {}, index_[SLOTS] = {};
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

// The loop of Scheduler::run for a group of several threads.
void run_group(const Context& c, const ThreadGroup& made, std::atomic<uint32_t>& phase) {
  ThreadGroup g = made;
  while (true) {
    const bool launch = step_boundary(c, g, clock_us());
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

void serve_team(const Context& c, uint32_t size, uint64_t& sink) {
  Scratch scratch{};
  Team team(size);
  std::atomic<uint32_t> phase{0};
  std::vector<std::thread> members;
  for (uint32_t rank = 0; rank < size; ++rank) {
    members.emplace_back([&, rank] { run_group(c, ThreadGroup(scratch, team, rank), phase); });
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
  require(argc == 3 || argc == 4, "usage: threads GROUP REQUESTS [LEVEL]");
#if __has_include("mutant.hpp")
  if (const char* mutant = std::getenv("BLINK_MUTANT")) active_mutant = uint32_t(std::atoi(mutant));
#endif
  const uint32_t size = uint32_t(std::atoi(argv[1])), requests = uint32_t(std::atoi(argv[2]));
  const Config k = make_config(argc == 4 ? LogLevel(std::atoi(argv[3])) : LogLevel::ALL);
  Memory memory(k);
  Scheduler scheduler(memory.shared.get(), memory.state.get(), memory.log.get(), memory.plan.get());
  scheduler.init();
  const Context& c = scheduler.context();
  uint64_t sink = 0;
  std::thread serving([&] { size == 1 ? serve_alone(scheduler, sink) : serve_team(c, size, sink); });
  std::vector<FrontEnd> fronts;
  for (uint32_t ring = 0; ring < RINGS; ++ring) fronts.emplace_back(c, ring, requests);
  std::vector<std::thread> workers;
  for (FrontEnd& front : fronts) workers.emplace_back([&] { front.run(); });
  for (std::thread& worker : workers) worker.join();
  store_release(&c.control->stop_request, 1);
  serving.join();
  uint64_t ended = 0, tokens = 0, finished = 0;
  for (const FrontEnd& front : fronts) ended += front.ended, tokens += front.tokens, finished += front.finished;
  std::printf("steps %llu ended %llu finished %llu tokens %llu evictions %llu hits %llu preemptions %llu\n",
              (unsigned long long)c.head->committed, (unsigned long long)ended, (unsigned long long)finished,
              (unsigned long long)tokens, (unsigned long long)c.head->evictions, (unsigned long long)c.head->hits,
              (unsigned long long)c.head->preemptions);
  require(c.head->live == 0 && c.head->running == 0, "requests alive at the end");
  return 0;
}
