// Prefix cache: full pages shared by requests whose tokens begin alike (design section 5). All of it runs on rank 0.
//
// A cached page is found by the chained hash of every token up to its end, and taken only if its own tokens and the page
// before it are the right ones: by induction the whole prefix is equal, whatever the hash. Whoever holds a page holds
// every page before it, so cached pages without holders have descendants without holders only. Holders let go of their
// last page first, hence the least recently used page is always a leaf, and eviction never orphans a page.
#pragma once

#include "checksum.hpp"
#include "context.hpp"

namespace blink {

BLINK_FN void lru_append(const Context& c, uint32_t page) {
  Page& p = c.pages[page];
  p.lru_prev = c.head->lru_tail;
  p.lru_next = -1;
  if (p.lru_prev >= 0) {
    c.pages[p.lru_prev].lru_next = int32_t(page);
  } else {
    c.head->lru_head = int32_t(page);
  }
  c.head->lru_tail = int32_t(page);
  ++c.head->idle_cached;
}

BLINK_FN void lru_remove(const Context& c, uint32_t page) {
  Page& p = c.pages[page];
  if (p.lru_prev >= 0) {
    c.pages[p.lru_prev].lru_next = p.lru_next;
  } else {
    c.head->lru_head = p.lru_next;
  }
  if (p.lru_next >= 0) {
    c.pages[p.lru_next].lru_prev = p.lru_prev;
  } else {
    c.head->lru_tail = p.lru_prev;
  }
  p.lru_prev = p.lru_next = -1;
  --c.head->idle_cached;
}

BLINK_FN uint64_t extend_chain(const Context& c, uint64_t chain, const int32_t* tokens) {
  for (uint32_t i = 0; i < c.config->page_size; ++i) chain = mix_word(uint32_t(tokens[i]), chain);
  return chain;
}

// The cached page with these tokens behind `parent` (0: none before it), or -1.
BLINK_FN int32_t find_cached(const Context& c, uint32_t parent, uint64_t chain, const int32_t* tokens) {
  for (int32_t at = c.buckets[chain % c.config->pages]; at >= 0; at = c.pages[at].bucket_next) {
    const Page& p = c.pages[at];
    if (p.hash != chain || p.parent != parent) continue;
    const int32_t* theirs = c.tokens_of_page(uint32_t(at));
    uint32_t equal = 0;
    while (equal < c.config->page_size && theirs[equal] == tokens[equal]) ++equal;
    if (equal == c.config->page_size) return at;
  }
  return -1;
}

BLINK_FN bool uses_prefix_cache(const Context& c, uint32_t request) {
  return c.config->prefix_cache != 0 && (c.sampling[request].flags & uint32_t(SlotFlag::NO_PREFIX_CACHE)) == 0;
}

// What the cache holds of a request's tokens. idle: how many of the pages nobody holds.
struct PrefixHit {
  uint32_t pages;
  uint32_t idle;
};

// One token is always left to compute, or there would be no logits to choose the next one from.
BLINK_FN uint32_t most_prefix_pages(const Context& c, uint32_t request) {
  return uses_prefix_cache(c, request) ? (c.requests[request].total - 1) / c.config->page_size : 0;
}

BLINK_FN PrefixHit find_prefix(const Context& c, uint32_t request) {
  PrefixHit hit{0, 0};
  const uint32_t most = most_prefix_pages(c, request);
  const int32_t* tokens = c.tokens_of(request);
  uint64_t chain = 0;
  uint32_t parent = 0;
  while (hit.pages < most) {
    const int32_t* next = tokens + hit.pages * c.config->page_size;
    chain = extend_chain(c, chain, next);
    const int32_t page = find_cached(c, parent, chain, next);
    if (page < 0) break;
    hit.idle += c.pages[page].refs == 0 ? 1 : 0;
    ++hit.pages;
    parent = uint32_t(page);
  }
  return hit;
}

// Puts a cached page into a request's block table at `index`.
BLINK_FN void share_page(const Context& c, uint32_t request, uint32_t index, uint32_t page) {
  const Request& q = c.requests[request];
  Page& p = c.pages[page];
  if (p.refs++ == 0) lru_remove(c, page);
  c.table_of(uint32_t(q.row))[index] = page;
  log_event(c, LogLevel::ALL, LogKind::PAGE_SHARE, c.ring_of(request), c.slot_of(request), q.generation, page, index,
            p.refs);
}

// Gives an admitted request, which owns nothing yet, the pages that `find_prefix` counted.
BLINK_FN void attach_prefix(const Context& c, uint32_t request) {
  Request& q = c.requests[request];
  const uint32_t most = most_prefix_pages(c, request), size = c.config->page_size;
  const int32_t* tokens = c.tokens_of(request);
  uint32_t parent = 0;
  while (q.n_pages < most) {
    const int32_t* next = tokens + q.n_pages * size;
    const uint64_t chain = extend_chain(c, q.chain, next);
    const int32_t page = find_cached(c, parent, chain, next);
    if (page < 0) break;
    share_page(c, request, q.n_pages, uint32_t(page));
    q.chain = chain;
    ++q.n_pages;
    parent = uint32_t(page);
  }
  q.published = q.n_pages;
  q.computed = q.n_pages * size;
  c.head->lookups += most * uint64_t(size);
  c.head->hits += q.computed;
  if (q.n_pages > 0) {
    log_event(c, LogLevel::DECISIONS, LogKind::PREFIX_HIT, c.ring_of(request), c.slot_of(request), q.generation,
              q.n_pages, q.computed, uint32_t(q.row));
  }
}

// Lets go of a cached page. Its content is complete and stays, also for a step in flight.
BLINK_FN void unshare_page(const Context& c, uint32_t request, uint32_t page) {
  Page& p = c.pages[page];
  if (--p.refs == 0) lru_append(c, page);
  log_event(c, LogLevel::ALL, LogKind::PAGE_UNSHARE, c.ring_of(request), c.slot_of(request),
            c.requests[request].generation, page, p.refs, 0);
}

// Enters page `index` of a request, which is full and which no step writes any more. `chain` of the request is its hash.
// A page that another request entered before, its twin, is taken from the cache, and the request's own copy is free again.
BLINK_FN void enter_page(const Context& c, uint32_t request, uint32_t index, uint32_t page, uint32_t parent,
                         int32_t twin) {
  const Request& q = c.requests[request];
  const uint32_t size = c.config->page_size;
  Page& p = c.pages[page];
  p.owner = -1;
  if (twin >= 0) {
    share_page(c, request, index, uint32_t(twin));
    p.refs = 0;
    p.state = uint32_t(PageState::FREE);
    c.free_list[c.head->free_pages++] = page;
    log_event(c, LogLevel::ALL, LogKind::PAGE_FREE, c.ring_of(request), c.slot_of(request), q.generation, page, 0, 0);
    return;
  }
  p.state = uint32_t(PageState::CACHED);
  p.hash = q.chain;
  p.parent = parent;
  p.children = 0;
  if (parent != 0) ++c.pages[parent].children;
  int32_t& bucket = c.buckets[q.chain % c.config->pages];
  p.bucket_next = bucket;
  bucket = int32_t(page);
  const int32_t* tokens = c.tokens_of(request) + index * size;
  int32_t* copy = c.tokens_of_page(page);
  for (uint32_t i = 0; i < size; ++i) copy[i] = tokens[i];
  log_event(c, LogLevel::ALL, LogKind::PAGE_PUBLISH, c.ring_of(request), c.slot_of(request), q.generation, page, index,
            parent);
}

// Between steps: enters the request's full pages that no step writes any more.
BLINK_FN void publish_pages(const Context& c, uint32_t request) {
  Request& q = c.requests[request];
  const uint32_t size = c.config->page_size;
  if (!uses_prefix_cache(c, request)) return;
  const uint32_t* table = c.table_of(uint32_t(q.row));
  for (; (q.published + 1) * size <= q.computed; ++q.published) {
    const uint32_t index = q.published, page = table[index], parent = index == 0 ? 0 : table[index - 1];
    const int32_t* tokens = c.tokens_of(request) + index * size;
    q.chain = extend_chain(c, q.chain, tokens);
    enter_page(c, request, index, page, parent, find_cached(c, parent, q.chain, tokens));
  }
}

// Makes the least recently used cached page that nobody holds free. False if there is none.
BLINK_FN bool evict_page(const Context& c) {
  if (c.head->lru_head < 0) return false;
  const uint32_t page = uint32_t(c.head->lru_head);
  lru_remove(c, page);
  Page& p = c.pages[page];
  int32_t* link = &c.buckets[p.hash % c.config->pages];
  while (*link != int32_t(page)) link = &c.pages[*link].bucket_next;
  *link = p.bucket_next;
  p.bucket_next = -1;
  if (p.parent != 0) --c.pages[p.parent].children;
  p.parent = 0;
  p.state = uint32_t(PageState::FREE);
  c.free_list[c.head->free_pages++] = page;
  ++c.head->evictions;
  log_event(c, LogLevel::ALL, LogKind::PAGE_EVICT, 0, 0, 0, page, 0, 0);
  return true;
}

}  // namespace blink
