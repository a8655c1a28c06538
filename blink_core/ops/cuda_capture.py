"""Capture of work on a stream, and graphs run in turn with the time of each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import cupy as cp

Key = TypeVar("Key", bound=Hashable)


def captured(stream: cp.cuda.Stream, work: Callable[[], object]) -> Any:
    """A CuPy graph of what ``work`` launches on CuPy's current stream, which is ``stream`` meanwhile.

    What ``work`` raises is raised, and the stream captures no more: a stream that stays in capture mode takes the next
    launch, or synchronisation, of anyone for a part of the graph, or an error.
    """
    with stream:
        stream.begin_capture()
        try:
            work()
        except BaseException:
            with contextlib.suppress(Exception):  # that the capture is invalid: the reason is on its way already
                stream.end_capture()
            raise
        return stream.end_capture()


def in_turn(stream: cp.cuda.Stream, graphs: Mapping[Key, Any]) -> Callable[[Sequence[Key]], list[float]]:
    """What runs CuPy graphs in a given order, without gaps: all are in the stream's queue before the first is waited
    for. It returns microseconds of each run."""

    def run(order: Sequence[Key]) -> list[float]:
        events = [cp.cuda.Event() for _ in range(len(order) + 1)]
        events[0].record(stream)
        for key, event in zip(order, events[1:], strict=True):
            graphs[key].launch(stream)
            event.record(stream)
        events[-1].synchronize()
        return [cp.cuda.get_elapsed_time(a, b) * 1e3 for a, b in pairwise(events)]

    return run
