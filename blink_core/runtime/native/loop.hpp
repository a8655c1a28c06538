// Runs the scheduler in its own thread, without the GIL; the model step is taken by another thread.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <ctime>
#include <mutex>
#include <stdexcept>
#include <sys/prctl.h>
#include <thread>
#include <vector>

#include "scheduler.hpp"
#include "thread_group.hpp"

namespace blink {

using Clock = std::chrono::steady_clock;

inline uint64_t clock_us() {
  return uint64_t(std::chrono::duration_cast<std::chrono::microseconds>(Clock::now().time_since_epoch()).count());
}

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

// After the last useful work looks again at once, lending its core to whoever can run: the one waited for may be queued
// behind it on the same core. Later sleeps in short naps: latency when busy, a quiet core when idle.
class Backoff {
 public:
  Backoff(std::chrono::microseconds spin, std::chrono::microseconds nap)
      : spin_(spin), nap_(nap), since_(Clock::now()) {}
  void reset() { since_ = Clock::now(); }
  void wait() {
    const auto idle = Clock::now() - since_;
    if (idle < spin_) {
      if (idle < std::chrono::microseconds(1)) {
        relax();
      } else {
        std::this_thread::yield();
      }
      return;
    }
    // Idle for long: longer naps, or waking up alone would take a tenth of a core.
    const auto nap = idle < LONG_IDLE ? nap_ : 25 * nap_;
    const timespec ts{0, long(std::chrono::nanoseconds(nap).count())};
    nanosleep(&ts, nullptr);
  }

 private:
  static constexpr std::chrono::milliseconds LONG_IDLE{5};
  std::chrono::microseconds spin_, nap_;
  Clock::time_point since_;
};

// One engine's scheduler. While its thread is not running, `boundary` and `poll` may be called directly (tests,
// lock-step); `group_size` threads work on each such call. The running thread is a group of one.
class Scheduler {
 public:
  Scheduler(uint8_t* shared, uint8_t* state, uint8_t* log, uint8_t* plan, uint32_t group_size = 1)
      : context_(take_memory(shared, state, log, plan)), group_(scratch_), group_size_(group_size) {
    if (group_size < 1 || group_size > 256) throw std::invalid_argument("group_size must be from 1 to 256");
    if (group_size > 1) next_rows_.resize(std::min(context_.config->max_rows, STEADY_ROWS));
    scratch_.next.row = next_rows_.data();
    scratch_.next.room = uint32_t(next_rows_.size());
  }
  ~Scheduler() { join(); }

  void init() { init_state(context_); }
  // `now`: microseconds on any clock that does not go back; the caller's, so that a test decides what time it is.
  bool boundary(uint64_t now) {
    if (group_size_ == 1) return step_boundary(context_, group_, now);
    return run_team(scratch_, group_size_, [&](auto& group) { return step_boundary(context_, group, now); });
  }
  uint32_t poll(uint64_t now) {
    if (group_size_ == 1) return poll_rings(context_, group_, now);
    return run_team(scratch_, group_size_, [&](auto& group) {
      prepare_boundary(context_, group);  // as a resident group does: what happens now must not escape the boundary
      return poll_rings(context_, group, now);
    });
  }
  const Context& context() const { return context_; }
  // Boundaries that a group of several worked on together.
  uint64_t steady_boundaries() const { return scratch_.steady; }
  bool running() const { return thread_.joinable(); }

  // After a stop request the step in flight gets `grace` to end; then the loop ends without it.
  void start(std::chrono::milliseconds grace) {
    if (running()) throw std::logic_error("the scheduler thread runs already");
    if (group_size_ != 1) throw std::logic_error("the scheduler thread is a group of one");
    grace_ = grace;
    thread_ = std::thread([this] { run(); });
  }

  void join() {
    if (!thread_.joinable()) return;
    store_release(&context_.control->stop_request, 1);
    thread_.join();
  }

  // For the model thread: 1 a plan waits, 0 nothing within `timeout`, -1 the scheduler has stopped.
  int wait_plan(std::chrono::milliseconds timeout) {
    const auto spin_until = Clock::now() + std::chrono::microseconds(20);
    while (Clock::now() < spin_until) {
      if (phase_.load(std::memory_order_acquire) == LAUNCHED) return 1;
      std::this_thread::yield();
    }
    std::unique_lock lock(mutex_);
    uint32_t phase = IDLE;
    launched_.wait_for(lock, timeout, [&] {
      phase = phase_.load(std::memory_order_acquire);
      return phase == LAUNCHED || phase == ENDED;
    });
    return phase == LAUNCHED ? 1 : phase == ENDED ? -1 : 0;
  }

  // The model thread is done with the plan; `status` is a StepStatus for the whole step. Too late, it changes nothing.
  void complete(uint32_t status) {
    status_.store(status, std::memory_order_relaxed);
    uint32_t expected = LAUNCHED;
    phase_.compare_exchange_strong(expected, DONE, std::memory_order_acq_rel);
  }

 private:
  static Context take_memory(uint8_t* shared, uint8_t* state, uint8_t* log, uint8_t* plan) {
    adopt_config(shared, state);
    return make_context(shared, state, log, plan);
  }

  enum Phase : uint32_t { IDLE, LAUNCHED, DONE, ENDED };

  void set_phase(uint32_t phase) {
    {
      const std::lock_guard lock(mutex_);
      phase_.store(phase, std::memory_order_release);
    }
    launched_.notify_all();
  }

  // Holds at a step boundary while verification reads memory; never for longer than 30 s.
  void hold_if_asked() {
    const uint64_t ticket = load_acquire(&context_.control->pause_request);
    if (ticket == held_) return;
    held_ = ticket;
    const uint64_t since = clock_us();
    store_release(&context_.status->pause_ack, ticket);
    const auto deadline = Clock::now() + std::chrono::seconds(30);
    while (load_acquire(&context_.control->pause_release) < ticket && Clock::now() < deadline &&
           load_acquire(&context_.control->stop_request) == 0) {
      const timespec ts{0, 20000};
      nanosleep(&ts, nullptr);
      beat(context_);
    }
    const uint64_t now = clock_us();
    set_clock(context_, now);
    excuse_leases(context_, now - since);
  }

  void run() {
    prctl(PR_SET_TIMERSLACK, 1000UL);  // naps of 20 us would otherwise take 70
    Backoff idle(std::chrono::microseconds(100), std::chrono::microseconds(20));
    while (true) {
      const bool launch = boundary(clock_us());
      publish_events(context_);
      if (EngineState(context_.head->state) == EngineState::STOPPED) break;
      hold_if_asked();
      if (!launch) {
        if (poll(clock_us()) > 0) {
          idle.reset();
        } else {
          idle.wait();
        }
        continue;
      }
      set_phase(LAUNCHED);
      Backoff during(std::chrono::microseconds(50), std::chrono::microseconds(20));
      do {  // at least one look at the rings a step, so that no pace of the model starves them
        if (poll(clock_us()) == 0) during.wait();
      } while (phase_.load(std::memory_order_acquire) != DONE && !stop_overdue());
      uint32_t expected = LAUNCHED;
      const bool overdue = phase_.compare_exchange_strong(expected, IDLE, std::memory_order_acq_rel);
      // An overdue step has no results, whatever lies in the plan.
      context_.plan->status = overdue ? uint32_t(StepStatus::FAILED) : status_.load(std::memory_order_relaxed);
      phase_.store(IDLE, std::memory_order_release);
      idle.reset();
    }
    set_phase(ENDED);
  }

  bool stop_overdue() {
    if (load_acquire(&context_.control->stop_request) == 0) return false;
    if (stop_seen_ == Clock::time_point{}) stop_seen_ = Clock::now();
    return Clock::now() - stop_seen_ > grace_;
  }

  Context context_;
  Scratch scratch_{};
  std::vector<NextRow> next_rows_;  // of scratch_
  SoloGroup group_;
  uint32_t group_size_;
  std::thread thread_;
  std::mutex mutex_;
  std::condition_variable launched_;
  std::atomic<uint32_t> phase_{IDLE};
  std::atomic<uint32_t> status_{0};
  uint64_t held_ = 0;
  std::chrono::milliseconds grace_{0};
  Clock::time_point stop_seen_{};
};

// Takes `steps` steps with a model that costs nothing and a front end that consumes everything, on the caller's thread.
// Returns the steps that had work. Used by the benchmark.
inline uint64_t run_noop(Scheduler& scheduler, uint64_t steps) {
  const Context& c = scheduler.context();
  uint64_t done = 0;
  for (uint64_t i = 0; i < steps; ++i) {
    if (scheduler.boundary(i)) {
      ++done;
      for (uint32_t r = 0; r < c.plan->n_rows; ++r) {
        c.results[r].token = int32_t((i + r) % c.config->vocab);
        c.results[r].logprob = 0.0f;
        c.results[r].status = uint32_t(StepStatus::OK);
      }
    }
    scheduler.poll(i);
    for (uint32_t ring = 0; ring < c.config->rings; ++ring) {
      const RingMemory m = c.ring(ring);
      store_release(&m.front_end->cq_head, load_acquire(&m.gpu->cq_tail));
    }
  }
  return done;
}

}  // namespace blink
