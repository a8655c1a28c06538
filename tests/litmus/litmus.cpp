// Litmus tests of the ring's memory order under ThreadSanitizer: one front-end thread against the real scheduler.
// `litmus NAME release|relaxed`: in the twin `relaxed` the one word that the test is about is published or read without
// order, and the sanitizer must report a race. Exits 0 when the exchange went right; a report of the sanitizer exits
// otherwise. The front end orders nothing but by that word: any other edge would hide the race.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include "loop.hpp"

using namespace blink;

namespace {

constexpr uint32_t ROUNDS = 40, PROMPT = 12;

void require(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::_Exit(3);
}

Config make_config() {
  Config k{};
  k.magic = MAGIC;
  k.abi_version = ABI_VERSION;
  k.rings = 1;
  k.slots = 2;
  k.sq_entries = 4;
  k.cq_entries = 8;
  k.max_len = 24;
  k.arena_tokens = 64;
  k.page_size = 4;
  k.pages = 2 + 12;
  k.max_rows = 2;
  k.token_budget = 32;
  k.vocab = 97;
  k.max_pages = 6;
  k.visibility_us = 10000000;
  k.paused_limit = 3;
  k.log_entries = 1 << 8;
  k.quantum = 16;
  k.reservation_steps = 3;
  k.masks = 1;
  k.mask_words = 4;
  return k;
}

struct Memory {
  std::unique_ptr<uint8_t[]> shared, state, log, plan;
  explicit Memory(const Config& k) {
    shared = std::make_unique<uint8_t[]>(control_layout(k).nbytes + ring_layout(k).nbytes);
    state = std::make_unique<uint8_t[]>(state_layout(k).nbytes);
    log = std::make_unique<uint8_t[]>(log_layout(k).nbytes);
    plan = std::make_unique<uint8_t[]>(plan_layout(k).nbytes);
    std::memcpy(shared.get(), &k, sizeof k);
  }
};

void store_relaxed(uint64_t* word, uint64_t value) {
  cuda::atomic_ref<uint64_t, cuda::thread_scope_system>(*word).store(value, cuda::std::memory_order_relaxed);
}

uint64_t load_relaxed(const uint64_t* word) {
  cuda::atomic_ref<uint64_t, cuda::thread_scope_system> ref(*const_cast<uint64_t*>(word));
  return ref.load(cuda::std::memory_order_relaxed);
}

uint64_t sum_words(const void* data, uint32_t words) {
  uint64_t sum = 0;
  for (uint32_t i = 0; i < words; ++i) {
    uint32_t word;
    std::memcpy(&word, static_cast<const uint8_t*>(data) + 4 * i, 4);
    sum += mix_word(word, i);
  }
  return sum;
}

// The scheduler's thread, with a model whose every token is 1; only its own code orders what it shares.
void serve(Scheduler& scheduler, const std::atomic<bool>& stop) {
  const Context& c = scheduler.context();
  while (!stop.load(std::memory_order_relaxed)) {
    const bool launch = scheduler.boundary(clock_us());
    publish_events(c);
    for (uint32_t r = 0; launch && r < c.plan->n_rows; ++r) c.results[r] = {1, -0.5f, uint32_t(StepStatus::OK), 0};
    if (launch) c.plan->status = uint32_t(StepStatus::OK);
    scheduler.poll(clock_us());
    std::this_thread::yield();
  }
}

class FrontEnd {
 public:
  FrontEnd(const Context& c, const std::string& name, bool relaxed)
      : m_(c.ring(0)), k_(*c.config), name_(name), relaxed_(relaxed) {}

  // The word that the test `name` is about is ordered unless this is its twin.
  void publish(const char* name, uint64_t* word, uint64_t value) {
    name_ == name && relaxed_ ? store_relaxed(word, value) : store_release(word, value);
  }
  uint64_t follow(const char* name, const uint64_t* word) {
    return name_ == name && relaxed_ ? load_relaxed(word) : load_acquire(word);
  }

  void attach(uint64_t epoch) {
    for (uint32_t i = 0; i < k_.sq_entries; ++i) store_relaxed(&m_.sq[i], 0);
    store_relaxed(&m_.front_end->cq_head, 0);
    store_release(&m_.front_end->epoch, epoch);
    wait([&] { return follow("epoch", &m_.gpu->epoch_ack) == epoch; }, "no acknowledgement of an epoch");
    sq_ = head_ = 0;
    generation_[0] = generation_[1] = 0;
  }

  void submit(uint32_t slot, uint32_t max_tokens, bool masked = false) {
    Slot s{};
    s.generation = ++generation_[slot];
    s.prompt_len = PROMPT;
    s.prompt_offset = slot * 32;
    s.max_tokens = max_tokens;
    s.top_p = s.repetition_penalty = 1.0f;
    s.flags = uint32_t(SlotFlag::IGNORE_EOS) | (masked ? uint32_t(SlotFlag::MASKED) : 0);
    uint32_t* payload = reinterpret_cast<uint32_t*>(m_.arena) + s.prompt_offset;
    for (uint32_t i = 0; i < PROMPT; ++i) payload[i] = (generation_[slot] + i) % k_.vocab;
    s.prompt_checksum = sum_words(payload, PROMPT);
    s.checksum = sum_words(&s, sizeof s / 4);
    m_.slots[slot] = s;
    const uint64_t word = uint64_t(sq_seq(sq_)) | uint64_t(Op::SUBMIT) << SQ_OP_SHIFT |
                          uint64_t(slot) << SQ_SLOT_SHIFT | uint64_t(generation_[slot]) << SQ_GENERATION_SHIFT;
    publish("submission", &m_.sq[sq_++ & (k_.sq_entries - 1)], word);
  }

  void post_mask(uint32_t index) {
    for (uint32_t i = 0; i < k_.mask_words; ++i) m_.mask_bits[i] = ~0u << index;
    store_relaxed(&m_.mask_boxes[0].checksum, sum_words(m_.mask_bits, k_.mask_words));
    publish("mask", &m_.mask_boxes[0].ready, uint64_t(generation_[0]) << SQ_GENERATION_SHIFT | (index + 1));
  }

  // Reads `count` events; the tail is ordered but in the twin of `completion` or `reuse`.
  void consume(uint32_t count) {
    const uint64_t until = head_ + count;
    wait([&] { return follow(name_ == "reuse" ? "reuse" : "completion", &m_.gpu->cq_tail) >= until; }, "no event");
    for (; head_ < until; ++head_) {
      if (name_ == "reuse") continue;  // whose race is to be the descriptor's
      const bool right = m_.cq[head_ & (k_.cq_entries - 1)].seq == head_ + 1;
      require(right || relaxed_, "an event out of sequence");
    }
    publish("credits", &m_.front_end->cq_head, head_);
  }

  // Waits until the scheduler has taken all entries, which orders nothing here.
  void until_taken() {
    wait([&] { return load_relaxed(&m_.gpu->sq_head) == sq_; }, "an entry was not taken");
  }

 private:
  template <class Ready>
  void wait(Ready ready, const char* what) {
    const auto deadline = Clock::now() + std::chrono::seconds(20);
    while (!ready()) {
      require(Clock::now() < deadline, what);
      std::this_thread::yield();
    }
  }

  RingMemory m_;
  const Config& k_;
  std::string name_;
  bool relaxed_;
  uint64_t sq_ = 0, head_ = 0;
  uint32_t generation_[2] = {};
};

// Payload and descriptor, then the entry (design 3): the scheduler's reads of them follow its read of the entry.
void submission(FrontEnd& f) {
  for (uint32_t i = 0; i < ROUNDS; ++i) f.submit(0, 1), f.consume(2);
}
// Events, then the tail (R9): the front end's reads of them follow its read of the tail.
void completion(FrontEnd& f) { submission(f); }
// Credits (R4): the scheduler writes over an event only when the front end has read it. One request, more events than
// the queue has places: nothing but the head tells the scheduler anything.
void credits(FrontEnd& f) {
  f.submit(0, 12);
  for (uint32_t i = 0; i < 13; ++i) f.consume(1);
}
// A slot is written again only behind the terminal event of its last generation, and the scheduler has read it by then.
void reuse(FrontEnd& f) { submission(f); }
// A new epoch (R2): what the scheduler did for the last one precedes its acknowledgement.
void epoch(FrontEnd& f) {
  for (uint64_t next = 2; next < 2 + ROUNDS; ++next) {
    f.submit(0, 4);
    f.until_taken();
    f.attach(next);
  }
}
// Bits, checksum, ready word (R11).
void mask(FrontEnd& f) {
  f.submit(0, 8, true);
  for (uint32_t i = 0; i < 8; ++i) f.post_mask(i), f.consume(1);
}

}  // namespace

int main(int argc, char** argv) {
  require(argc == 3, "usage: litmus NAME release|relaxed");
  const std::string name = argv[1];
  void (*const tests[])(FrontEnd&) = {submission, completion, credits, reuse, epoch, mask};
  const char* const names[] = {"submission", "completion", "credits", "reuse", "epoch", "mask"};
  uint32_t at = 0;
  while (at < 6 && name != names[at]) ++at;
  require(at < 6, "no litmus test of this name");
  const Config k = make_config();
  Memory memory(k);
  Scheduler scheduler(memory.shared.get(), memory.state.get(), memory.log.get(), memory.plan.get());
  scheduler.init();
  std::atomic<bool> stop{false};
  std::thread serving([&] { serve(scheduler, stop); });
  FrontEnd front(scheduler.context(), name, std::string(argv[2]) == "relaxed");
  std::thread working([&] {
    front.attach(1);
    tests[at](front);
  });
  working.join();
  stop.store(true, std::memory_order_relaxed);
  serving.join();
  std::printf("%s ok\n", name.c_str());
  return 0;
}
