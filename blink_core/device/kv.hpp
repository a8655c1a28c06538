// Paged KV cache: page allocation, release and quarantine (design section 5).
// Page 0 is null and page 1 takes the writes of padding rows; neither is ever on the free list.
#pragma once

#include "prefix.hpp"

namespace blink {

inline constexpr uint32_t RESERVED_PAGES = 2;

BLINK_FN uint32_t pages_for(const Context& c, uint32_t tokens) {
  return (tokens + c.config->page_size - 1) / c.config->page_size;
}

// Pages that can be had without taking any from a running request.
BLINK_FN uint32_t available_pages(const Context& c) { return c.head->free_pages + c.head->idle_cached; }

// Takes one page for `request` and appends it to its block table. False when none is free and none can be evicted.
BLINK_FN bool alloc_page(const Context& c, uint32_t request) {
  if (c.head->free_pages == 0 && !evict_page(c)) return false;
  Request& q = c.requests[request];
  const uint32_t page = c.free_list[--c.head->free_pages];
  Page& p = c.pages[page];
  p.owner = int32_t(request);
  p.generation = q.generation;
  p.refs = 1;
  p.state = uint32_t(PageState::OWNED);
  c.table_of(uint32_t(q.row))[q.n_pages] = page;
  log_event(c, LogLevel::ALL, LogKind::PAGE_ALLOC, c.ring_of(request), c.slot_of(request), q.generation, page,
            q.n_pages, 0);
  ++q.n_pages;
  return true;
}

// The one release entry point, idempotent: gives all pages of `request` back. Those it owns alone are quarantined while a
// step runs, because that step may still write them. Returns the number released.
BLINK_FN uint32_t release_pages(const Context& c, uint32_t request) {
  Request& q = c.requests[request];
  const uint32_t count = q.n_pages;
  const bool hold = c.head->in_flight != 0;
  for (uint32_t i = count; i-- > 0;) {  // last page first: the prefix cache evicts in this order
    const uint32_t page = c.table_of(uint32_t(q.row))[i];
    Page& p = c.pages[page];
    if (p.state == uint32_t(PageState::CACHED)) {
      unshare_page(c, request, page);
      continue;
    }
    p.owner = -1;
    p.refs = 0;
    if (hold) {
      p.state = uint32_t(PageState::QUARANTINED);
      c.quarantine[c.head->quarantined++] = page;
    } else {
      p.state = uint32_t(PageState::FREE);
      c.free_list[c.head->free_pages++] = page;
    }
    log_event(c, LogLevel::ALL, LogKind::PAGE_FREE, c.ring_of(request), c.slot_of(request), q.generation, page,
              hold ? 1 : 0, 0);
  }
  q.n_pages = q.computed = q.published = 0;
  q.chain = 0;
  return count;
}

// After the step in flight has ended: quarantined pages become free.
BLINK_FN void drain_quarantine(const Context& c) {
  while (c.head->quarantined > 0) {
    const uint32_t page = c.quarantine[--c.head->quarantined];
    c.pages[page].state = uint32_t(PageState::FREE);
    c.free_list[c.head->free_pages++] = page;
    log_event(c, LogLevel::ALL, LogKind::PAGE_UNQUARANTINE, 0, 0, 0, page, 0, 0);
  }
}

}  // namespace blink
