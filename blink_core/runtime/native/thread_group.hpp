// A group of host threads that work in step as the threads of a GPU block do (design section 4): for tests that one
// history gives the same logs and plans whatever the size of the group. The serving thread is a group of one.
#pragma once

#include <atomic>
#include <barrier>
#include <thread>
#include <vector>

#include "group.hpp"

namespace blink {

struct Team {
  explicit Team(uint32_t size) : size(size), barrier(std::ptrdiff_t(size)) {}
  const uint32_t size;
  std::barrier<> barrier;
  std::atomic<uint64_t> cell{0};
};

class ThreadGroup {
 public:
  Scratch& scratch;
  ThreadGroup(Scratch& s, Team& team, uint32_t rank) : scratch(s), team_(team), rank_(rank) {}
  uint32_t rank() const { return rank_; }
  uint32_t size() const { return team_.size; }
  void sync() const { team_.barrier.arrive_and_wait(); }
  uint64_t broadcast(uint64_t value) const {
    if (rank_ == 0) team_.cell.store(value, std::memory_order_relaxed);
    return collect();
  }
  uint64_t sum(uint64_t value) const {
    if (rank_ == 0) team_.cell.store(0, std::memory_order_relaxed);
    sync();
    team_.cell.fetch_add(value, std::memory_order_relaxed);
    return collect();
  }
  bool any(bool value) const { return sum(value ? 1 : 0) != 0; }
  bool beats() const { return true; }
  void stamp(Phase) const {}
  uint64_t peek(uint32_t, const uint64_t* word) const { return load_acquire(word); }

 private:
  uint64_t collect() const {
    sync();
    const uint64_t result = team_.cell.load(std::memory_order_relaxed);
    sync();  // nobody writes the cell again before all have read it
    return result;
  }

  Team& team_;
  uint32_t rank_;
};

// Runs `work(group)` on `size` threads and returns what rank 0 returned.
template <class Work>
auto run_team(Scratch& scratch, uint32_t size, Work work) {
  Team team(size);
  std::vector<std::thread> others;
  for (uint32_t rank = 1; rank < size; ++rank) {
    others.emplace_back([&, rank] {
      ThreadGroup group(scratch, team, rank);
      work(group);
    });
  }
  ThreadGroup group(scratch, team, 0);
  const auto result = work(group);
  for (std::thread& other : others) other.join();
  return result;
}

}  // namespace blink
