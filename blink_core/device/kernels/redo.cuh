// A pass ahead of a step's plan: LongRoPE's row that outgrows its original maximum is computed anew from position 0, a
// part at a time. The scheduler writes it (serve_kernel.cu), the step graph it launches reads it (runtime/redo.py).
#pragma once

struct Redo {
  int row, first, count, reserved;   // of the plan's rows; positions [first, first + count); count 0: the plan itself
  unsigned long long number, done;   // of the pass; the last kernel of its graph writes `done`
};
static_assert(sizeof(Redo) == 32);
