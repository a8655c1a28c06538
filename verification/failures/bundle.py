"""Writes the bundle of one failure: a folder of JSON and text files that fits into a limit (`limits`).

failure.json      what failed, signature, replay command, seeds, versions, and what was left out
scenario.json     of a fault: what was drawn and what was seen
program-N.json    a failing program; prompts and stop ids only when asked for
history-N.jsonl   its submissions, cancels and events, in the order of delivery
history.svg       the newest of them as a picture, what cannot be in red, with the KV pages over the event log
engine-log.jsonl  the engine's event log, entries of the failing requests first when it does not fit
state.json        raw scheduler state: counters, requests, pages by state
engine.log, frontend.log
timeline.jsonl    all of it in one order, joined by request; timeline.txt is the same for reading
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blink_core.abi.dtypes import Array
from verification.certificate.jsonable import dump
from verification.failures import engine_log, evidence, timeline
from verification.failures.evidence import EngineEvidence, FailedRun
from verification.failures.http_log import Exchange
from verification.failures.limits import BUNDLE_BYTES, MAX_PROGRAMS, SHARES
from verification.failures.redact import Redactor
from verification.history import History
from verification.linearisability.recorded import picture_of

FAILURE = "failure.json"
PICTURE = "history.svg"
TIMELINE = "timeline.jsonl"
TIMELINE_TEXT = "timeline.txt"
SCHEMA_VERSION = 1
_LOG_LINE_BYTES = 150  # of a decoded log entry, about; how many are decoded at all
_LOG_MARGIN = 256  # entries around those of the failing requests that belong to the window
_MAX_TEXT = 8000
_SCALARS = frozenset(
    "max_tokens min_tokens temperature top_p top_k min_p repetition_penalty presence_penalty frequency_penalty seed "
    "ignore_eos n choice logprobs priority deadline_us".split()
)


@dataclass(slots=True)
class Material:
    """Everything that one bundle is made of. facts: the fields of failure.json that need no making."""

    facts: dict[str, Any]
    runs: list[FailedRun] = field(default_factory=list)
    engine: EngineEvidence | None = None
    exchanges: list[Exchange] = field(default_factory=list)
    scenario: dict[str, Any] | None = None  # plan and observations of a fault scenario
    texts: list[str] = field(default_factory=list)  # that are withheld wherever they stand


class _Folder:
    """Counts what is written, and keeps of each file what matters most."""

    def __init__(self, path: Path, limit: int) -> None:
        self.path, self.limit = path, limit
        self.files: dict[str, dict[str, Any]] = {}
        path.mkdir(parents=True, exist_ok=True)
        for old in path.iterdir():
            old.unlink()

    def share(self, kind: str, among: int = 1) -> int:
        return int(self.limit * SHARES[kind]) // max(1, among)

    def lines(
        self, name: str, lines: Sequence[str], budget: int, relevant: Callable[[int], bool] = lambda i: False
    ) -> None:
        """Writes lines within a budget of bytes: relevant ones first, then the newest; gaps are marked where they are.

        Lines that are JSON objects get a JSON object as a mark.
        """
        sizes = [len(text.encode("utf-8")) + 1 for text in lines]
        kept = set(range(len(lines)))
        if sum(sizes) > budget:
            kept, left = set(), budget - 200  # room for marks, one at least
            order = sorted(range(len(lines)), key=lambda i: (not relevant(i), -i))
            for i in order:
                # A mark may be needed before each kept line: count it, so that the limit holds whatever is left out.
                cost = sizes[i] + 64
                if cost <= left:
                    kept.add(i)
                    left -= cost
        out: list[str] = []
        gap = 0
        as_json = name.endswith(".jsonl")
        for i, text in enumerate(lines):
            if i in kept:
                out += [_mark(gap, as_json)] * (gap > 0) + [text]
                gap = 0
            else:
                gap += 1
        out += [_mark(gap, as_json)] * (gap > 0)
        self._write(name, "\n".join(out) + "\n" if out else "", len(kept), len(lines))

    def text(self, name: str, text: str, budget: int) -> None:
        """Writes a JSON text that must fit whole, or a statement that it did not."""
        size = len(text.encode("utf-8"))
        if size > budget:
            self._write(name, dump({"left_out": True, "bytes": size, "limit": budget}), 0, 1)
        else:
            self._write(name, text, 1, 1)

    def _write(self, name: str, text: str, kept: int, of: int) -> None:
        (self.path / name).write_text(text, encoding="utf-8")
        truncated = None if kept == of else {"kept": kept, "of": of}
        self.files[name] = {"bytes": len(text.encode("utf-8")), "truncated": truncated}


def _mark(gap: int, as_json: bool) -> str:
    return json.dumps({"left_out": gap}) if as_json else f"... {gap} lines left out ..."


def write(path: Path, material: Material, redactor: Redactor, limit: int = BUNDLE_BYTES) -> dict[str, Any]:
    """Writes a bundle into the folder `path`, replacing an older one there; returns what failure.json holds."""
    folder = _Folder(path, limit)
    redactor.learn(material.texts)
    newest = material.runs[-MAX_PROGRAMS:]
    engine = material.engine
    failing = evidence.failing_keys(newest[-1] if newest else None, engine, material.exchanges)
    for number, run in enumerate(newest):
        _write_program(folder, number, len(newest) * (1 + (material.scenario is not None)), run, redactor, set(failing))
    if material.scenario is not None:
        folder.text("scenario.json", dump(redactor.value(material.scenario)), folder.share("program", 2))
    chosen = _write_engine(folder, engine, newest, failing, redactor)
    if newest:
        _write_picture(folder, newest[-1].history, engine)
    joined = timeline.build(newest, engine, chosen, material.exchanges, failing, redactor)
    _write_timeline(folder, joined, material.facts, None if engine is None else engine.log_verdict)
    facts = {
        "schema_version": SCHEMA_VERSION,
        **material.facts,
        "prompts_included": redactor.show,
        "programs": [_program_facts(number, run) for number, run in enumerate(newest)],
        "failing_requests": [dict(zip(("ring", "slot", "generation"), key, strict=True)) for key in failing[:64]],
        "engine": None if engine is None else _engine_facts(engine, redactor),
        "limit_bytes": limit,
        "files": folder.files,
    }
    _shorten(facts, folder.share(FAILURE))
    (path / FAILURE).write_text(dump(facts), encoding="utf-8")
    return facts


# Fields of failure.json that may be of any size, by what they become when it is too large: what is missed least first.
_SHORTER: tuple[tuple[str, Callable[[Any], Any]], ...] = (
    ("details", lambda value: str(value)[:_MAX_TEXT]),
    ("witness", lambda value: {"left_out": True}),
    ("measurements", lambda value: {}),
    ("traceback", lambda value: [str(place)[-200:] for place in value[-8:]]),
    ("message", lambda value: str(value)[:_MAX_TEXT]),
    ("options", lambda value: {"left_out": True}),
    ("programs", lambda value: value[-1:]),
    ("details", lambda value: ""),
    ("message", lambda value: str(value)[:500]),
    ("failing_requests", lambda value: value[:4]),
    ("versions", lambda value: {name: item for name, item in value.items() if name != "packages"}),
)


def _shorten(facts: dict[str, Any], budget: int) -> None:
    """Shortens fields, one after the other, until the whole fits."""
    for name, shorter in _SHORTER:
        if len(dump(facts).encode("utf-8")) <= budget:
            return
        if facts.get(name) is not None:
            facts[name] = shorter(facts[name])
            facts["truncated"] = sorted({*facts.get("truncated", []), name})


def _program_facts(number: int, run: FailedRun) -> dict[str, Any]:
    history = run.history
    return {
        "file": f"program-{number}.json",
        "history": f"history-{number}.jsonl",
        "subject": history.subject,
        "requests": len(history.program.requests),
        "submitted": len(history.submitted),
        "events": len(history.events),
        "complete": history.complete,
        "nth_of_test": run.ordinal,
    }


def _engine_facts(engine: EngineEvidence, redactor: Redactor) -> dict[str, Any]:
    state = engine.state
    died = None if engine.died is None else redactor.text("\n".join(engine.died.splitlines()[:20]))
    return {
        "name": engine.name,
        "died": died,
        "at_step_boundary": engine.boundary,
        "notes": [redactor.text(note) for note in engine.notes],
        "log_entries": None if state is None else len(state.log),
        "log_lost": None if state is None else state.log_lost,
        "log_verdict": engine.log_verdict,
    }


def _write_program(
    folder: _Folder, number: int, among: int, run: FailedRun, redactor: Redactor, failing: set[engine_log.Key]
) -> None:
    history = run.history
    program = [_request(index, spec, redactor) for index, spec in enumerate(history.program.to_json()["requests"])]
    # With prompts this is what `Program.from_json` reads; without, a description in the same form.
    folder.text(f"program-{number}.json", dump({"requests": program}), folder.share("program", among))
    rows = _history_rows(history, redactor)
    lines = [json.dumps(row) for row in rows]

    def relevant(i: int) -> bool:
        return (history.ring, rows[i].get("slot"), rows[i].get("generation")) in failing

    folder.lines(f"history-{number}.jsonl", lines, folder.share("history", among), relevant)


def _request(index: int, spec: dict[str, Any], redactor: Redactor) -> dict[str, Any]:
    if redactor.show:
        return spec
    params = {name: value if name in _SCALARS else _withheld(value, redactor) for name, value in spec["params"].items()}
    return {
        "request": index,
        "prompt": redactor.tokens(spec["prompt"]),
        "params": params,
        **{name: spec[name] for name in ("after", "cancel_after", "mask_seed") if name in spec},
    }


def _withheld(value: Any, redactor: Redactor) -> Any:
    """A parameter that may hold token ids: how many entries it has, and their digest."""
    if isinstance(value, (list, tuple, dict, str)):
        return {"entries": len(value), "digest": redactor.digest(value)} if value else None
    return value if isinstance(value, (bool, float)) or value is None else redactor.token(value)


def _history_rows(history: History, redactor: Redactor) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {"what": "SUBMIT", "request": s.request, "slot": s.slot, "generation": s.generation, "sq_index": s.sq_index}
        for s in history.submitted
    ]
    rows += [{"what": "CANCEL", "request": request} for request in sorted(history.cancels)]
    rows += [{"what": "EVENT", **engine_log.decode_event(event, redactor)} for event in history.events]
    end = {"what": "END", "complete": history.complete, "ring": history.ring}
    for name in ("broken", "died"):
        text = getattr(history, name)
        end[name] = None if text is None else redactor.text(text)
    return [*rows, end]


def _write_engine(
    folder: _Folder,
    engine: EngineEvidence | None,
    runs: list[FailedRun],
    failing: list[engine_log.Key],
    redactor: Redactor,
) -> Array | None:
    """State, event log and process logs; returns which log entries were decoded."""
    if engine is None:
        return None
    for process, text in engine.logs.items():
        budget = folder.share("process-log", len(engine.logs))
        lines = [
            " ".join(part for part in (time, level, redactor.text(message)) if part)
            for time, level, message in timeline.split_log(text)
        ]
        folder.lines(f"{process}.log", lines, budget)
    if engine.state is None:
        return None
    folder.text("state.json", dump(evidence.summary(engine, failing)), folder.share("state"))
    log, first = engine.state.log, engine.state.log_lost
    others = [(r.history.ring, s.slot, s.generation) for r in runs for s in r.history.submitted]
    most = folder.share("engine-log") // _LOG_LINE_BYTES
    chosen = engine_log.select(log, failing or others, _LOG_MARGIN, most)
    lines = [json.dumps(engine_log.decode(first + i, log[i], redactor)) for i in chosen.tolist()]
    wanted = set(failing)
    folder.lines(
        "engine-log.jsonl",
        lines,
        folder.share("engine-log"),
        lambda n: engine_log.key_of(log[int(chosen[n])]) in wanted,
    )
    if len(chosen) < len(log):
        folder.files["engine-log.jsonl"]["truncated"] = {
            "kept": (folder.files["engine-log.jsonl"]["truncated"] or {"kept": len(chosen)})["kept"],
            "of": len(log),
        }
    return chosen


def _write_picture(folder: _Folder, history: History, engine: EngineEvidence | None) -> None:
    log = None if engine is None or engine.state is None else engine.state.log
    budget = folder.share("picture")
    text = picture_of(history, log, budget)
    if text is not None:
        folder.text(PICTURE, text, budget)


def _write_timeline(
    folder: _Folder, joined: timeline.Timeline, facts: dict[str, Any], log_verdict: dict[str, Any] | None
) -> None:
    rows = joined.rows
    lines = [json.dumps({"n": n, **row.values, "failing": joined.relevant(row)}) for n, row in enumerate(rows)]
    half = folder.share("timeline", 2)
    folder.lines(TIMELINE, lines, half, lambda n: joined.relevant(rows[n]))
    text = [
        f"{facts.get('property') or 'no property'}: {facts.get('clause') or facts.get('error', '')}",
        *str(facts.get("message", "")).splitlines()[:20],
        f"signature {facts['signature']['id']}  {facts['signature']['pattern']}",
        f"replay: {facts['replay']}",
        *_log_line(log_verdict),
        "",
    ]
    own = [timeline.line(row.values) for row in rows if joined.relevant(row)]
    named = ", ".join(f"ring {r} slot {s} generation {g}" for r, s, g in joined.failing[:8])
    head = [*text, f"Requests of the failure: {named or 'none is known'}", *own[-400:], "", "Everything:"]
    body = [timeline.line(row.values) for row in rows]
    offset = len(head)
    folder.lines(TIMELINE_TEXT, head + body, half, lambda n: n < offset or joined.relevant(rows[n - offset]))


def _log_line(verdict: dict[str, Any] | None) -> list[str]:
    """The first clause of docs/rules.md that the engine's log violates, if it does."""
    if verdict is None or not verdict.get("clause"):
        return []
    return [
        f"event log: clause {verdict['clause']} at entry {verdict['entry']}, step {verdict['step']}: {verdict['way']}"
    ]
