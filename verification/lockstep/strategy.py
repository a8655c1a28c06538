"""Hypothesis strategy of whole lock-step programs."""

from __future__ import annotations

from hypothesis import strategies as st

from verification.lockstep.programs import CONFIG_BYTES, OP_BYTES, Program


def programs(max_ops: int = 40) -> st.SearchStrategy[Program]:
    """Programs of up to `max_ops` operations, half of them long; they shrink towards few, plain operations."""
    shape = st.binary(min_size=CONFIG_BYTES, max_size=CONFIG_BYTES)
    operation = st.binary(min_size=OP_BYTES, max_size=OP_BYTES)
    short = st.lists(operation, min_size=1, max_size=max_ops)
    long = st.lists(operation, min_size=max_ops // 2, max_size=max_ops)
    return st.builds(Program, shape, (short | long).map(tuple))
