// GPU entry points of the scheduler: one block of threads runs the same source as the host thread.
// Compiled by NVRTC for sm_80, sm_90a and sm_100 in CI, so that the shared headers stay GPU source. The runtime that
// launches them belongs to the `gpu` rig.
#include "scheduler.hpp"

using namespace blink;

extern "C" __global__ void blink_init(uint8_t* shared, uint8_t* state, uint8_t* log, uint8_t* plan) {
  if (threadIdx.x != 0) return;
  adopt_config(shared, state);
  init_state(make_context(shared, state, log, plan));
}

// `launch` receives 1 if a step is to be launched.
extern "C" __global__ void blink_boundary(uint8_t* shared, uint8_t* state, uint8_t* log, uint8_t* plan,
                                          uint64_t now, uint32_t* launch) {
  __shared__ Scratch scratch;
  __shared__ unsigned long long cell;
  __shared__ NextRow rows[STEADY_ROWS];
  BlockGroup group(scratch, cell);
  group.begin(rows, STEADY_ROWS);
  const Context c = make_context(shared, state, log, plan);
  const bool go = step_boundary(c, group, now);
  if (threadIdx.x == 0) *launch = go ? 1 : 0;
}

extern "C" __global__ void blink_poll(uint8_t* shared, uint8_t* state, uint8_t* log, uint8_t* plan, uint64_t now,
                                      uint32_t* taken) {
  __shared__ Scratch scratch;
  __shared__ unsigned long long cell;
  __shared__ NextRow rows[STEADY_ROWS];
  BlockGroup group(scratch, cell);
  group.begin(rows, STEADY_ROWS);
  const Context c = make_context(shared, state, log, plan);
  const uint32_t n = poll_rings(c, group, now);
  if (threadIdx.x == 0) *taken = n;
}
