"""Follows an engine of the suite beside its tests, so that a failure names the first clause that its log violates."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hil_rigs.engine_memory import EngineMemory
from hil_rigs.scratch import Scratch
from verification.trace.format import UNENDED, Header, TraceError, read
from verification.trace.monitor import UNKNOWN, Verdict, check
from verification.trace.record import Recorder

LIMIT_BYTES = 8 << 20  # of entries: what `check` reads in about 12 s
LOOK_S = 0.005
SETTLE_S = 5.0


@dataclass(slots=True)
class LiveTrace:
    """The log of one engine so far, without prompts, in a folder that is gone when the engine is."""

    recorder: Recorder
    path: Path

    def verdict(self) -> tuple[Verdict | None, str]:
        """`check` of the entries up to now; (None, why) where they cannot be had."""
        try:
            self.recorder.settle(SETTLE_S)
            if self.recorder.problem is not None:
                return None, self.recorder.problem
            trace = read(self.path)
        except (TimeoutError, TraceError) as error:
            return None, str(error)
        if trace.problem == UNENDED:  # it is still being written
            trace.problem = None
        return check(trace), ""

    def facts(self) -> dict[str, Any]:
        """The verdict for a failure's bundle: clause and place, nothing of what the log holds."""
        verdict, why = self.verdict()
        if verdict is None:
            return {"word": UNKNOWN, "reasons": [why]}
        kept = ("word", "clause", "way", "entry", "step", "checked", "total", "reasons")
        return {name: getattr(verdict, name) for name in kept}


@contextlib.contextmanager
def following(memory: EngineMemory) -> Iterator[LiveTrace]:
    """Follows an engine that has just started, until the end of the `with`."""
    with Scratch("trace") as scratch:
        path = scratch.path / "run.trace"
        recorder = Recorder(memory, path, Header(memory.config, "live"), limit_bytes=LIMIT_BYTES, look_s=LOOK_S)
        with contextlib.suppress(TimeoutError), recorder:
            yield LiveTrace(recorder, path)
