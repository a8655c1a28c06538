"""The host runtime's memory."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path

import blink_core
from blink_core.transport.shm import SHM_DIR

ROOT = Path(blink_core.__file__).parents[1]

# Address space for what is there and the rings, but not for the scheduler's state.
SHORT_OF_MEMORY = """
import resource, sys
from pathlib import Path
from blink_core.abi.config import EngineConfig
from blink_core.runtime.cpu import CpuRuntime
sizes = {"slots": 64, "sq_entries": 256, "cq_entries": 256, "max_len": 1 << 20, "arena_tokens": 1 << 20, "pages": 99}
config = EngineConfig(vocab=11, **sizes)
state = config.layouts()["State"].nbytes
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
assert state > 200 << 20 > 2 * config.shared_nbytes()
resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20), resource.RLIM_INFINITY))
try:
    CpuRuntime(config, sys.argv[1])
except OSError as error:
    print("refused", error.errno)
"""


def test_no_name_is_left_when_memory_runs_out() -> None:
    """Catches: shared memory that stays for ever because a later allocation of the same engine failed."""
    name = f"blink-test-{os.getpid()}-{secrets.token_hex(4)}"
    command = [sys.executable, "-c", SHORT_OF_MEMORY, name]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)
    try:
        assert done.stdout.startswith("refused"), done.stdout + done.stderr
        assert not (SHM_DIR / name).exists()
    finally:
        (SHM_DIR / name).unlink(missing_ok=True)
