"""A no-op engine with one fault, for suites that fail: `python engine.py FAULT [engine arguments]`.

Its vocabulary and its tokens are large numbers, so that a token id in a bundle cannot be anything else.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

from blink_core.runtime import cpu, engine_main

FIRST_OUTPUT = 1_900_000_000
FATAL_LENGTH = 21  # context length at which the fault strikes: some drawn programs reach it, some do not


def main(argv: list[str]) -> int:
    fault, shipped = argv[0], cpu.noop_step

    def step(plan: Any) -> None:
        shipped(plan)
        plan.results["token"] += FIRST_OUTPUT
        plan.top_tokens[:] += FIRST_OUTPUT
        if fault != "none" and (plan.rows["context_len"] == FATAL_LENGTH).any():
            if fault == "segfault":
                os.kill(os.getpid(), signal.SIGSEGV)
            raise ValueError(f"cannot embed {plan.token_ids.tolist()} of a row")

    vars(engine_main).update(noop_step=step, NOOP_VOCAB=2**31 - 1)
    return engine_main.main(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
