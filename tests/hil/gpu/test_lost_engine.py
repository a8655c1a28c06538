"""The end of a device-driven engine that is lost, as far as it goes without a GPU: CuPy and driver are stand-ins."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock
sys.modules["cupy"] = MagicMock()
import numpy as np
from cuda.bindings import driver
from blink_core.abi.config import EngineConfig
from blink_core.runtime import launch

results = {"running": "CUDA_ERROR_NOT_READY", "broken": "CUDA_ERROR_LAUNCH_FAILED", "ended": "CUDA_SUCCESS"}
result = driver.CUresult[results[sys.argv[2]]]
launch.driver = SimpleNamespace(
    CUresult=driver.CUresult, CUstream=driver.CUstream, cuStreamQuery=lambda stream: (result,),
    cuGraphLaunch=lambda *a: (0, None),
)
launch.check = lambda *a: None
config = EngineConfig(vocab=16, rings=2)
room = np.zeros(config.shared_nbytes() // 8, np.uint64)
layouts = config.layouts()
control = layouts["Control"].sections
engine = launch.DeviceDriven.__new__(launch.DeviceDriven)
engine.config, engine.layouts, engine._lost = config, layouts, False
engine.segment = SimpleNamespace(address=room.ctypes.data, close=lambda: print("unlinked"))
engine._control = room.ctypes.data + control["control"].offset
engine._status = room.ctypes.data + control["status"].offset
report = np.zeros(16, np.uint64)
engine._report = SimpleNamespace(address=report.ctypes.data, buffer=report)
engine._executable, engine.stream = None, SimpleNamespace(ptr=0)
def refuse():
    raise RuntimeError("an error of the GPU is every call's error")
pinned = SimpleNamespace(close=refuse if sys.argv[2] == "broken" else lambda: None)
engine._pinned, engine._built, engine._switch = [pinned], None, None
if sys.argv[1] == "lost":
    try:
        engine.serve(lost=lambda: "Xid 79")
    except launch.EngineLost as error:
        print("lost:", error)
engine.close()
ring, gpu = layouts["Ring"], layouts["Ring"].sections["gpu"].offset
states = [int(room[(layouts["Control"].nbytes + r * ring.nbytes + gpu) // 8 + 4]) for r in range(2)]
print("stop", int(room[control["control"].offset // 8]), "states", *states)
"""


@pytest.mark.parametrize(
    ("engine", "graph", "told"),
    [
        ("lost", "running", ["lost: Xid 79", "unlinked", "stop 0 states 5 5"]),
        ("lost", "broken", ["lost: the scheduler's graph has ended and the engine was not stopped: "
                            "CUDA_ERROR_LAUNCH_FAILED", "unlinked", "stop 0 states 5 5"]),
        ("whole", "ended", ["unlinked", "stop 1 states 0 0"]),
    ],
)  # fmt: skip
def test_a_lost_engine_is_not_asked_to_stop(engine: str, graph: str, told: list[str]) -> None:
    """Catches: a scheduler that does run on after an Xid, is told to stop, and writes STOPPED over the FAILED that
    clients are to see, with requests that end as if somebody had wanted it; a close that waits for its end, or whose
    own error after one of the GPU takes the place of the reason."""
    command = [sys.executable, "-c", CODE, engine, graph]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == told
