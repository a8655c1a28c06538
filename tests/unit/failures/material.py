"""A failure made by hand: a program of secret tokens, its history, an event log and process logs that mention them."""

from __future__ import annotations

from typing import Any

import numpy as np

from blink_core.abi.config import EngineConfig
from blink_core.abi.dtypes import DTYPES, LOG_ENTRY, REQUEST
from blink_core.abi.enums import EngineState, EventKind, FinishReason, LogKind, RequestState
from blink_core.abi.params import SamplingParams
from hil_rigs.engine_memory import StateSnapshot
from verification.failures.bundle import Material
from verification.failures.evidence import EngineEvidence, FailedRun
from verification.failures.http_log import Exchange
from verification.failures.signature import signature
from verification.history import History, Submitted
from verification.program import Program, RequestSpec
from verification.result import CheckResult, Verdict

# Ids so long that no count, digest or address holds one by chance.
PROMPTS = ((1712345671, 1712345672, 1712345673), (1812345671, 1812345672))
OUTPUT = (1912345671, 1912345672, 1912345673)
STOPS = (1612345671,)
LOGPROB_BITS = 3204448256
SECRET = "The launch code is swordfish, zum Glück"
HTTP_ID = "0123456789abcdef0123456789abcdef"
HTTP_SLOT, HTTP_GENERATION = 5, 9


def log_of(rows: list[tuple[LogKind, int, int, int, int, int, int, int]]) -> Any:
    """Entries of (kind, step, ring, slot, generation, a, b, c)."""
    log = np.zeros(len(rows), LOG_ENTRY)
    for entry, (kind, step, ring, slot, generation, a, b, c) in zip(log, rows, strict=True):
        entry["kind"], entry["step"], entry["ring"], entry["slot"] = kind, step, ring, slot
        entry["generation"], entry["a"], entry["b"], entry["c"] = generation, a, b, c
    return log


def snapshot(log: Any, lost: int = 0) -> StateSnapshot:
    config = EngineConfig(vocab=2**31 - 1, slots=8, rings=2, pages=18)
    requests = np.zeros(16, REQUEST)
    requests["row"] = -1
    requests[8 + 2]["state"], requests[8 + 2]["generation"] = RequestState.RUNNING, 4
    header = np.zeros(1, DTYPES["StateHeader"])[0]
    header["state"], header["log_tail"] = EngineState.READY, lost + len(log)
    empty = np.zeros(0, np.uint32)
    tables, pages = np.zeros((4, 4), np.uint32), np.zeros(18, DTYPES["Page"])
    return StateSnapshot(
        config, header, np.zeros(2, DTYPES["RingState"]), requests, empty, tables, pages,
        np.arange(16, dtype=np.uint32), empty, log, lost,
        page_tokens=np.full((18, config.page_size), PROMPTS[0][0], np.int32),
        running_tokens=np.full((1, config.max_len), PROMPTS[1][0], np.int32),
    )  # fmt: skip


def run(result: CheckResult | None = None) -> FailedRun:
    """Two requests on ring 1; request 1 (slot 2, generation 4) gets its second token twice."""
    requests = tuple(
        RequestSpec(prompt, SamplingParams(max_tokens=8, seed=77, stop_token_ids=STOPS)) for prompt in PROMPTS
    )
    history = History(Program(requests), 1, [Submitted(0, 1, 3, 0), Submitted(1, 2, 4, 1)], {0}, subject="tiny")
    events = [
        (1, EventKind.TOKEN, 0, 3, 0, OUTPUT[0], 5),
        (2, EventKind.TOKEN, 0, 4, 0, OUTPUT[1], 5),
        (2, EventKind.TOKEN, 0, 4, 0, OUTPUT[1], 6),
        (1, EventKind.FINISH, FinishReason.CANCELLED, 3, 1, 0, 6),
    ]
    history.events = [
        {"seq": n + 1, "slot": slot, "kind": int(kind), "reason": int(reason), "generation": generation,
         "index": index, "token": token, "logprob": -0.5, "step": step}
        for n, (slot, kind, reason, generation, index, token, step) in enumerate(events)
    ]  # fmt: skip
    alternatives = {"tokens": [OUTPUT[2], STOPS[0]], "logprobs": [-0.125, -0.25]}
    history.events.insert(
        1, {"seq": 9, "slot": 2, "generation": 4, "kind": int(EventKind.LOGPROBS), "count": 2, **alternatives}
    )
    history.complete = True
    return FailedRun(history, result or finding(history))


def finding(history: History) -> CheckResult:
    message = f"request 1 got token {OUTPUT[1]} at index 0 where 1 was next, after {[*PROMPTS[1]]}: {SECRET!r}"
    witness: Any = {"event": history.events[3], "prompt": list(PROMPTS[1]), "text": SECRET, "request": 1}
    return CheckResult(Verdict.INVALID, "queue-ordering", "delivery", message, witness)


def engine(extra: int = 0) -> EngineEvidence:
    """The log has both requests, one of ring 0 from HTTP, and `extra` entries of other requests ahead of them."""
    rows = [(LogKind.PLAN_ROW, 1, 0, 7, n, 1, 1, 0) for n in range(extra)]
    rows += [
        (LogKind.ACCEPT, 3, 0, HTTP_SLOT, HTTP_GENERATION, 4, 8, 0),
        (LogKind.ACCEPT, 4, 1, 1, 3, len(PROMPTS[0]), 8, 0),
        (LogKind.ACCEPT, 4, 1, 2, 4, len(PROMPTS[1]), 8, 1),
        (LogKind.STEP, 5, 0, 0, 0, 2, 5, 2),
        (LogKind.RESULT, 5, 1, 1, 3, OUTPUT[0], 0, LOGPROB_BITS),
        (LogKind.TOKEN, 5, 1, 1, 3, 0, OUTPUT[0], 0),
        (LogKind.TOKEN, 5, 1, 2, 4, 0, OUTPUT[1], 0),
        (LogKind.CANCEL, 6, 1, 1, 3, 1, 2, 0),
        (LogKind.FINISH, 6, 1, 1, 3, FinishReason.CANCELLED, 1, 1),
    ]
    frontend = [
        "2026-01-01 10:00:00,000 INFO blink.frontend: serving tiny on http://127.0.0.1:1234",
        f"2026-01-01 10:00:01,000 DEBUG blink.frontend: request {HTTP_ID} is slot {HTTP_SLOT} generation 9",
        f"2026-01-01 10:00:02,000 ERROR blink.frontend: request {HTTP_ID} failed unexpectedly",
        "Traceback (most recent call last):",
        '  File "somewhere.py", line 12, in encode',
        f"ValueError: cannot encode {SECRET!r} as {list(PROMPTS[0])}",
        f"2026-01-01 10:00:03,000 WARNING blink.frontend: it was {SECRET}, id {PROMPTS[0][0]}",
    ]
    log = log_of(rows)
    text = "2026-01-01 09:59:00,000 INFO blink.engine: ready: tiny, 18 pages\n"
    return EngineEvidence("tiny", None, snapshot(log), True, [], {"engine": text, "frontend": "\n".join(frontend)})


def material(extra: int = 0, **facts: Any) -> Material:
    one = run()
    assert one.result is not None
    found = signature("product_failure", one.result.property, one.result.clause, one.result.message)
    values: dict[str, Any] = {
        "test": "queue-ordering/fifo", "nodeid": "test_fifo.py::test_fifo", "phase": "call",
        "property": one.result.property, "clause": one.result.clause, "outcome": "product_failure",
        "verdict": "invalid", "message": "", "error": "PropertyViolation", "witness": None, "measurements": {},
        "traceback": [], "signature": {"id": found.id, "pattern": found.pattern}, "known_issue": None,
        "replay": "pytest test_fifo.py::test_fifo --rig local --seed 1", "seeds": {"root": 1, "source": "given"},
        "run": {"id": "r1", "rig": "local", "profile": "smoke", "worker": "main", "time": "2026-01-01T10:00:00+00:00"},
        "model": {"name": "tiny"}, "options": {}, "versions": {"python": "3.11"},
    }  # fmt: skip
    exchange = Exchange(HTTP_ID, "POST", "/v1/completions", 500, False)
    return Material(values | facts, [one], engine(extra), [exchange], texts=[SECRET])


def everything(folder: Any) -> str:
    """All bytes of a bundle, names of files included."""
    return "\n".join(
        f"{path.name}\n{path.read_text(encoding='utf-8')}" for path in sorted(folder.rglob("*")) if path.is_file()
    )
