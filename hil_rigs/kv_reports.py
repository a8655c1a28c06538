"""What the KV sanitizer of a running engine has to say: its counters and its reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from blink_core.runtime.descriptor import KV_COUNTERS, EngineDescriptor
from blink_core.runtime.memory import MappedMemory
from hil_rigs.engine_memory import EngineUnreachable


class KvReports:
    """Reads one engine's counters and reports; both also after the engine has died, as long as its folder is there."""

    def __init__(self, descriptor: EngineDescriptor) -> None:
        """Raises EngineUnreachable if the engine runs without the sanitizer, or is gone."""
        info = descriptor.kv_sanitizer
        if info is None:
            raise EngineUnreachable(f"engine process {descriptor.pid} runs without the KV sanitizer")
        self._file = Path(info.reports)
        try:
            memory = MappedMemory(descriptor.pid, info.counters.fd, info.counters.nbytes)
        except OSError as e:
            raise EngineUnreachable(f"KV sanitizer of engine process {descriptor.pid}: {e}") from e
        self._counters = np.frombuffer(memory.buffer, np.uint64, len(KV_COUNTERS))

    def counters(self) -> dict[str, int]:
        """`KV_COUNTERS` as they stand now."""
        return dict(zip(KV_COUNTERS, self._counters.tolist(), strict=True))

    def reports(self) -> list[dict[str, Any]]:
        """Every report so far, oldest first: `blink_core.runtime.kv_sanitizer.KvReport` as JSON objects."""
        lines = self._file.read_bytes().split(b"\n")[:-1]  # what has no end yet is still being written
        return [json.loads(line) for line in lines]
