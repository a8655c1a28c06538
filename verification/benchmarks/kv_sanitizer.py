"""What the KV sanitizer costs: `python -m verification.benchmarks.kv_sanitizer --model PATH [--json]`.

Two engines with the same model, one of them under the sanitizer, in turn: the time of a decode step is that of a run
with STEPS + 1 tokens less that of a run with one. The ratio of two turns next to each other is what counts, and its
median over the rounds. Without `--kv-sanitizer` nothing of it is in the engine's path, which its own figures show.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import numpy as np

from blink_core.frontend.ring_client import RingClient
from hil_rigs.description import load_rig
from hil_rigs.kv_reports import KvReports
from hil_rigs.local import LocalOptions, LocalRig
from verification.benchmarks.decode import engine_run
from verification.benchmarks.results import Result, command

STEPS, ROUNDS = 12, 5
CASES = ((1, 32), (8, 256))  # rows, tokens of each prompt


def _step_ms(client: RingClient, rows: int, prompt: int, turn: int) -> float:
    """Milliseconds of one decode step; prompts are new in each turn, so that the prefix cache holds none of them."""
    vocab = client.config.vocab
    rng = np.random.default_rng((rows, prompt, turn))
    taken = []
    for tokens in (1, STEPS + 1):
        batch = [rng.integers(min(100, vocab // 2), vocab, prompt).tolist() for _ in range(rows)]
        taken.append(engine_run(client, batch, tokens))
    return (taken[1] - taken[0]) / STEPS * 1e3


def run(model: Path) -> list[Result]:
    """All measurements. Raises RigFailure when an engine does not start, RuntimeError when the sanitizer reports."""
    results = []
    description = load_rig("local")
    plain = LocalRig(description, model, http=False, options=LocalOptions(threads=1))
    watched = LocalRig(description, model, http=False, options=LocalOptions(threads=1, kv_sanitizer=True))
    with plain, watched:
        clients = plain.ring(1), watched.ring(1)
        for rows, prompt in CASES:
            times: tuple[list[float], list[float]] = ([], [])
            for turn in range(ROUNDS + 1):
                for client, kept in zip(clients, times, strict=True):
                    kept.append(_step_ms(client, rows, prompt, turn))
            without, beside = (kept[1:] for kept in times)  # the first turn warms up
            ratios = [b / a for a, b in zip(without, beside, strict=True)]
            name = f"{rows} rows of {prompt} tokens"
            results += [
                Result(f"decode step, {name}", statistics.median(without), "ms", "", tuple(without)),
                Result(f"with KV sanitizer, {name}", statistics.median(beside), "ms", "", tuple(beside)),
                Result(f"with / without, {name}", statistics.median(ratios), "x", "", tuple(ratios)),
            ]
        counted = KvReports(watched.descriptor).counters()
        if counted["reports"] or not counted["rows"]:
            raise RuntimeError(f"the KV sanitizer was not quiet, or did nothing: {counted}")
    return results


if __name__ == "__main__":
    command(__doc__, run)
