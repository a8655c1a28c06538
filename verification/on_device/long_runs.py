"""Many decode steps in one go: tokens, steps, heartbeat and pages of a run of 120, 1,000 and 10,000.

One request at a time, greedy, on an engine in float32, so that each step gives one token and a step that is lost or
done twice is counted. 120 passes the launches that one execution of a device graph may make; 10,000 attends to more
pages than any other test, which takes a quarter of a minute and is asked of the default launch alone: what other ways
of launching do differently they do in every step. Clauses of a run:

  steps      the engine committed exactly as many steps as it gave tokens; their indices are 0, 1, 2 ...
  heartbeat  it never falls, and never stands still for longer than `STILL_S`
  pages      recounted from raw memory at the end, nothing lives and every page is free
  tokens     each is HuggingFace float64's, or a counted tie
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from blink_core.abi.enums import EventKind
from blink_core.abi.params import SamplingParams
from hil_rigs.description import RigDescription
from hil_rigs.local import LocalOptions, LocalRig
from verification.criterion import score_tokens
from verification.oracles.hf import HFOracle
from verification.properties.kv_conservation import check_snapshot
from verification.result import CheckResult, Measurement, Verdict, merge
from verification.thresholds import TokenThresholds

PROPERTY = "token-equivalence"
STEPS = (120, 1_000, 10_000)
DEFAULT_LAUNCH = "auto"  # here it launches every step fire-and-forget: float32, few tokens a step
LAUNCHES = (DEFAULT_LAUNCH, "tail", "switch", "host")
SHORT = 1_000  # the longest run of the other ways
PROMPT = 24
STILL_S = 5.0  # longer than the scheduler may stay away from its heart in a step of a small model
LOOK_S = 0.0005
DEADLINE_S = 180.0


@dataclass
class Heart:
    """What a thread saw of the heartbeat while a run lasted."""

    looks: int = 0
    fell: str = ""
    longest_s: float = 0.0


@dataclass
class LongRun:
    """One run. steps: committed by the engine while it lasted. indices: of the token events, as they came."""

    asked: int
    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    ended: str = ""
    steps: int = 0
    heart: Heart = field(default_factory=Heart)
    pages: CheckResult | None = None
    seconds: float = 0.0


def counts_of(place: int, counts: Sequence[int] = STEPS) -> tuple[int, ...]:
    """Runs of the way of launching at a place of the list: all of them at the first, the short ones at the others."""
    return tuple(count for count in counts if place == 0 or count <= SHORT)


def run_long(
    description: RigDescription,
    model: Path,
    launch: str | None,
    counts: Sequence[int] = STEPS,
    seed: int = 0,
    longest: int = 0,
) -> list[LongRun]:
    """All runs on one engine. launch: of rig gpu (fire, tail, switch, host, auto), None for the rig's own. longest: run
    that the engine has room for, if longer than all of `counts`.

    Raises RigFailure, and TimeoutError for a run that is not over after `DEADLINE_S`.
    """
    longest = max(*counts, longest) + PROMPT + 8
    sizes = {
        "max_len": longest, "pages": 2 + -(-longest // description.engine.page_size) + 4, "max_rows": 4, "slots": 8,
        "sq_entries": 32, "cq_entries": 1024, "token_budget": 64, "arena_tokens": 1 << 14, "lease_us": 0,
    }  # fmt: skip
    command = description.engine_command
    if launch is not None:
        command = (*command, "--launch", launch, "--dtype", "float32")
    options = LocalOptions(engine=sizes, engine_command=command)
    rng = np.random.default_rng(seed)
    with LocalRig(description, model, http=False, options=options) as rig:
        client = rig.ring()
        vocab = rig.descriptor.config.vocab
        return [_run(rig, client, tuple(rng.integers(3, vocab, PROMPT).tolist()), count) for count in counts]


def _run(rig: LocalRig, client: Any, prompt: tuple[int, ...], count: int) -> LongRun:
    run = LongRun(count, prompt)
    begin, before = time.monotonic(), rig.memory.status("steps")
    with _watched_heart(rig, run.heart):
        client.submit(prompt, SamplingParams(max_tokens=count, ignore_eos=True))
        while client.live:
            for event in client.poll(0.2):
                kind = int(event["kind"])
                if kind == EventKind.TOKEN:
                    run.tokens.append(int(event["token"]))
                    run.indices.append(int(event["index"]))
                else:
                    run.ended = f"{EventKind(kind).name} {int(event['reason'])}"
            if time.monotonic() - begin > DEADLINE_S:
                raise TimeoutError(f"{len(run.tokens)} of {count} tokens came in {DEADLINE_S:g} s")
            if (died := rig.wait(0.0)) is not None:
                raise TimeoutError(f"{len(run.tokens)} of {count} tokens came: {died}")
    run.seconds = time.monotonic() - begin
    with rig.memory.hold():
        state = rig.memory.snapshot(2**63)
    run.steps = rig.memory.status("steps") - before
    live, usable = int(state.header["live"]), state.config.pages - 2
    free = len(state.free_list) + int(state.header["idle_cached"])
    run.pages = check_snapshot(state)
    if run.pages.ok() and (live or free != usable):
        message = f"{live} requests live and {free} of {usable} pages are free after the run"
        run.pages = CheckResult(Verdict.INVALID, "kv-conservation", "pages", message)
    return run


@contextmanager
def _watched_heart(rig: LocalRig, heart: Heart) -> Iterator[None]:
    over = threading.Event()

    def watch() -> None:
        last, since = rig.memory.status("heartbeat"), time.monotonic()
        while not over.wait(LOOK_S):
            beat, now = rig.memory.status("heartbeat"), time.monotonic()
            heart.looks += 1
            if beat < last:
                heart.fell = heart.fell or f"from {last} to {beat}"
            heart.longest_s = max(heart.longest_s, now - since)
            if beat != last:
                last, since = beat, now

    thread = threading.Thread(target=watch, name="blink-heart", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(5.0)


def check_run(run: LongRun) -> CheckResult:
    """Clauses steps, heartbeat and pages."""
    wrong: list[tuple[str, str]] = []
    if run.indices != list(range(run.asked)) or not run.ended.startswith("FINISH"):
        wrong.append(("steps", f"{len(run.tokens)} tokens of {run.asked}, ended {run.ended or 'not at all'}"))
    if run.steps != run.asked:  # the step that computes the prompt gives the first token
        wrong.append(("steps", f"{run.steps} steps were committed for {run.asked} tokens"))
    if run.heart.fell or run.heart.looks == 0:
        wrong.append(("heartbeat", f"it fell {run.heart.fell}" if run.heart.fell else "nobody looked"))
    if run.heart.longest_s > STILL_S:
        wrong.append(("heartbeat", f"it stood still for {run.heart.longest_s:.1f} s, at most {STILL_S:g}"))
    results = [CheckResult(Verdict.INVALID, PROPERTY, clause, message) for clause, message in wrong]
    if run.pages is None:
        results.append(CheckResult(Verdict.UNKNOWN, PROPERTY, "pages", "nobody counted them"))
    elif not run.pages.ok():
        results.append(CheckResult(run.pages.verdict, PROPERTY, "pages", run.pages.message))
    return merge(results) if results else CheckResult(Verdict.VALID, PROPERTY, "steps", f"{run.steps} steps, none lost")


def check_tokens(
    run: LongRun, hf64: HFOracle, hf32: HFOracle, thresholds: TokenThresholds, *, window: int = 0
) -> CheckResult:
    """Clause tokens, by teacher forcing: HuggingFace's own choice, or a tie within its own float32 error.

    window: rows that are looked at from the end, 0 for all: those before a wrong token decide nothing about it.
    """
    ids = [*run.prompt, *run.tokens[:-1]]
    start = len(run.prompt) - 1 if window == 0 else max(len(run.prompt) - 1, len(ids) - window)
    emitted = run.tokens[start - len(run.prompt) + 1 :]
    r32 = hf32.teacher_force(ids, start=start)
    # HuggingFace float32 stands in for the engine's logits, which a run without capture does not give.
    scores = score_tokens(logits=r32, hf64=hf64.teacher_force(ids, start=start), hf32=r32, emitted=emitted)
    diverged = np.flatnonzero(scores.emitted != scores.reference_token)
    beyond = [int(i) for i in diverged if scores.regret[i] > thresholds.regret_factor * scores.bound[i]]
    ties, allowed = len(diverged) - len(beyond), thresholds.ties.allowed(len(scores))
    first = f"; the first at index {beyond[0] + start - len(run.prompt) + 1}" if beyond else ""
    message = f"{len(beyond)} of {len(scores)} tokens are not HuggingFace's, {ties} ties of {allowed} allowed{first}"
    measured = {"rows": Measurement(len(scores), "rows"), "ties": Measurement(ties, "rows", allowed)}
    verdict = Verdict.INVALID if beyond or ties > allowed or len(scores) == 0 else Verdict.VALID
    return CheckResult(verdict, PROPERTY, "tokens", message, {}, measured)


def check_same(runs: dict[str, list[LongRun]]) -> CheckResult:
    """Whether the ways of launching gave the same tokens: each runs the same kernels in the same order."""
    names = list(runs)
    compared = 0
    for name in names[1:]:
        others = {run.asked: run for run in runs[name]}
        for a in runs[names[0]]:
            b = others.get(a.asked)
            if b is None:
                continue
            compared += 1
            if a.tokens != b.tokens:
                at = next((i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=False)) if x != y), "the end")
                message = f"{a.asked} steps: {names[0]} and {name} differ from index {at} on"
                return CheckResult(Verdict.INVALID, PROPERTY, "tokens", message)
    if compared == 0:
        return CheckResult(Verdict.UNKNOWN, PROPERTY, "tokens", f"{', '.join(names)}: no two runs of the same length")
    return CheckResult(
        Verdict.VALID, PROPERTY, "tokens", f"{', '.join(names)}: the same tokens, {compared} pairs of runs"
    )
