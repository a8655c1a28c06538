"""Recorded runs for the tests of `verification.trace`."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import lru_cache

from verification.lockstep.programs import TABLE, Program, Runner, random_program
from verification.trace.drawn import logged, trace_of
from verification.trace.format import Entry, Trace


@lru_cache(256)
def drawn(seed: int, *, payloads: bool = True) -> Trace:
    """The recorded run of a random lock-step program. Shared: change copies only."""
    return trace_of(logged(random_program(random.Random(seed), 50)), payloads=payloads)


def with_log(trace: Trace, log: list[Entry]) -> Trace:
    """The trace with a log that differs in one place; descriptors stay with their entries."""
    old = trace.entries
    first = next((i for i, (x, y) in enumerate(zip(old, log, strict=False)) if x != y), min(len(old), len(log)))
    shift = len(log) - len(old)
    moved = {i if i < first else i + shift: made for i, made in trace.submissions.items()}
    return replace(trace, entries=log, submissions={i: replace(made, log_index=i) for i, made in moved.items()})


def at_one_clock(program: Program) -> Program:
    """The program with a clock that stands still, and eight more boundaries behind each of its own."""
    ops: list[bytes] = []
    for op in program.ops:
        kind, first, rest = TABLE[op[0]], op[:1], op[1:]
        if kind is Runner.wait:
            kind, first = Runner.boundary, bytes([TABLE.index(Runner.boundary)])
        if kind in (Runner.step, Runner.boundary, Runner.poll):
            rest = bytes([int(kind is Runner.step)]) + rest[1:]  # the choice by which the clock does not move
        ops += [first + rest] * (9 if kind is Runner.boundary else 1)
    return Program(program.shape, tuple(ops))
