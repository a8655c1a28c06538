// The engine's lists and pages, recounted from raw memory: clauses K, L2 and A3 of docs/rules.md.
#pragma once

#include <algorithm>

#include "explore_world.hpp"

namespace blink::explore {

class Recount {
 public:
  explicit Recount(World& world) : w_(world) {}

  uint64_t situations = 0;  // bits of Situation that occurred

 protected:
  const Context& now() const { return w_.now.c; }
  const Context& was() const { return w_.was.c; }
  const Config& config() const { return w_.config(); }
  Env& env() const { return *w_.now.env; }
  void saw(Situation s) { situations |= uint64_t(1) << s; }

  [[noreturn]] static void fail(const char* clause, std::string message) { throw Violation{clause, std::move(message)}; }
  static std::string str(uint64_t value) { return std::to_string(value); }
  static std::string str(const char* what, uint64_t value) { return std::string(what) + " " + std::to_string(value); }
  static void expect(bool holds, const char* clause, const char* what, uint64_t a = 0, uint64_t b = 0) {
    if (!holds) fail(clause, std::string(what) + " (" + str(a) + ", " + str(b) + ")");
  }

  // The scheduler's own helpers are not asked: a fault in one would then hide itself.
  bool is_elder(uint32_t a, uint32_t b) const { return now().requests[a].arrival < now().requests[b].arrival; }
  bool is_served_before(uint32_t a, uint32_t b) const {
    const uint32_t pa = now().requests[a].priority, pb = now().requests[b].priority;
    return pa != pb ? pa < pb : is_elder(a, b);
  }
  uint32_t pages_at_most(const Request& q) const {
    return pages_of(std::min(q.prompt_len + q.max_tokens, config().max_len) - 1);
  }
  uint32_t pages_of(uint32_t tokens) const { return (tokens + config().page_size - 1) / config().page_size; }

  // L2, A2, A4: the running list, waiting lists and rows.
  void lists() {
    const Context& c = now();
    uint32_t running = 0, waiting = 0, rows = 0, committed = 0;
    for (uint32_t i = 0; i < c.head->running; ++i) {
      const uint32_t request = c.running[i];
      const Request& q = c.requests[request];
      expect(q.state == uint32_t(RequestState::RUNNING), "L1", "runs and is not RUNNING: request", request);
      expect(i == 0 || is_served_before(c.running[i - 1], request), "L2", "order of service at place", i);
      expect(q.row >= 0 && uint32_t(q.row) < config().max_rows && (rows >> q.row & 1) == 0, "A3", "row of", request);
      rows |= 1u << q.row;
      committed += pages_at_most(q);
    }
    expect(committed == c.head->committed_pages, "A3", "pages that running requests may need", committed);
    const bool reserve = config().admission == uint32_t(Admission::RESERVE);
    expect(!reserve || committed <= config().pages - RESERVED_PAGES, "A3", "RESERVE promises too many pages", committed);
    expect(c.head->running + c.head->free_rows == config().max_rows, "A3", "rows, free", c.head->free_rows);
    for (uint32_t i = 0; i < c.head->free_rows; ++i) {
      expect(c.row_stack[i] < config().max_rows && (rows >> c.row_stack[i] & 1) == 0, "A3", "free row", c.row_stack[i]);
      rows |= 1u << c.row_stack[i];
    }
    for (uint32_t r = 0; r < config().rings; ++r) {
      uint32_t of_ring = 0;
      for (uint32_t p = 0; p < PRIORITIES; ++p) {
        int32_t last = -1;
        for (int32_t at = c.rings[r].wait_head[p]; at >= 0; at = c.requests[at].next) {
          const Request& q = c.requests[at];
          expect(++of_ring <= config().slots, "L2", "a waiting list has no end: ring", r);
          expect(q.state == uint32_t(RequestState::WAITING) && q.priority == p && c.ring_of(uint32_t(at)) == r, "L2",
                 "waits in a wrong list: request", uint64_t(at));
          expect(last < 0 || is_elder(uint32_t(last), uint32_t(at)), "L2", "age in the waiting list: request", uint64_t(at));
          expect(q.n_pages == 0 && q.row == -1, "K4", "waits and holds pages: request", uint64_t(at));
          last = at;
        }
        expect(c.rings[r].wait_tail[p] == last, "L2", "end of a waiting list: ring, class", r, p);
      }
      expect(of_ring == c.rings[r].waiting, "L2", "waiting requests of ring", r, of_ring);
      waiting += of_ring;
    }
    running = c.head->running;
    expect(running + waiting == c.head->live, "L1", "running and waiting", running, waiting);
    expect(c.head->reserved_for < 0 || c.requests[c.head->reserved_for].state == uint32_t(RequestState::WAITING), "A5",
           "the reservation is held by one that does not wait");
  }

  // K1, K3, K5: every page in one place, as its record says.
  void pages() {
    const Context& c = now();
    uint32_t seen = (1u << RESERVED_PAGES) - 1;
    expect(c.head->free_pages <= config().pages && c.head->quarantined <= config().pages, "K1", "lengths of page lists");
    for (uint32_t i = 0; i < c.head->free_pages; ++i) take(c.free_list[i], PageState::FREE, seen);
    for (uint32_t i = 0; i < c.head->quarantined; ++i) take(c.quarantine[i], PageState::QUARANTINED, seen);
    expect(c.head->quarantined == 0 || c.head->in_flight != 0, "K5", "quarantine while no step runs: pages",
           c.head->quarantined);
    uint32_t refs[MAX_PAGES] = {};
    for (uint32_t i = 0; i < c.head->running; ++i) {
      const uint32_t request = c.running[i];
      const Request& q = c.requests[request];
      expect(q.n_pages <= config().max_pages && pages_of(q.computed) <= q.n_pages, "P4", "pages of request", request);
      for (uint32_t k = 0; k < q.n_pages; ++k) {
        const uint32_t page = c.table_of(uint32_t(q.row))[k];
        expect(page >= RESERVED_PAGES && page < config().pages, "K1", "block table of request, page", request, page);
        const Page& p = c.pages[page];
        if (p.state == uint32_t(PageState::CACHED)) {
          ++refs[page];
          continue;
        }
        if (p.state != uint32_t(PageState::OWNED) || p.owner != int32_t(request) || p.generation != q.generation) {
          fail("K1", str("request", request) + " holds " + str("page", page) + ", which is not its own");
        }
        expect(p.refs == 1, "K1", "references of an owned page", page, p.refs);
        expect((seen >> page & 1) == 0, "K1", "page in two places", page);
        seen |= 1u << page;
      }
    }
    uint32_t idle = 0;
    for (uint32_t page = RESERVED_PAGES; page < config().pages; ++page) {
      const Page& p = c.pages[page];
      if (p.state == uint32_t(PageState::CACHED)) {
        expect(p.refs == refs[page], "K1", "references of a cached page, and its holders", p.refs, refs[page]);
        expect((seen >> page & 1) == 0, "K1", "cached page on a list", page);
        seen |= 1u << page;
        idle += p.refs == 0 ? 1 : 0;
        if (p.refs > 1) saw(S_PAGE_SHARED);
      }
      expect((seen >> page & 1) != 0, "K1", "page is nowhere, state", page, p.state);
    }
    expect(idle == c.head->idle_cached, "K3", "cached pages without holders", idle, c.head->idle_cached);
  }

  void take(uint32_t page, PageState state, uint32_t& seen) const {
    expect(page >= RESERVED_PAGES && page < config().pages, "K1", "page on a list", page);
    expect((seen >> page & 1) == 0, "K1", "page twice on lists", page);
    expect(now().pages[page].state == uint32_t(state), "K1", "page on a list, its state", page, now().pages[page].state);
    seen |= 1u << page;
  }

  // K1, K6: what a running request has computed is what its pages hold.
  void tables() {
    const Context& c = now();
    const uint32_t size = config().page_size;
    for (uint32_t i = 0; i < c.head->running; ++i) {
      const uint32_t request = c.running[i];
      const Request& q = c.requests[request];
      const int32_t id = w_.find(request, q.generation);
      for (uint32_t at = 0; at < q.computed; ++at) {
        const uint64_t page = c.table_of(uint32_t(q.row))[at / size];
        expect(w_.now.kv[page * size + at % size] == w_.tag(c.tokens_of(request)[at], at, id), "C2",
               "KV of request, position", request, at);
      }
    }
  }

  // K4, K5, L5: pages of the step in flight are nobody else's before it has ended.
  void in_flight() {
    const Context& c = now();
    if (c.head->in_flight == 0) return;
    for (uint32_t i = 0; i < env().n_flight; ++i) {
      const Flight& f = env().flight[i];
      for (uint32_t page = RESERVED_PAGES; page < config().pages; ++page) {
        if ((f.pages >> page & 1) == 0) continue;
        const Page& p = c.pages[page];
        if (p.state == uint32_t(PageState::FREE)) fail("K4", str("page", page) + " of the step in flight is free");
        const bool theirs = p.state == uint32_t(PageState::OWNED) &&
                            (p.owner != int32_t(f.request) || p.generation != f.generation);
        if (theirs) fail("K4", str("page", page) + " of the step in flight has another owner");
      }
    }
    if (c.head->quarantined > 0) saw(S_QUARANTINE);
  }

  // K4, K6: prefix cache: chains, buckets, and the list of idle pages.
  void cache() {
    const Context& c = now();
    uint32_t children[MAX_PAGES] = {}, in_buckets = 0, cached = 0;
    for (uint32_t page = RESERVED_PAGES; page < config().pages; ++page) {
      const Page& p = c.pages[page];
      if (p.state != uint32_t(PageState::CACHED)) continue;
      ++cached;
      if (p.parent == 0) continue;
      const Page& parent = c.pages[p.parent];
      expect(parent.state == uint32_t(PageState::CACHED), "K6", "cached page behind one that is not, page", page);
      expect(parent.refs >= (p.refs > 0 ? 1u : 0u), "K6", "held page behind one that nobody holds", page);
      ++children[p.parent];
    }
    for (uint32_t page = RESERVED_PAGES; page < config().pages; ++page) {
      const Page& p = c.pages[page];
      if (p.state != uint32_t(PageState::CACHED)) continue;
      expect(p.children == children[page], "K6", "children of page", page, p.children);
      uint32_t depth = 0;
      for (uint32_t at = p.parent; at != 0; at = c.pages[at].parent) ++depth;
      for (uint32_t i = 0; i < config().page_size; ++i) {
        const int64_t held = w_.now.kv[uint64_t(page) * config().page_size + i];
        expect(held == w_.tag(c.tokens_of_page(page)[i], depth * config().page_size + i, -1), "K6",
               "tokens of a cached page are not its KV's: page", page);
      }
    }
    for (uint32_t b = 0; b < config().pages; ++b) {
      for (int32_t at = c.buckets[b]; at >= 0; at = c.pages[at].bucket_next) {
        expect(++in_buckets <= cached && c.pages[at].state == uint32_t(PageState::CACHED) &&
                   c.pages[at].hash % config().pages == b, "K6", "hash bucket, page", b, uint64_t(at));
      }
    }
    expect(in_buckets == cached, "K6", "pages in hash buckets, cached", in_buckets, cached);
    uint32_t idle = 0;
    int32_t before = -1;
    for (int32_t at = c.head->lru_head; at >= 0; at = c.pages[at].lru_next) {
      expect(++idle <= cached && c.pages[at].refs == 0 && c.pages[at].lru_prev == before, "K4", "LRU list at page",
             uint64_t(at));
      before = at;
    }
    expect(idle == c.head->idle_cached && c.head->lru_tail == before, "K4", "length of the LRU list", idle);
    for (uint32_t i = 0; i < c.head->running; ++i) {
      const Request& q = c.requests[c.running[i]];
      for (uint32_t k = 0; k < q.n_pages; ++k) {
        const Page& p = c.pages[c.table_of(uint32_t(q.row))[k]];
        expect((p.state == uint32_t(PageState::CACHED)) == (k < q.published), "K6", "published pages of", c.running[i]);
      }
    }
  }

  World& w_;
};

}  // namespace blink::explore
