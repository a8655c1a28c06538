"""The CPU engine under the GPU engine's watchdog: `python tests/planted/watched.py RECORDING [engine arguments]`.

For tests of what clients are told when a GPU is lost, where there is no GPU: Xid errors come from the recording, which
begins when the file appears.
"""

from __future__ import annotations

import sys
import threading
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from blink_core.runtime import cpu, cuda_main, engine_main
from blink_core.runtime.gpu_events import GpuEvent, RecordedEvents


class WhenThere:
    """A recording that may be written while the engine runs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._events: RecordedEvents | None = None

    def wait(self, seconds: float) -> GpuEvent | None:
        if self._events is None and not self._path.exists():
            threading.Event().wait(seconds)
            return None
        self._events = self._events or RecordedEvents(self._path)
        return self._events.wait(seconds)

    def close(self) -> None:
        if self._events is not None:
            self._events.close()


def main() -> int:
    own, args = cuda_main.parse(["--gpu-events", sys.argv[1], *sys.argv[2:]])
    shipped = cpu.CpuRuntime.serve

    def watched(self: cpu.CpuRuntime, step: cpu.ModelStep) -> None:
        with closing(cuda_main.watch(own, args, self)):
            shipped(self, step)

    cpu.CpuRuntime.serve = watched  # type: ignore[method-assign]
    cuda_main.event_source = lambda recording: WhenThere(Path(sys.argv[1]))
    return engine_main.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
