"""Several rings at once: who is served when, on an engine that has less than they all want."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator

import pytest

from blink_core.abi.enums import LogLevel
from blink_core.abi.params import SamplingParams
from hil_rigs.engine_memory import EngineUnreachable
from hil_rigs.local import LocalRig
from verification.drivers.ring import run_program
from verification.fixtures import EngineLost, Judge
from verification.history import History
from verification.program import Program, RequestSpec
from verification.properties import queue_ordering, service_order
from verification.result import CheckResult
from verification.run_context import RunContext
from verification.serving import serving
from verification.thresholds import Thresholds

pytestmark = [pytest.mark.blink_property("queue-ordering"), pytest.mark.capability("cpu", "shared-memory")]

RINGS, REQUESTS, ROUNDS = 3, 16, 3
PROMPTS = ((20, 48), (3, 8), (3, 8, 20, 48))  # lengths by ring: turns by request would not be fair by tokens
HOLD_S = 20.0
END_S, JOIN_S = 120.0, 10.0  # of a ring's program, and how much later its thread must be through
# Few rows, few pages, and a quantum below the cost of most requests: all of it must be shared.
SIZES = {
    "rings": RINGS, "slots": REQUESTS, "sq_entries": 64, "cq_entries": 1024, "arena_tokens": 1 << 14, "max_len": 96,
    "page_size": 8, "pages": 26, "max_rows": 4, "token_budget": 24, "quantum": 24, "reservation_steps": 8,
    "log_entries": 1 << 18, "log_level": int(LogLevel.ALL),
}  # fmt: skip


@pytest.fixture(scope="module")
def crowded(blink_run: RunContext) -> Iterator[LocalRig]:
    """An engine of three rings with the no-op model: what is judged here is the scheduler's alone."""
    with serving(blink_run, "crowded", None, SIZES, http=False, capture=False) as rig:
        yield rig


def _draw(rng: random.Random, ring: int, vocab: int) -> Program:
    """As many requests as a ring has slots; some are urgent, some are cancelled, some have a deadline they may miss."""
    requests = []
    for _ in range(REQUESTS):
        prompt = tuple(rng.randrange(vocab) for _ in range(rng.choice(PROMPTS[ring])))
        params = SamplingParams(
            max_tokens=rng.choice((2, 8, 24)),
            priority=rng.choice((0, 2, 2, 2, 3)),
            deadline_us=rng.choice((1, 2000)) if rng.random() < 0.1 else 0,
        )
        requests.append(RequestSpec(prompt, params, cancel_after=1 if rng.random() < 0.1 else None))
    return Program(tuple(requests))


def _run(rig: LocalRig, programs: list[Program], failed: list[str]) -> list[History]:
    """Runs one program on each ring, all of whose requests are published while the engine is held."""
    clients = [rig.ring(ring) for ring in range(RINGS)]
    histories: dict[int, History] = {}
    published = [threading.Event() for _ in range(RINGS)]

    def work(ring: int) -> None:
        def died() -> str | None:
            """Asked when a poll brought nothing: nothing comes of a held engine, so all has been submitted that can."""
            published[ring].set()
            return rig.wait(0.0)

        histories[ring] = run_program(clients[ring], programs[ring], ring=ring, deadline_s=END_S, died=died)

    threads = [threading.Thread(target=work, args=(ring,), daemon=True) for ring in range(RINGS)]
    with rig.memory.hold():
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + HOLD_S
        in_time = all(event.wait(max(0.0, deadline - time.monotonic())) for event in published)
        if not in_time or any(client.live < REQUESTS for client in clients):
            failed.append(f"only {[client.live for client in clients]} requests were published in {HOLD_S:g} s")
    deadline = time.monotonic() + END_S + JOIN_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if len(histories) < RINGS:
        raise TimeoutError(
            f"rings {sorted(set(range(RINGS)) - set(histories))} gave no history in {END_S + JOIN_S:g} s"
        )
    return [histories[ring] for ring in range(RINGS)]


def test_several_rings(crowded: LocalRig, judge: Judge, seed: int, thresholds: Thresholds) -> None:
    """Three front ends publish at once far more than the engine can run, in several classes.

    Catches: a ring that gets more or less than its share of tokens, a class that overtakes a more urgent one, a large
    request that is passed by for ever, a deadline that is missed or comes early.
    """
    rng = random.Random(seed)
    results: list[CheckResult] = []
    memory, failed = crowded.memory, list[str]()
    try:
        for _ in range(ROUNDS):
            programs = [_draw(rng, ring, crowded.descriptor.config.vocab) for ring in range(RINGS)]
            for program in programs:
                judge.case(program)
            with memory.hold():
                before = memory.snapshot(log_from=2**63)
            histories = _run(crowded, programs, failed)
            with memory.hold():
                after = memory.snapshot(log_from=int(before.header["log_tail"]))
            for history in histories:
                judge(
                    queue_ordering.check(history, after.log, after.log_gap, eos_ids=(), max_len=SIZES["max_len"]),
                    history,
                )
            results.append(judge(service_order.check_service(before, after, histories), *histories))
    except EngineUnreachable as e:
        raise EngineLost(str(e)) from e
    assert not failed, failed
    judge(service_order.check_contested(results, thresholds.evidence.contested_turns))
