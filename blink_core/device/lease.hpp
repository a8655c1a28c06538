// Front ends come and go: leases that lapse and epochs that change (design section 3). Rank 0.
#pragma once

#include "lifecycle.hpp"

namespace blink {

// A lease is renewed when its word changes. One that has not for Config.lease_us belongs to a dead front end: its
// requests end, and their pages are free. A front end that was only frozen finds them ended and goes on.
BLINK_FN void watch_lease(const Context& c, uint32_t ring, uint64_t lease) {
  if (c.config->lease_us == 0) return;
  RingState& rs = c.rings[ring];
  GpuLine* gpu = c.ring(ring).gpu;
  if (lease != rs.lease) {
    rs.lease = lease;
    rs.lease_at = c.head->clock;
    if (rs.lapsed != 0) {
      rs.lapsed = 0;
      log_event(c, LogLevel::DECISIONS, LogKind::LEASE, ring, 0, 0, 0, 0, 0);
    }
    return;
  }
  if (rs.live == 0 || c.head->clock - rs.lease_at < c.config->lease_us) return;
  const uint32_t ended = terminate_ring(c, ring, ErrorReason::LEASE_LOST);
  rs.lapsed = 1;
  log_event(c, LogLevel::DECISIONS, LogKind::LEASE, ring, 0, 0, 1, ended, 0);
  store_release(&gpu->lapses, gpu->lapses + 1);
}

// The scheduler itself has stood still for `us`: no front end is to blame for that time. Nor is it for more, or whoever
// holds the engine often enough would keep the dead alive.
BLINK_FN void excuse_leases(const Context& c, uint64_t us) {
  for (uint32_t ring = 0; ring < c.config->rings; ++ring) {
    uint64_t& at = c.rings[ring].lease_at;
    at = c.head->clock - at > us ? at + us : c.head->clock;
  }
}

// Tells a new front end that its predecessor's requests are over and their pages free. While a step runs, pages of such
// requests are in quarantine: the boundary tells it then.
BLINK_FN void acknowledge_epochs(const Context& c) {
  for (uint32_t ring = 0; ring < c.config->rings; ++ring) {
    GpuLine* gpu = c.ring(ring).gpu;
    if (gpu->epoch_ack != c.rings[ring].epoch) store_release(&gpu->epoch_ack, c.rings[ring].epoch);
  }
}

// A new front end has attached. Its predecessor's requests end without events, which nobody would read.
BLINK_FN void change_epoch(const Context& c, uint32_t ring, uint64_t epoch) {
  RingState& rs = c.rings[ring];
  uint32_t dropped = 0;
  for (uint32_t slot = 0; slot < c.config->slots; ++slot) {
    const uint32_t request = c.request_index(ring, slot);
    Request& q = c.requests[request];
    if (q.state != uint32_t(RequestState::FREE)) {
      let_go(c, request);
      ++dropped;
    }
    q.generation = q.judged = 0;
  }
  GpuLine* gpu = c.ring(ring).gpu;
  rs.epoch = epoch;
  rs.sq_next = rs.cq_tail = rs.cq_published = rs.cq_head = 0;
  rs.retries = rs.lapsed = 0;
  for (uint32_t p = 0; p < PRIORITIES; ++p) rs.deficit[p] = 0;
  rs.lease = load_acquire(&c.ring(ring).front_end->lease);
  rs.lease_at = c.head->clock;
  store_release(&gpu->sq_head, 0);
  store_release(&gpu->cq_tail, 0);
  log_event(c, LogLevel::DECISIONS, LogKind::EPOCH, ring, 0, 0, uint32_t(epoch), dropped, 0);
  if (c.head->in_flight == 0) acknowledge_epochs(c);
}

}  // namespace blink
