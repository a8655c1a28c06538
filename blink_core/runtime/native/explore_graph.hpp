// The state graph that a finished search leaves, and what it says of progress (Tarjan, SIAM J. Comput. 1972).
//
// Under weak fairness a run that never ends stays in one strongly connected component for ever. It is legal only if every
// kind of step that is fair is, infinitely often, either taken or impossible. A component that such a run may stay in and
// whose states are not all quiescent is a livelock; one whose only transitions lead to itself, and which is not quiescent, a
// deadlock.
#pragma once

#include <algorithm>

#include "explore_world.hpp"

namespace blink::explore {

inline constexpr uint32_t TARGET_BITS = 27, MAX_STATES = (1u << TARGET_BITS) - 1;

// Kinds of fair steps, each with its own fairness; the last is of steps that nobody owes.
enum FairClass : uint32_t { F_POLL, F_BOUNDARY, F_TICK, F_RING, F_RIVAL = F_RING + 4 * MAX_RINGS, F_UNFAIR = 31 };
static_assert(F_RIVAL + MAX_RINGS <= F_UNFAIR);
inline uint32_t fair_class(Label label, bool endless_clock) {
  const uint32_t r = explore::ring_of(label);
  // A successor waits for nothing that its predecessor does.
  const Action action = action_of(label);
  const bool front_end_moves = action == DELIVER || action == SKIP || action == CONSUME || action == CREDIT;
  if (front_end_moves && (detail_of(label) & RIVAL) != 0) return F_RIVAL + r;  // what has cleared words goes on to its fence
  if (front_end_moves && (detail_of(label) & ELDER) != 0) return F_UNFAIR;
  switch (action) {
    case POLL: return F_POLL;
    case BOUNDARY: return F_BOUNDARY;
    case TICK: return endless_clock ? uint32_t(F_TICK) : uint32_t(F_UNFAIR);
    case DELIVER:
    case SKIP: return F_RING + 4 * r;
    case CONSUME: return F_RING + 4 * r + 1;
    case CREDIT: return F_RING + 4 * r + 2;
    case RENEW: return F_RING + 4 * r + 3;
    default: return F_UNFAIR;
  }
}

class Graph {
 public:
  std::vector<uint64_t> first;   // of state i: edges first[i] to first[i + 1]
  std::vector<uint32_t> edges;   // target | fair class << TARGET_BITS
  std::vector<bool> quiescent;

  struct Result {
    int64_t state = -1;  // a state of the offending component
    bool deadlock = false;
    uint64_t components = 0, largest = 0, stuck = 0, ends = 0;
  };

  // Bytes, those included that `analyse` takes: four words of each state, and a call for each one on the search's path.
  uint64_t nbytes() const {
    return edges.capacity() * 4 + first.capacity() * 8 + quiescent.capacity() / 8 + first.size() * (4 * 4 + 16);
  }

  // Finds components, and those in which a fair run may stay without quiescence; and states from which no quiescent one
  // can be reached.
  Result analyse() const {
    Result result;
    const uint32_t n = uint32_t(first.size() - 1);
    std::vector<uint32_t> number(n, 0), low(n, 0), component_of(n, ~0u), stack;
    std::vector<std::pair<uint32_t, uint64_t>> calls;
    std::vector<bool> reaches_quiescence;  // by component; components are numbered in reverse topological order
    uint32_t counter = 0;
    for (uint32_t root = 0; root < n; ++root) {
      if (number[root] != 0) continue;
      calls.emplace_back(root, first[root]);
      number[root] = low[root] = ++counter;
      stack.push_back(root);
      while (!calls.empty()) {
        auto& [v, at] = calls.back();
        if (at < first[v + 1]) {
          const uint32_t to = edges[at++] & MAX_STATES;
          if (number[to] == 0) {
            number[to] = low[to] = ++counter;
            stack.push_back(to);
            calls.emplace_back(to, first[to]);
          } else if (component_of[to] == ~0u) {
            low[v] = std::min(low[v], number[to]);
          }
          continue;
        }
        const uint32_t done = v;
        calls.pop_back();
        if (!calls.empty()) low[calls.back().first] = std::min(low[calls.back().first], low[done]);
        if (low[done] != number[done]) continue;
        const auto begin = std::find(stack.rbegin(), stack.rend(), done).base() - 1;
        close(begin, stack.end(), component_of, reaches_quiescence, result);
        stack.erase(begin, stack.end());
      }
    }
    return result;
  }

 private:
  template <class It>
  void close(It begin, It end, std::vector<uint32_t>& component_of, std::vector<bool>& reaches, Result& result) const {
    const uint32_t id = uint32_t(reaches.size());
    for (It s = begin; s != end; ++s) component_of[*s] = id;
    bool reached = false, all_quiescent = true, inner = false, leaves = false;
    uint32_t taken = 0, everywhere = ~0u;  // fair classes with an edge inside; classes possible in every state
    uint32_t seen = 0;
    for (It s = begin; s != end; ++s) {
      uint32_t here = 0;
      for (uint64_t e = first[*s]; e < first[*s + 1]; ++e) {
        const uint32_t to = edges[e] & MAX_STATES, kind = edges[e] >> TARGET_BITS;
        here |= 1u << kind;
        if (component_of[to] == id) {
          taken |= 1u << kind;
          inner = true;
        } else {
          leaves = true;
          reached = reached || reaches[component_of[to]];
        }
      }
      everywhere &= here;
      seen |= here;
      reached = reached || quiescent[*s];
      all_quiescent = all_quiescent && quiescent[*s];
    }
    reaches.push_back(reached);
    ++result.components;
    result.largest = std::max(result.largest, uint64_t(end - begin));
    const uint32_t owed = everywhere & ~taken & ~(1u << F_UNFAIR);
    // A run may also end where nothing at all is possible.
    const bool stays = (inner && owed == 0) || (!inner && !leaves);
    if (all_quiescent && stays) ++result.ends;
    if (!reached) result.stuck += uint64_t(end - begin);
    // Whoever can leave quiescence and come back makes work of nothing: a component of both kinds is no good either.
    if (((stays && !all_quiescent) || !reached) && result.state < 0) {
      result.state = *begin;
      result.deadlock = !leaves && end - begin == 1;
    }
  }
};

}  // namespace blink::explore
