// The resident scheduler on a GPU: one block that never leaves, but to renew itself (design sections 4 and 6).
//
// It runs the same boundary and polls as the host's loop and launches the step graphs itself: fire-and-forget, spinning
// on the word that a step graph's last kernel writes, or as a tail launch, for which the block makes room. One execution
// of a graph may launch only so many others, so after MOST_LAUNCHES it tail-launches its own graph and ends.
//
// The rings and the event log lie in host memory, everything else in device memory. A read of host memory takes about a
// microsecond, so the control line is read while a step runs and the status line is written from a copy.
//
// A row that outgrows LongRoPE's original maximum is computed anew ahead of the step in which it does so (models/phi3.py
// says why): the same step graphs run over parts of its earlier positions first, a pass each. They belong to the step:
// nothing is planned or committed between them.
#include "serve_look.cuh"

// Thread 0. Finds the bucket of a step's sizes. False if there is none.
__device__ inline bool aim(const Engine& e, uint32_t tokens, uint32_t rows, uint32_t samples) {
  Target& t = e.near.target;
  if (t.tokens == tokens && t.rows == rows && t.samples == samples) return t.chosen < e.p.n_buckets;
  t.tokens = tokens;
  t.rows = rows;
  t.samples = samples;
  for (t.chosen = 0; t.chosen < e.p.n_buckets; ++t.chosen) {
    const Bucket b = e.p.buckets[t.chosen];
    if (tokens > b.tokens || rows > b.rows || samples > b.samples || (b.decode != 0 && tokens != rows)) continue;
    t.bucket = b;
    t.turn = e.p.serve->turn[t.chosen];
    for (uint32_t i = 0; i < b.count && i < NEAR_EXECUTABLES; ++i) t.executables[i] = e.p.executables[b.first + i];
    return true;
  }
  return false;
}

__device__ inline void note_failure(const Engine& e, Failure why, uint64_t detail) {
  if (e.p.serve->failure != 0) return;
  e.p.serve->failure = uint64_t(why);
  e.p.serve->failure_detail = detail;
}

#ifdef BLINK_SWITCH
// This kernel runs in a graph WHILE { this; SWITCH { a step graph each bucket } }, which the host launches: a turn an
// execution, as with tail launches, and nothing is launched from the device.

// Thread 0. The SWITCH behind this kernel takes the bucket's graph.
__device__ inline bool launch(const Engine& e) {
  cudaGraphSetConditional(e.p.branch, e.near.target.chosen);
  ++e.near.launches;
  return true;
}

// Thread 0. The WHILE runs this kernel again.
__device__ inline bool renew(const Engine& e) {
  ++e.p.serve->executions;
  return true;
}

// Thread 0. This execution is the last, and no step follows it.
__device__ inline void leave_loop(const Engine& e) {
  cudaGraphSetConditional(e.p.branch, e.p.n_buckets);
  cudaGraphSetConditional(e.p.loop, 0);
}
#else
// Thread 0, after `aim`. An executable whose last run has told its end may not be free yet: the next one is tried, for a
// while.
__device__ inline bool launch(const Engine& e) {
  Target& t = e.near.target;
  const Bucket& b = t.bucket;
  __threadfence();
  e.g.stamp(Phase::FENCED);
  uint64_t since = 0, now = 0;
  cudaError_t error = cudaSuccess;
  do {
    const cudaGraphExec_t executable =
        t.turn < NEAR_EXECUTABLES ? t.executables[t.turn] : e.p.executables[b.first + t.turn];
    t.turn = t.turn + 1 == b.count ? 0 : t.turn + 1;
    error = cudaGraphLaunch(executable, b.tail != 0 ? cudaStreamGraphTailLaunch : cudaStreamGraphFireAndForget);
    if (error == cudaSuccess) {
      e.p.serve->turn[t.chosen] = t.turn;
      ++e.near.launches;
      return true;
    }
    ++e.near.refused;
    now = nanoseconds();
    if (since == 0) since = now;
  } while (now - since < LAUNCH_NS);
  note_failure(e, Failure::LAUNCH, uint64_t(error));
  return false;
}

// Thread 0: runs this graph again once this execution and all that it launched have ended.
__device__ inline bool renew(const Engine& e) {
  ++e.p.serve->executions;
  const cudaError_t error = cudaGraphLaunch(cudaGetCurrentGraphExec(), cudaStreamGraphTailLaunch);
  if (error == cudaSuccess) return true;
  note_failure(e, Failure::RENEWAL, uint64_t(error));
  return false;
}

__device__ inline void leave_loop(const Engine&) {}
#endif

// The engine has failed: every live request ends, nothing is planned any more and no page used again; entries are still
// judged, and refused, until the host asks for a stop.
__device__ inline void fail(const Engine& e) {
  Serve& s = *e.p.serve;
  if (threadIdx.x == 0) {
    for (uint32_t ring = 0; ring < e.c.config->rings; ++ring) terminate_ring(e.c, ring, ErrorReason::MODEL_ERROR);
    publish_events(e.c);
    set_state(e.c, EngineState::FAILED);
    Report& r = *e.p.report;
    r.failure_step = e.c.head->step;
    r.failure_detail = s.failure_detail;
    store_release(&r.failure, s.failure);
  }
  __syncthreads();
  const uint64_t since = nanoseconds();
  while (true) {
    look(e, true);
    __syncthreads();
    const uint64_t limit = e.p.run_limit_ns;
    if (e.near.control.stop_request != 0 || (limit != 0 && nanoseconds() - since > limit)) break;
  }
  if (threadIdx.x == 0) set_state(e.c, EngineState::STOPPED);
  __syncthreads();
}

__device__ inline void finish(const Engine& e) {
  if (threadIdx.x == 0) publish_events(e.c);
  give_back(e);
  show(e);
  for (uint32_t i = 0; i < e.p.n_mirrors; ++i) copy_mirror(e.p.mirrors[i]);
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) {
    leave_loop(e);
    const Serve& s = *e.p.serve;
    Report& r = *e.p.report;
    r.executions = s.executions;
    r.launches = s.launches;
    r.refused = s.refused;
    r.steady = s.steady;
    store_release(&r.ended, 1);
  }
}

// What the block does next.
enum class Next : uint32_t { ON, RENEW, LEAVE, FAIL, STOP };

// Fills in the next pass ahead of the plan at hand. False if the plan itself is next; its passes are over then.
__device__ inline bool next_redo(const Engine& e) {
  const uint32_t limit = e.p.original_max;
  if (limit == 0) return false;
  __shared__ uint32_t found;
  Serve& s = *e.p.serve;
  if (threadIdx.x == 0) found = 0xffffffffu;
  __syncthreads();
  const uint32_t n_rows = e.c.plan->n_rows;
  for (uint32_t r = s.redo_row + threadIdx.x; r < n_rows; r += THREADS) {
    const PlanRow& row = e.c.plan_rows[r];
    const uint32_t start = row.context_len - row.q_len;
    if (start > 0 && start <= limit && row.context_len > limit) {
      atomicMin(&found, r);
      break;
    }
  }
  __syncthreads();
  const uint32_t row = found;
  if (threadIdx.x == 0) {
    Redo& redo = *e.p.redo;
    uint32_t next = 0, at = 0;
    redo.count = 0;
    if (row < n_rows) {
      const uint32_t start = e.c.plan_rows[row].context_len - e.c.plan_rows[row].q_len;
      const uint32_t first = row == s.redo_row ? s.redo_at : 0;
      const uint32_t left = start - first, count = left < e.c.config->token_budget ? left : e.c.config->token_budget;
      redo.row = int(row);
      redo.first = int(first);
      redo.count = int(count);
      ++redo.number;
      next = count == left ? row + 1 : row;
      at = count == left ? 0 : first + count;
    }
    s.redo_row = next;
    s.redo_at = at;
    s.pending = row < n_rows ? 1 : 0;
  }
  __syncthreads();
  return row < n_rows;
}

// Sends the times of the boundary whose step now runs.
__device__ inline void tell_phases(const Engine& e) {
#if defined(BLINK_PHASES)
  __syncthreads();
  constexpr uint32_t count = uint32_t(Phase::COUNT);
  if (e.p.phases != nullptr && threadIdx.x < count) {
    const uint64_t at = e.c.head->step & (e.p.n_samples - 1);
    write_host(e.p.phases + at * count + threadIdx.x, e.g.scratch.phases[threadIdx.x]);
  }
#endif
}

// Launches the plan at hand, or a pass ahead of it, and waits for its end. `launches`: of this execution. `seen`: when
// the step before was seen to end; `planned`: when the boundary was over.
__device__ inline Next run(const Engine& e, bool redo, uint32_t& launches, uint64_t& seen, uint64_t planned) {
  Serve& s = *e.p.serve;
  __shared__ uint32_t next;
  if (e.p.watched != 0) finish_boundary(e.c, e.g);  // a page whose record is not written yet would look free
  if (threadIdx.x == 0) {
    // What the plan says, but from shared memory after a steady boundary.
    const bool steady = e.g.scratch.next.ended != 0;
    const uint32_t rows = redo ? 1 : steady ? e.g.scratch.next.rows : e.c.plan->n_rows;
    const uint32_t tokens = redo ? uint32_t(e.p.redo->count) : steady ? rows : e.c.plan->n_tokens;
    const uint32_t samples = redo ? 0 : steady ? rows : e.c.plan->n_samples;
    const bool there = aim(e, tokens, rows, samples);
    e.g.stamp(Phase::CHOSEN);
    next = uint32_t(Next::FAIL);
    if (!there) {
      note_failure(e, Failure::NO_BUCKET, tokens);
    } else if (launch(e)) {
      const bool tail = e.near.target.bucket.tail != 0;
      next = uint32_t(tail ? Next::LEAVE : Next::ON);
      if (tail) {
        s.tail_step = e.c.head->step;
        s.tail_redo = redo ? e.p.redo->number : 0;
        s.deadline = nanoseconds() + e.p.step_limit_ns;
        if (!renew(e)) next = uint32_t(Next::FAIL);
      }
    }
    e.g.stamp(Phase::LAUNCHED);
    const uint64_t launched = nanoseconds();
    e.near.deadline = launched + e.p.step_limit_ns;
    if (e.p.n_samples != 0 && !redo) {
      Sample& sample = e.p.samples[e.c.head->step & (e.p.n_samples - 1)];
      write_host(&sample.seen, seen);
      write_host(&sample.planned, planned);
      write_host(&sample.launched, launched);
      write_host(&sample.step, e.c.head->step);
    }
  }
  __syncthreads();
  finish_boundary(e.c, e.g);
  e.g.stamp(Phase::FINISHED);
  if (Next(next) != Next::ON) return Next(next);
  ++launches;
  look(e, true);  // one a step at least: no pace of the model starves the rings
  e.g.stamp(Phase::LOOKED);
  prepare_boundary(e.c, e.g);
  e.g.stamp(Phase::READY);
  tell_phases(e);
  const uint64_t step = e.c.head->step;
  const uint64_t* done = redo ? reinterpret_cast<const uint64_t*>(&e.p.redo->done) : &s.done;
  const uint64_t number = redo ? e.p.redo->number : step;
  bool overdue = false;
  while (!overdue) {
    const Sight sight = watch(e, done, number);
    if (sight.ended) break;
    if (!sight.news && !sight.due) continue;
    look(e, sight.due, true);
    if (sight.due) overdue = e.g.any(threadIdx.x == 0 && nanoseconds() > e.near.deadline);
  }
  seen = nanoseconds();
  e.g.stamp(Phase::SEEN);
  if (overdue) {
    if (threadIdx.x == 0) note_failure(e, Failure::OVERDUE, step);
    return Next::FAIL;
  }
  return launches == MOST_LAUNCHES ? Next::RENEW : Next::ON;
}

// One boundary, and the step it plans; or what is left of a step whose passes another execution began.
__device__ inline Next turn(const Engine& e, uint32_t& launches, uint64_t& seen) {
  const bool pending = e.p.original_max != 0 && e.p.serve->pending != 0;
  const bool go = pending || begin_boundary(e.c, e.g, microseconds());
  const uint64_t planned = nanoseconds();
  e.g.stamp(Phase::PLANNED);
  if (EngineState(e.c.head->state) == EngineState::STOPPED) return Next::STOP;
  if (!pending && e.near.control.pause_request != e.near.held) {
    finish_boundary(e.c, e.g);
    hold_if_asked(e);
  }
  if (!go) {
    seen = 0;
    if (look(e, true) == 0) __nanosleep(IDLE_NAP_NS);
    const uint64_t limit = e.p.run_limit_ns;
    if (limit != 0 && e.g.any(threadIdx.x == 0 && nanoseconds() - e.p.serve->started > limit) && threadIdx.x == 0) {
      e.near.control.stop_request = 1;
    }
    __syncthreads();
    return Next::ON;
  }
  Next next = Next::ON;
  for (bool redo = true; redo && next == Next::ON;) {
    redo = next_redo(e);
    next = run(e, redo, launches, seen, planned);
  }
  return next;
}

extern "C" __global__ void __launch_bounds__(THREADS) blink_serve(const __grid_constant__ ServeParams p) {
  __shared__ Scratch scratch;
  __shared__ unsigned long long cell;
  __shared__ uint64_t peeked[MAX_PEEKED];
  __shared__ Near near;
  __shared__ alignas(16) uint8_t group_room[sizeof(BlockGroup)], engine_room[sizeof(Engine)];
  extern __shared__ uint4 rows_room[];  // for the rows of the next plan
  if (threadIdx.x == 0) {
    near.params = p;
    near.context = near.far = make_context(p.shared, p.state, p.log, p.plan);
    auto* group = new (group_room, InShared{}) BlockGroup(scratch, cell);
    new (engine_room, InShared{})
        Engine{near.params, near.context, near.far, *group, near, peeked, near.far.control, near.far.status};
  }
  __syncthreads();
  const Engine& e = *reinterpret_cast<const Engine*>(engine_room);
  BlockGroup& g = e.g;
  const uint32_t most = e.far.config->max_rows;
  g.begin(reinterpret_cast<NextRow*>(rows_room), most < STEADY_ROWS ? most : STEADY_ROWS);
  Serve& s = *p.serve;
  if (threadIdx.x == 0 && s.started == 0) s.started = nanoseconds();
  come_near(e);
  __syncthreads();
  uint32_t launches = 0;
  uint64_t seen = 0;
  Next next = Next::ON;
  if (s.tail_step != 0) {  // it ran between the last execution and this one
    const uint64_t* done = s.tail_redo != 0 ? reinterpret_cast<const uint64_t*>(&p.redo->done) : &s.done;
    const bool lost = g.any(threadIdx.x == 0 && acquire_device(done) < (s.tail_redo != 0 ? s.tail_redo : s.tail_step));
    seen = nanoseconds();
    const bool overdue = g.any(threadIdx.x == 0 && seen > s.deadline);  // nobody was here to end it in time
    if (lost || overdue) next = Next::FAIL;
    if (threadIdx.x == 0) {
      if (next == Next::FAIL) note_failure(e, lost ? Failure::LOST_STEP : Failure::OVERDUE, s.tail_step);
      s.tail_step = 0;
    }
    __syncthreads();
    if (next != Next::FAIL) look(e, true);
    __syncthreads();
  }
  while (next == Next::ON) next = turn(e, launches, seen);
  if (next == Next::LEAVE || next == Next::RENEW) give_back(e);
  if (next == Next::LEAVE) return;
  if (next == Next::RENEW) {
    if (!g.any(threadIdx.x == 0 && !renew(e))) return;
    next = Next::FAIL;
  }
  if (next == Next::FAIL) fail(e);
  finish(e);
}

// Before the first execution: adopts the configuration of shared memory and makes the first state.
extern "C" __global__ void blink_serve_init(uint8_t* shared, uint8_t* state, uint8_t* log, uint8_t* plan, Serve* serve) {
  if (threadIdx.x != 0) return;
  adopt_config(shared, state);
  Context c = make_context(shared, state, log, plan);
  StatusLine* host = c.status;
  c.status = &serve->status;
  init_state(c);
  store_release(&host->state, serve->status.state);
}
