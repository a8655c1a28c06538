"""Makes a program that shows a difference small, without hypothesis: for searches over random programs."""

from __future__ import annotations

from collections.abc import Callable

from verification.lockstep.programs import Program


def shrink(program: Program, bad: Callable[[Program], bool]) -> Program:
    """A program that is still `bad`: no operation can be left out and no byte made 0. `program` must be bad."""
    ops, size = program.ops, max(1, len(program.ops) // 2)
    while True:
        at, before = 0, len(ops)
        while at < len(ops):
            fewer = ops[:at] + ops[at + size :]
            if fewer and bad(Program(program.shape, fewer)):
                ops = fewer
            else:
                at += size
        if size == 1 and len(ops) == before:
            break
        size = max(1, size // 2)
    program = Program(program.shape, ops)
    shape = _zeroed(program.shape, lambda x: bad(Program(x, program.ops)))
    for i in range(len(ops)):
        ops = program.ops
        simpler = _zeroed(ops[i], lambda x, i=i, ops=ops: bad(Program(shape, (*ops[:i], x, *ops[i + 1 :]))))  # type: ignore[misc]
        program = Program(shape, (*ops[:i], simpler, *ops[i + 1 :]))
    return Program(shape, program.ops)


def _zeroed(data: bytes, bad: Callable[[bytes], bool]) -> bytes:
    """As many bytes 0 as can be: all at once, or one after the other."""
    if bad(bytes(len(data))):
        return bytes(len(data))
    for i in range(len(data)):
        simpler = data[:i] + b"\0" + data[i + 1 :]
        if data[i] and bad(simpler):
            data = simpler
    return data
