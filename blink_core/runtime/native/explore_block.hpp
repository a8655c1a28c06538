// Memory of one explored state: engine, rings, KV and environment in one flat block that is copied whole.
#pragma once

#include "explore_scope.hpp"

namespace blink::explore {

// Offsets of the block's parts.
struct BlockLayout {
  uint64_t state, plan, log, kv, env, nbytes, rings, ring_stride;
  explicit BlockLayout(const Config& c) {
    rings = control_layout(c).nbytes;
    ring_stride = ring_layout(c).nbytes;
    state = rings + c.rings * ring_stride;
    plan = state + state_layout(c).nbytes;
    log = plan + plan_layout(c).nbytes;
    kv = log + log_layout(c).nbytes;
    env = align_section(kv + uint64_t(c.pages) * c.page_size * 8);
    nbytes = align_section(env + sizeof(Env));
  }
};

// A block with pointers into it.
struct Block {
  std::vector<uint64_t> words;
  Context c;
  int64_t* kv;
  Env* env;

  Block(const Config& config, const BlockLayout& l) : words(l.nbytes / 8, 0) {
    uint8_t* base = bytes();
    *reinterpret_cast<Config*>(base + control_layout(config).config) = config;
    adopt_config(base, base + l.state);
    c = make_context(base, base + l.state, base + l.log, base + l.plan);
    kv = reinterpret_cast<int64_t*>(base + l.kv);
    env = reinterpret_cast<Env*>(base + l.env);
  }
  Block(const Block&) = delete;
  uint8_t* bytes() { return reinterpret_cast<uint8_t*>(words.data()); }
  void copy(const Block& from) { std::memcpy(words.data(), from.words.data(), words.size() * 8); }
};

}  // namespace blink::explore
