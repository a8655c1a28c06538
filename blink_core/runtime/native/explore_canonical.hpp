// The canonical form of a state: all that its future depends on, and nothing else. Two states with equal forms have the
// same transitions into states with equal forms (docs/explore.md says why, field by field).
//
// Left out always: counters that only reports read, memory that the next writer overwrites before anyone reads it, and
// absolute ages, indices and times, of which only order and distance matter. Symmetry reduction also renames KV pages and
// block-table rows by first use: the scheduler only ever compares their ids for equality. Rings and slots are not
// interchangeable: a poll looks at ring 0 first, and ends requests in slot order.
#pragma once

#include "explore_world.hpp"

namespace blink::explore {

struct Hash {
  uint64_t low, high;
  bool operator==(const Hash&) const = default;
};

class Canonical {
 public:
  Canonical(const World& world, bool symmetry) : w_(world), symmetry_(symmetry), words_(1 << 13) {}

  Hash hash() {
    n_ = 0;
    write();
    return digest();
  }

 private:
  // Folded 64 x 64 bit multiplication in two lanes with different keys, as in wyhash, finished by a full avalanche.
  static uint64_t fold(uint64_t a, uint64_t b) {
    const unsigned __int128 p = static_cast<unsigned __int128>(a) * b;
    return uint64_t(p) ^ uint64_t(p >> 64);
  }
  static uint64_t avalanche(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }
  Hash digest() {
    while (n_ % 4 != 0) words_[n_++] = 0;
    uint64_t a = 0x243F6A8885A308D3ull ^ n_, b = 0x13198A2E03707344ull + n_;
    for (size_t i = 0; i < n_; i += 4) {
      const uint64_t x = uint64_t(words_[i]) | uint64_t(words_[i + 1]) << 32;
      const uint64_t y = uint64_t(words_[i + 2]) | uint64_t(words_[i + 3]) << 32;
      a = fold(x ^ 0xA4093822299F31D0ull ^ a, y ^ 0x082EFA98EC4E6C89ull) + (a << 31 | a >> 33);
      b = fold(y ^ 0x452821E638D01377ull ^ b, x ^ 0xBE5466CF34E90C6Cull) + (b << 29 | b >> 35);
    }
    return {avalanche(a ^ (b << 17 | b >> 47)), avalanche(b + 0x9E3779B97F4A7C15ull)};
  }

  void put(uint64_t value) { words_[n_++] = uint32_t(value); }
  void put_long(uint64_t value) {
    words_[n_++] = uint32_t(value);
    words_[n_++] = uint32_t(value >> 32);
  }
  template <class... T>
  void put_all(T... values) {
    (put(uint64_t(values)), ...);
  }
  static uint64_t capped(uint64_t value, uint64_t cap) { return value < cap ? value : cap; }

  uint32_t page(uint32_t id) {
    if (!symmetry_ || id < RESERVED_PAGES || id >= MAX_PAGES) return id;
    if (page_names_[id] == 0) page_names_[id] = ++pages_named_;
    return page_names_[id];
  }
  uint32_t row(int32_t id) {
    if (!symmetry_ || id < 0 || id >= int32_t(MAX_ROWS)) return uint32_t(id);
    if (row_names_[id] == 0) row_names_[id] = ++rows_named_;
    return row_names_[id];
  }
  uint64_t page_set(uint32_t bits) {
    if (!symmetry_) return bits;
    uint32_t renamed = 0;
    for (uint32_t id = RESERVED_PAGES; id < MAX_PAGES; ++id) {
      if ((bits >> id & 1) != 0) renamed |= 1u << (page(id) & 31);
    }
    return renamed;
  }

  void write() {
    const Context& c = w_.now.c;
    const Config& k = w_.config();
    pages_named_ = RESERVED_PAGES - 1;
    rows_named_ = 0;
    std::memset(page_names_, 0, sizeof page_names_);
    std::memset(row_names_, 0, sizeof row_names_);
    // Names are given by first use: tables in order of service, then the cache from least to most recently used, then
    // the quarantine, then the free stack, whose pages are all alike.
    const StateHeader& h = *c.head;
    put_all(h.running, h.free_pages, h.quarantined, h.free_rows, h.in_flight, h.state, h.reserved_for,
            h.reserved_for < 0 ? 0 : capped(h.boundaries - h.reserved_since, k.reservation_steps));
    for (uint32_t i = 0; i < h.running; ++i) {
      put(c.running[i]);
      put(row(c.requests[c.running[i]].row));
    }
    for (uint32_t i = 0; i < k.rings * k.slots; ++i) request(i);
    if (k.prefix_cache != 0) cache();
    for (uint32_t i = 0; i < h.quarantined; ++i) put(page(c.quarantine[i]));
    for (uint32_t i = h.free_pages; i-- > 0;) put(page(c.free_list[i]));
    for (uint32_t i = h.free_rows; i-- > 0;) put(row(int32_t(c.row_stack[i])));
    for (uint32_t turn : h.next_ring) put(turn);
    put_long(h.next_expiry == 0 ? 0 : h.next_expiry > now() ? h.next_expiry - now() + 1 : 1);
    put_all(c.control->stop_request, c.control->drain_request, w_.now.env->ticks);
    for (uint32_t r = 0; r < k.rings; ++r) ring(r);
    if (h.in_flight != 0) plan();
    for (uint32_t i = 0; i < w_.scope().requests.size(); ++i) watch(w_.now.env->watch[i]);
  }

  uint64_t now() const { return w_.now.env->now; }

  // A free slot's record is only asked for the newest generation judged.
  void request(uint32_t index) {
    const Context& c = w_.now.c;
    const Request& q = c.requests[index];
    put_all(q.state, q.judged);
    if (q.state == uint32_t(RequestState::FREE)) return;
    uint32_t elders = 0;
    for (uint32_t i = 0; i < w_.config().rings * w_.config().slots; ++i) {
      elders += c.requests[i].state != uint32_t(RequestState::FREE) && c.requests[i].arrival < q.arrival ? 1 : 0;
    }
    put_all(elders, q.generation, q.priority, q.prompt_len, q.max_tokens, q.total, q.computed, q.emitted, q.n_pages,
            q.published, q.cached, q.admitted != 0, q.next);
    put_long(q.expires == 0 ? 0 : q.expires > now() ? q.expires - now() + 1 : 1);
    const int32_t* tokens = c.tokens_of(index);
    for (uint32_t i = 0; i < q.total; ++i) put(uint32_t(tokens[i]));
    if (q.row < 0) return;
    if (w_.scope().plant != PLANT_BLIND) put(capped(q.paused, w_.config().paused_limit));
    for (uint32_t i = 0; i < q.n_pages; ++i) put(page(c.table_of(uint32_t(q.row))[i]));
  }

  // Cached pages with the page before them: children, references and chains follow from tables and these.
  void cache() {
    const Context& c = w_.now.c;
    put(c.head->idle_cached);
    for (int32_t at = c.head->lru_head; at >= 0; at = c.pages[at].lru_next) cached_page(uint32_t(at));
    put(~0u);
    if (!symmetry_) {
      for (uint32_t id = RESERVED_PAGES; id < w_.config().pages; ++id) held_page(id);
      return;
    }
    for (uint32_t i = 0; i < c.head->running; ++i) {
      const Request& q = c.requests[c.running[i]];
      for (uint32_t k = 0; k < q.n_pages; ++k) held_page(c.table_of(uint32_t(q.row))[k]);
    }
  }
  void held_page(uint32_t id) {
    const Page& p = w_.now.c.pages[id];
    if (p.state == uint32_t(PageState::CACHED) && p.refs > 0) cached_page(id);
  }
  void cached_page(uint32_t id) {
    const Context& c = w_.now.c;
    put_all(page(id), page(c.pages[id].parent), c.pages[id].refs);
    for (uint32_t i = 0; i < w_.config().page_size; ++i) put(uint32_t(c.tokens_of_page(id)[i]));
  }

  void ring(uint32_t r) {
    const Context& c = w_.now.c;
    const Config& k = w_.config();
    const RingState& s = c.rings[r];
    const RingMemory m = c.ring(r);
    const FrontEnd& f = w_.now.env->front_ends[r];
    put_all(s.epoch, s.sq_next, s.cq_tail - s.cq_head, s.cq_published - s.cq_head, s.planned, s.retries != 0,
            m.gpu->epoch_ack, m.gpu->sq_head, m.gpu->state, m.front_end->epoch);
    // A head below the credible one changes nothing: the 0 of a front end that attaches is as good as no news.
    put_long(m.front_end->cq_head <= s.cq_head ? 0 : m.front_end->cq_head - s.cq_head);
    put_long(m.gpu->cq_tail - s.cq_head);
    if (s.retries != 0) put_long(capped(now() - s.retry_at, k.visibility_us));
    if (k.lease_us != 0) {
      put(m.front_end->lease != s.lease ? 1 : 0);
      put_long(capped(now() - s.lease_at, k.lease_us));
    }
    for (uint32_t p = 0; p < PRIORITIES; ++p) put_all(s.deficit[p], s.wait_head[p], s.wait_tail[p]);
    for (uint32_t i = 0; i < k.sq_entries; ++i) put_long(entry(m, s, f, i));
    put_all(f.epoch, f.executed, f.sq_tail, f.op, f.part, f.dead, f.crashed);
    const FrontEnd& e = w_.now.env->elders[r];
    put(e.lives);
    if (e.lives) {  // reads and writes as the front end that the ring follows, or attaches too
      put_all(e.executed, e.sq_tail, e.op);
      if (rivals(r)) put_all(e.epoch, e.crashed, e.part);
      if (e.epoch == s.epoch && !e.crashed) unread(s, m, e);
    }
    if (rivals(r)) {  // whose words may stand when indices start over
      put(f.alone);
      put_long(m.front_end->cq_head);
      put_long(e.lives && !e.crashed ? e.consumed : 0);  // one that attaches has read nothing
      put_long(f.crashed ? 0 : f.consumed);
    }
    if (has_attach(f, true)) {
      // A head that is written behind the successor's clearing stands when indices start over: here they are absolute.
      put_long(e.lives && !e.crashed ? e.consumed : f.crashed ? 0 : f.consumed);
      put_long((f.crashed ? f.part > k.sq_entries : f.epoch != s.epoch) ? m.front_end->cq_head : 0);
    }
    if (w_.scope().unordered) put_all(f.crash_op, f.crash_part);
    if (f.dead) return;
    if (f.epoch != s.epoch || f.crashed) return;  // has read nothing, or reads no more
    unread(s, m, f);
  }

  void unread(const RingState& s, const RingMemory& m, const FrontEnd& f) {
    const Config& k = w_.config();
    put_long(f.consumed - s.cq_head);
    const bool again = w_.scope().plant == PLANT_READS_AGAIN;
    const uint64_t unread = again ? m.front_end->cq_head : f.consumed;
    for (uint64_t at = unread; at < s.cq_tail && at - unread < k.cq_entries; ++at) {
      const Event& e = m.cq[at & (k.cq_entries - 1)];
      const bool terminal = e.kind == uint8_t(EventKind::FINISH) || e.kind == uint8_t(EventKind::ERROR);
      put(terminal ? 1u | uint32_t(e.slot) << 1 | e.generation << 8 : 0);
    }
  }

  // Entries behind the scheduler's index are never read again, unless a new epoch starts it over.
  uint64_t entry(const RingMemory& m, const RingState& s, const FrontEnd& f, uint32_t i) const {
    if (rivals(uint32_t(&f - w_.now.env->front_ends)) || has_attach(f, false)) return m.sq[i];
    const uint32_t n = w_.config().sq_entries;
    const uint64_t index = s.sq_next + ((i - s.sq_next) & (n - 1));
    return (m.sq[i] & ((1u << SEQ_BITS) - 1)) == sequence_number(index) ? m.sq[i] : 0;
  }
  bool rivals(uint32_t r) const {
    for (const Op& op : w_.scope().programs[r]) {
      if (op.kind == OpKind::ATTACH && op.during) return true;
    }
    return false;
  }
  bool has_attach(const FrontEnd& f, bool beside) const {
    const std::vector<Op>& ops = w_.scope().programs[&f - w_.now.env->front_ends];
    for (size_t i = f.op; i < ops.size(); ++i) {
      if (ops[i].kind == OpKind::ATTACH && (!beside || ops[i].optional)) return true;
    }
    return f.epoch != w_.now.c.rings[&f - w_.now.env->front_ends].epoch;
  }

  // What commit and the model read of the step in flight.
  void plan() {
    const Context& c = w_.now.c;
    const PlanHeader& h = *c.plan;
    put_all(h.n_rows, h.n_tokens, h.n_samples);
    for (uint32_t i = 0; i < h.n_rows && i < MAX_ROWS; ++i) {
      const PlanRow& p = c.plan_rows[i];
      const Flight& f = w_.now.env->flight[i];
      put_all(p.request, p.generation, p.q_len, p.context_len, p.sample, p.emitted, row(int32_t(p.row)), f.epoch,
              page_set(f.pages));
    }
    for (uint32_t i = 0; i < h.n_tokens; ++i) {
      const uint32_t size = w_.config().page_size;
      put_all(c.plan_token_ids[i], page(uint32_t(c.plan_kv_slots[i] / size)), c.plan_kv_slots[i] % size);
    }
  }

  void watch(const Watch& w) {
    put(w.published | w.cancelled << 1 | w.terminal << 2 | w.seen << 3 | uint32_t(w.entry) << 8);
    put(w.terminal ? 0 : w.tokens);
  }

  const World& w_;
  bool symmetry_;
  std::vector<uint32_t> words_;
  size_t n_ = 0;
  uint32_t page_names_[MAX_PAGES], row_names_[MAX_ROWS];
  uint32_t pages_named_ = 0, rows_named_ = 0;
};

}  // namespace blink::explore
