// Exhaustive search of a small scope on the compiled scheduler (design section 9; explicit-state model checking with hash
// compaction, Wolper and Leroy, CAV 1993). Breadth first, so that a counterexample is one of the shortest. Visited states
// are kept as 128-bit hashes of their canonical forms; whole states are kept, packed, only on the frontier; a path is
// replayed from labels of parents. docs/explore.md
#pragma once

#include <chrono>
#include <map>

#include "explore_canonical.hpp"
#include "explore_clauses.hpp"
#include "explore_graph.hpp"

namespace blink::explore {

// Set of hashes that numbers them in order of arrival.
class StateTable {
 public:
  StateTable() : slots_(1u << 12, EMPTY) {}
  // Number of the hash, and whether it is new.
  std::pair<uint32_t, bool> insert(const Hash& h) {
    if ((keys_.size() + 1) * 2 > slots_.size()) grow();
    size_t at = h.low & (slots_.size() - 1);
    while (slots_[at] != EMPTY) {
      if (keys_[slots_[at]] == h) return {slots_[at], false};
      at = (at + 1) & (slots_.size() - 1);
    }
    slots_[at] = uint32_t(keys_.size());
    keys_.push_back(h);
    return {slots_[at], true};
  }
  // Number of a hash that is there, or EMPTY.
  uint32_t find(const Hash& h) const {
    size_t at = h.low & (slots_.size() - 1);
    while (slots_[at] != EMPTY && !(keys_[slots_[at]] == h)) at = (at + 1) & (slots_.size() - 1);
    return slots_[at];
  }
  size_t size() const { return keys_.size(); }
  size_t nbytes() const { return keys_.capacity() * sizeof(Hash) + slots_.size() * sizeof(uint32_t); }

 private:
  static constexpr uint32_t EMPTY = ~0u;
  void grow() {
    std::vector<uint32_t> larger(slots_.size() * 2, EMPTY);
    for (uint32_t i = 0; i < keys_.size(); ++i) {
      size_t at = keys_[i].low & (larger.size() - 1);
      while (larger[at] != EMPTY) at = (at + 1) & (larger.size() - 1);
      larger[at] = i;
    }
    slots_.swap(larger);
  }
  std::vector<Hash> keys_;
  std::vector<uint32_t> slots_;
};

// Blocks as differences from the first one: a bitmap of the words that differ, and those words.
class Frontier {
 public:
  void push(const std::vector<uint64_t>& block, const std::vector<uint64_t>& base) {
    const size_t maps = (block.size() + 63) / 64, start = words_.size();
    words_.resize(start + maps, 0);
    for (size_t i = 0; i < block.size(); ++i) {
      const uint64_t x = block[i] ^ base[i];
      if (x == 0) continue;
      words_[start + i / 64] |= uint64_t(1) << (i % 64);
      words_.push_back(x);
    }
  }
  void pop(std::vector<uint64_t>& block, const std::vector<uint64_t>& base) {
    const size_t maps = (block.size() + 63) / 64, start = at_;
    std::memcpy(block.data(), base.data(), block.size() * 8);
    at_ += maps;
    for (size_t m = 0; m < maps; ++m) {
      for (uint64_t bits = words_[start + m]; bits != 0; bits &= bits - 1) {
        block[m * 64 + size_t(__builtin_ctzll(bits))] ^= words_[at_++];
      }
    }
  }
  bool empty() const { return at_ == words_.size(); }
  size_t nbytes() const { return words_.capacity() * 8; }
  void clear() { words_.clear(), at_ = 0; }
  void swap(Frontier& other) { words_.swap(other.words_), std::swap(at_, other.at_); }

 private:
  std::vector<uint64_t> words_;
  size_t at_ = 0;
};

class Explorer {
 public:
  enum Status : int { RUNNING, FINISHED, VIOLATED, STATE_LIMIT, MEMORY_LIMIT };

  Explorer(const Config& config, const int64_t* scope, size_t n, bool symmetry)
      : scope_(config, scope, n),
        world_(config, scope_),
        clauses_(world_),
        canonical_(world_, symmetry),
        base_(world_.now.words) {
    visit(0, 0);
    graph_.first.push_back(0);
    next_.push(base_, base_);
  }

  // Searches for `seconds`, or until the frontier is empty, a clause is broken or a limit is reached.
  Status run(double seconds, uint64_t max_states, uint64_t max_bytes) {
    if (status_ != RUNNING) return status_;
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    for (uint32_t n = 0;; ++n) {
      if (current_.empty()) {
        if (next_.empty()) return status_ = FINISHED;
        current_.clear();
        current_.swap(next_);
        ++depth_;
      }
      if (table_.size() >= std::min<uint64_t>(max_states, MAX_STATES)) return status_ = STATE_LIMIT;
      if (n % 256 == 255) {
        if (nbytes() > max_bytes) return status_ = MEMORY_LIMIT;
        if (std::chrono::steady_clock::now() >= deadline) return RUNNING;
      }
      if (!expand()) return status_ = VIOLATED;
    }
  }

  // After FINISHED: whether states were rightly taken for each other; deadlock, livelock, and whether quiescence stays
  // within reach. False, with a violation, if not.
  bool analyse() {
    if (!merged_states_agree()) return false;
    result_ = graph_.analyse();
    analysed_ = true;
    if (result_.state < 0) return true;
    const bool cut_off = result_.stuck > 0;
    violation_ = {"liveness", result_.deadlock ? "deadlock: nothing that can happen changes anything, and work is left"
                              : cut_off ? "livelock: from here no run ever gets all work done"
                                        : "livelock: a fair run may stay here for ever with work left"};
    bad_ = uint32_t(result_.state);
    last_ = NO_LABEL;
    status_ = VIOLATED;
    return false;
  }

  const Violation& violation() const { return violation_; }

  // Labels from the first state to the broken clause.
  std::vector<Label> witness() const {
    std::vector<Label> path;
    if (status_ != VIOLATED) return path;
    if (last_ != NO_LABEL) path.push_back(last_);
    for (uint32_t at = bad_; at != 0; at = parents_[at]) path.push_back(labels_[at]);
    std::reverse(path.begin(), path.end());
    return path;
  }

  // What each transition of a path did, in words: `label`, then observables; see verification/explore/witness.py.
  std::vector<std::vector<int64_t>> replay(const std::vector<Label>& path) {
    World world(world_.config(), scope_);
    Clauses clauses(world);
    std::vector<std::vector<int64_t>> out;
    for (const Label label : path) {
      world.was.copy(world.now);
      std::vector<int64_t> record{int64_t(label)};
      try {
        world.launched = false;
        world.apply(label);
        clauses.after(label);
      } catch (const Violation&) {
        describe(world, record);
        out.push_back(record);
        break;
      }
      describe(world, record);
      out.push_back(record);
    }
    return out;
  }

  std::map<std::string, uint64_t> figures() const {
    return {{"states", table_.size()},          {"transitions", transitions_},  {"depth", depth_},
            {"bytes", nbytes()},                {"peak_bytes", peak_},          {"quiescent", quiescent_},
            {"components", result_.components}, {"largest_component", result_.largest},
            {"stuck", result_.stuck},           {"ends", result_.ends},         {"analysed", analysed_ ? 1u : 0u},
            {"reexpanded", reexpanded_},
            {"state_bytes", state_layout(world_.config()).nbytes}};
  }
  std::map<std::string, bool> situations() const {
    std::map<std::string, bool> out;
    for (uint32_t s = 0; s < S_COUNT; ++s) out[SITUATIONS[s]] = (clauses_.situations >> s & 1) != 0;
    return out;
  }

 private:
  static constexpr Label NO_LABEL = ~0u;
  static constexpr size_t MOST_SAMPLES = 1 << 16;

  std::pair<uint32_t, bool> visit(uint32_t parent, Label label) {
    const auto found = table_.insert(canonical_.hash());
    if (found.second) {
      parents_.push_back(parent);
      labels_.push_back(label);
      const bool quiet = clauses_.quiescent();
      graph_.quiescent.push_back(quiet);
      quiescent_ += quiet ? 1 : 0;
    }
    return found;
  }

  // All transitions of the next state of the frontier. False if a clause broke.
  bool expand() {
    const uint32_t from = expanded_++;
    current_.pop(world_.was.words, base_);
    world_.now.copy(world_.was);
    world_.enabled(moves_);
    const bool endless = scope_.ticks < 0;
    for (size_t i = 0; i < moves_.size(); ++i) {
      if (i > 0) world_.now.copy(world_.was);
      const Label label = moves_[i];
      ++transitions_;
      try {
        world_.launched = false;
        world_.apply(label);
        clauses_.after(label);
      } catch (const Violation& v) {
        violation_ = v;
        bad_ = from;
        last_ = label;
        return false;
      }
      const auto [to, is_new] = visit(from, label);
      graph_.edges.push_back(to | fair_class(label, endless) << TARGET_BITS);
      if (is_new) {
        next_.push(world_.now.words, base_);
      } else {
        sample(to);
      }
    }
    graph_.first.push_back(graph_.edges.size());
    return true;
  }

  // Keeps an even sample of the concrete states that were taken for one seen before.
  void sample(uint32_t number) {
    if (++merged_ % stride_ != 0) return;
    samples_.emplace_back(number, Frontier{}).second.push(world_.now.words, base_);
    sample_bytes_ += samples_.back().second.nbytes();
    if (samples_.size() < MOST_SAMPLES) return;
    for (size_t i = 0; i < MOST_SAMPLES / 2; ++i) samples_[i] = std::move(samples_[2 * i + 1]);
    samples_.resize(MOST_SAMPLES / 2);
    stride_ *= 2;
    sample_bytes_ = 0;
    for (const auto& [_, block] : samples_) sample_bytes_ += block.nbytes();
  }

  // Expands the sampled states: each must have the transitions of the state that it was taken for, into the same states.
  // What the canonical form forgets and should not shows here.
  bool merged_states_agree() {
    for (auto& [number, block] : samples_) {
      block.pop(world_.was.words, base_);
      world_.now.copy(world_.was);
      world_.enabled(moves_);
      bool agrees = moves_.size() == graph_.first[number + 1] - graph_.first[number];
      for (size_t i = 0; agrees && i < moves_.size(); ++i) {
        if (i > 0) world_.now.copy(world_.was);
        last_ = moves_[i];
        try {
          world_.launched = false;
          world_.apply(last_);
          clauses_.after(last_);
          const uint32_t kind = fair_class(last_, scope_.ticks < 0) << TARGET_BITS;
          agrees = (table_.find(canonical_.hash()) | kind) == graph_.edges[graph_.first[number] + i];
        } catch (const Violation& v) {
          agrees = false;
        }
      }
      ++reexpanded_;
      if (agrees) continue;
      violation_ = {"reduction", "two states that were taken for each other differ in what follows"};
      bad_ = number;
      status_ = VIOLATED;
      return false;
    }
    return true;
  }

  // What the analysis will take is counted from the start, for it cannot stop half way.
  uint64_t nbytes() const {
    const uint64_t n = table_.nbytes() + current_.nbytes() + next_.nbytes() + parents_.capacity() * 4 +
                       labels_.capacity() * 4 + graph_.nbytes() + sample_bytes_ +
                       samples_.capacity() * sizeof(samples_[0]);
    peak_ = std::max(peak_, n);
    return n;
  }

  // running and waiting requests, pages, then the events written by the transition
  static void describe(const World& w, std::vector<int64_t>& out) {
    const Context &c = w.now.c, &b = w.was.c;
    for (int64_t v : {int64_t(c.head->in_flight), int64_t(c.head->free_pages), int64_t(c.head->quarantined),
                      int64_t(c.head->idle_cached), int64_t(c.head->state), int64_t(w.now.env->now)}) {
      out.push_back(v);
    }
    const uint32_t n = w.config().rings * w.config().slots;
    out.push_back(n);
    for (uint32_t i = 0; i < n; ++i) {
      const Request& q = c.requests[i];
      const bool live = q.state != uint32_t(RequestState::FREE);
      out.insert(out.end(), {int64_t(q.state), live ? int64_t(q.generation) : int64_t(q.judged),
                             live ? int64_t(q.computed) : 0, live ? int64_t(q.total) : 0,
                             live ? int64_t(q.n_pages) : 0, q.row >= 0 ? int64_t(q.paused) : 0});
    }
    out.push_back(w.launched ? c.plan->n_rows : 0);
    for (uint32_t i = 0; w.launched && i < c.plan->n_rows; ++i) {
      const PlanRow& row = c.plan_rows[i];
      out.insert(out.end(), {int64_t(row.request), int64_t(row.q_len), int64_t(row.context_len), int64_t(row.sample)});
    }
    for (uint32_t r = 0; r < w.config().rings; ++r) {
      const bool over = c.rings[r].epoch != b.rings[r].epoch;
      const uint64_t from = over ? 0 : b.rings[r].cq_tail;
      const uint64_t count = c.rings[r].cq_tail > from ? c.rings[r].cq_tail - from : 0;
      out.insert(out.end(), {int64_t(c.rings[r].epoch), int64_t(c.ring(r).gpu->epoch_ack), int64_t(c.rings[r].sq_next),
                             int64_t(w.now.env->front_ends[r].op), int64_t(w.now.env->front_ends[r].part),
                             int64_t(w.now.env->front_ends[r].consumed), int64_t(count)});
      for (uint64_t at = from; at < from + count; ++at) {
        const Event& e = c.ring(r).cq[at & (w.config().cq_entries - 1)];
        out.insert(out.end(), {int64_t(e.slot), int64_t(e.generation), int64_t(e.kind), int64_t(e.reason),
                               int64_t(e.index), int64_t(e.token)});
      }
    }
  }

  Scope scope_;
  World world_;
  Clauses clauses_;
  Canonical canonical_;
  std::vector<uint64_t> base_;
  StateTable table_;
  Frontier current_, next_;
  Graph graph_;
  std::vector<uint32_t> parents_;
  std::vector<Label> labels_, moves_;
  Violation violation_;
  Graph::Result result_;
  Status status_ = RUNNING;
  uint32_t expanded_ = 0, bad_ = 0;
  Label last_ = NO_LABEL;
  uint64_t transitions_ = 0, depth_ = 0, quiescent_ = 0;
  std::vector<std::pair<uint32_t, Frontier>> samples_;
  uint64_t merged_ = 0, stride_ = 1, reexpanded_ = 0, sample_bytes_ = 0;
  mutable uint64_t peak_ = 0;
  bool analysed_ = false;
};

}  // namespace blink::explore
