// Grammar masks: mailboxes in the ring, from which a request's next mask is copied to its block-table row (design
// section 3). A row that needs a mask and has none is not planned; others are. Nor does a request that gave way come back
// before its mask is there: it would compute again what it had, and soon give way again, as often as the mask is late.
#pragma once

#include "checksum.hpp"
#include "group.hpp"
#include "lifecycle.hpp"

namespace blink {

BLINK_FN bool is_masked(const Context& c, uint32_t request) {
  return (c.sampling[request].flags & uint32_t(SlotFlag::MASKED)) != 0;
}

// True if the token at output index `emitted` may be chosen now.
BLINK_FN bool has_mask(const Context& c, uint32_t request) {
  const Request& q = c.requests[request];
  return !is_masked(c, request) || q.mask_index == q.emitted + 1;
}

// True for a waiting request that ran before and whose next mask is not known to be there.
BLINK_FN bool is_asleep(const Context& c, uint32_t request) {
  return c.requests[request].admitted != 0 && !has_mask(c, request);
}

// The oldest waiting request of a ring and class that is awake, or -1. Those who never ran are the youngest of a list.
BLINK_FN int32_t first_awake(const Context& c, uint32_t ring, uint32_t priority) {
  int32_t at = c.rings[ring].wait_head[priority];
  while (at >= 0 && is_asleep(c, uint32_t(at))) at = c.requests[at].next;
  return at;
}

// Takes the mask of one request if it is there; of a waiting one, which has no row for the bits, only that it is. While
// a step runs that samples from the row, its mask is the one the mailbox is not asked for: output index + 1 has been
// taken, and the next is known after the step.
template <class Group>
BLINK_FN uint32_t poll_mask(const Context& c, uint32_t request, Group& g) {
  const Request& q = c.requests[request];
  const RingMemory m = c.ring(c.ring_of(request));
  // Slot and generation: another slot's last request may have used the mailbox with this one's generation.
  const uint64_t wanted = uint64_t(q.generation) << SQ_GENERATION_SHIFT |
                          uint64_t(c.slot_of(request)) << SQ_SLOT_SHIFT | (q.emitted + 1);
  const MaskBox& box = m.mask_boxes[q.mask_box];
  const bool ready = g.broadcast(g.rank() == 0 ? load_acquire(&box.ready) : 0) == wanted;
  if (!ready) return 0;
  const uint32_t words = c.config->mask_words;
  const uint32_t* src = m.mask_bits + uint64_t(q.mask_box) * words;
  uint32_t* dst = q.row < 0 ? nullptr : c.mask_of(uint32_t(q.row));
  uint64_t sum = 0;
  for (uint32_t i = g.rank(); i < words; i += g.size()) {
    const uint32_t word = *static_cast<const volatile uint32_t*>(src + i);
    if (dst != nullptr) dst[i] = word;
    sum += mix_word(word, i);
  }
  sum = g.sum(sum);
  const bool whole = g.broadcast(sum == load_acquire(&box.checksum) ? 1 : 0) != 0;
  g.sync();
  if (g.rank() == 0) {
    if (whole) {
      c.requests[request].mask_index = q.emitted + 1;
      log_event(c, LogLevel::ALL, LogKind::MASK, c.ring_of(request), c.slot_of(request), q.generation, q.emitted,
                q.mask_box, 0);
    } else {
      ++c.rings[c.ring_of(request)].bad_masks;
    }
  }
  g.sync();
  return whole ? 1 : 0;
}

template <class Group>
BLINK_FN uint32_t poll_masks(const Context& c, Group& g) {
  uint32_t taken = 0;
  g.sync();
  for (uint32_t i = 0; i < c.head->running; ++i) {
    const uint32_t request = c.running[i];
    if (has_mask(c, request)) continue;
    taken += poll_mask(c, request, g);
  }
  for (uint32_t ring = 0; ring < c.config->rings; ++ring) {
    if (c.rings[ring].waiting == 0) continue;
    for (uint32_t p = 0; p < PRIORITIES; ++p) {
      int32_t at = c.rings[ring].wait_head[p];
      for (; at >= 0 && c.requests[at].admitted != 0; at = c.requests[at].next) {
        if (is_asleep(c, uint32_t(at))) taken += poll_mask(c, uint32_t(at), g);
      }
    }
  }
  return taken;
}

}  // namespace blink
