"""How large a bundle may be, in one place."""

from __future__ import annotations

BUNDLE_BYTES = 4 << 20
"""All files of one bundle together; what is left out is said in the bundle."""

SHARES = {
    "failure.json": 0.10,
    "program": 0.08,
    "history": 0.16,
    "engine-log": 0.20,
    "state": 0.06,
    "process-log": 0.10,
    "picture": 0.04,
    "timeline": 0.26,
}
"""Part of the limit that each kind of file may fill; files of one kind share it."""

MAX_PROGRAMS = 3  # failing programs, with their histories, in one bundle
MAX_LOG_READ = 1 << 20  # bytes read from the end of each process log
