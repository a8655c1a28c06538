"""The linearisability checker on labelled histories, on damaged input, and what it shows."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from blink_core.abi.dtypes import LOG_ENTRY
from blink_core.abi.enums import LogKind
from verification.linearisability.__main__ import main
from verification.linearisability.check import check
from verification.linearisability.operations import Kind, Operation, OperationHistory, Request, dumps
from verification.linearisability.pages import Use, spans
from verification.linearisability.picture import PageUse, draw
from verification.linearisability.scene import to_svg, write_png
from verification.linearisability.search import linearise
from verification.result import Verdict

FOLDER = Path(__file__).parents[3] / "traces" / "histories"
FILES = sorted(FOLDER.glob("*.json"))


def load(path: Path) -> tuple[dict[str, Any], OperationHistory]:
    data = json.loads(path.read_text(encoding="utf-8"))
    return data, OperationHistory.from_json(data)


# Numbers in what is said of a bad history: requests, slots, indices, counts.
TOLD = {
    "busy-owner-lost": [0], "busy-without-owner": [0], "cancel-lost": [0], "cancel-overtaken": [0],
    "cancelled-one-never-ends": [0], "count": [2, 1], "heard-from-the-old-epoch": [0, 1],
    "next-owner-too-early": [0, 0], "no-end": [0], "old-generation-served": [4, 0], "refused-after-tokens": [1],
    "starts-at-one": [1, 0], "submission-lost": [0], "token-lost": [2, 1], "token-twice": [1, 2],
    "tokens-swapped": [2, 1], "too-few-tokens": [1, 2], "too-many-tokens": [2, 2],
}  # fmt: skip


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_labelled_history(path: Path) -> None:
    """Catches: a legal behaviour that is refused, a fault that passes, a fault laid to the wrong law or told with wrong
    numbers."""
    data, history = load(path)
    found = check(history)
    expected = {"good": Verdict.VALID, "bad": Verdict.INVALID}[data["label"]]
    assert (found.verdict, found.law) == (expected, data.get("law", "")), f"{data['why']}: {found.message}"
    if data["label"] == "bad":
        told = found.message.rpartition(": ")[2]
        assert [int(n) for n in re.findall(r"-?\d+", told)] == TOLD.get(path.stem.removeprefix("bad-"), []), told


def test_labelled_histories_are_enough() -> None:
    """Catches: a corpus that was not found, or has shrunk; a law without an example; a file without its reason."""
    loaded = [load(path)[0] for path in FILES]
    assert sum(data["label"] == "good" for data in loaded) >= 20
    assert sum(data["label"] == "bad" for data in loaded) >= 20
    assert {data["law"] for data in loaded if data["label"] == "bad"} == {f"V{n}" for n in range(1, 13)}
    assert all(data["why"].endswith(".") for data in loaded)


@pytest.mark.parametrize("path", [p for p in FILES if p.stem.startswith("bad")], ids=lambda path: path.stem)
def test_witness_is_minimal(path: Path) -> None:
    """Catches: a witness that is legal, that broke another law, that is no part of the history, or that holds more than
    is needed: no cancel or ring-wide operation and no whole request can be left out without losing the fault."""
    _, history = load(path)
    found = check(history)
    assert found.witness is not None
    assert found.blocked in found.shown
    again = check(found.witness)
    assert (again.verdict, again.law) == (Verdict.INVALID, found.law)
    assert {history.operations[i].request for i in found.shown} == {o.request for o in found.witness.operations}
    least = found.witness.operations
    assert len(least) <= 5
    # A refusal for a slot's owner or its newest generation means nothing without them: those requests stay.
    others_matter = any(o.reason in ("SLOT_BUSY", "BAD_GENERATION") for o in least)
    for request in {o.request for o in least if o.request is not None and not others_matter}:
        rest = check(found.witness.with_operations(o for o in least if o.request != request))
        assert rest.verdict is not Verdict.INVALID or rest.law != found.law
    for i, o in enumerate(least):
        if o.kind in (Kind.CANCEL, Kind.LAPSE, Kind.DRAIN, Kind.STOP, Kind.EPOCH, Kind.QUIET):
            # Left out, or of unknown outcome: with one of them at least the fault is gone.
            without, unknown = [*least[:i], *least[i + 1 :]], list(least)
            unknown[i] = o if o.kind is Kind.QUIET else replace(o, returned=None)
            rests = [check(found.witness.with_operations(rest)) for rest in (without, unknown)]
            assert not all(r.verdict is Verdict.INVALID for r in rests) or rests[0].law != found.law


def test_long_beginning_is_left_out() -> None:
    """Catches: a witness that grows with the history: hundreds of operations shrink to the few that matter."""
    requests = tuple(Request(slot, generation, 8) for generation in range(1, 11) for slot in range(4))
    operations: list[Operation] = []
    for number in range(len(requests)):
        now = 100 * number
        operations.append(Operation(Kind.SUBMIT, 0, now, now + 1, number))
        operations += [Operation(Kind.TOKEN, 0, now + 2 * k + 2, now + 2 * k + 3, number, k) for k in range(8)]
        operations.append(Operation(Kind.FINISH, 0, now + 20, now + 21, number, 8, reason="LENGTH"))
    history = OperationHistory(requests, tuple(operations))
    assert check(history).verdict is Verdict.VALID
    lost = [o for o in operations if not (o.request == 30 and o.index == 6)]
    found = check(history.with_operations(lost))
    assert found.witness is not None
    assert [str(o) for o in found.witness.operations] == [
        "SUBMIT of request 30 at 3000..3001",
        "TOKEN index 0 to index 5 of request 30 at 3012..3013",
        "TOKEN index 7 of request 30 at 3016..3017",
    ]
    assert len(found.shown) == 8


def hard(count: int) -> OperationHistory:
    """Submissions of one slot, each beside every other, all refused for their generation but one: many orders."""
    requests = tuple(Request(0, generation + 1) for generation in range(count))
    operations = [Operation(Kind.SUBMIT, 10 + i, 0, 100, i) for i in range(count)]
    operations += [Operation(Kind.ERROR, 0, 200 + i, 200 + i, i, reason="BAD_GENERATION") for i in range(count)]
    return OperationHistory(requests, tuple(operations))


def test_bounded_effort_is_unknown() -> None:
    """Catches: a search that gives up and passes; one that goes on without end; a bound that decides nothing."""
    assert check(hard(12), budget=2_000).verdict is Verdict.UNKNOWN
    assert check(hard(3)).verdict is Verdict.INVALID
    _, good = load(FOLDER / "good-plain.json")
    assert check(good, budget=1).verdict is Verdict.UNKNOWN
    assert check(good).verdict is Verdict.VALID
    with pytest.raises(ValueError, match="budget is 0"):
        check(good, budget=0)


@pytest.mark.parametrize(("reason", "generation"), [("SLOT_BUSY", 3), ("BAD_GENERATION", 1)])
def test_a_submission_without_an_answer_may_be_what_another_was_refused_for(reason: str, generation: int) -> None:
    """Catches: a lost front end's submission that is left out though a refusal tells of it: a false alarm; one that is
    taken for made though it never was."""
    requests = (Request(0, 2), Request(0, generation))
    unheard = Operation(Kind.SUBMIT, 1, 1, None, 0)
    later = Operation(Kind.SUBMIT, 2, 2, 3, 1)
    refused = Operation(Kind.ERROR, 0, 4, 5, 1, reason=reason)
    assert check(OperationHistory(requests, (unheard, later, refused))).verdict is Verdict.VALID
    never = replace(unheard, failed=True, returned=2)
    assert check(OperationHistory(requests, (never, later, refused))).verdict is Verdict.INVALID


def test_nothing_is_unknown() -> None:
    """Catches: a pass on a history in which nothing happened."""
    assert check(OperationHistory((), ())).verdict is Verdict.UNKNOWN
    failed = Operation(Kind.SUBMIT, 1, 1, 2, 0, failed=True)
    assert check(OperationHistory((Request(0, 1),), (failed,))).verdict is Verdict.UNKNOWN


def test_memory_is_by_operations_and_state() -> None:
    """Catches: a search without memory: equal submissions in any order are one state, not n! orders."""
    requests = tuple(Request(slot, 1, 1) for slot in range(8))
    operations = [Operation(Kind.SUBMIT, 10 + i, 0, 100, i) for i in range(8)]
    operations.append(Operation(Kind.CANCEL, 40, 0, 100, 0))
    operations.append(Operation(Kind.FINISH, 0, 200, 201, 7, reason="EOS"))  # which nothing explains
    found = linearise(operations, requests, 20_000)
    assert found.verdict is Verdict.INVALID
    assert found.steps < 10_000  # there are 9! = 362,880 orders


R0 = Request(0, 1)
DAMAGED = {
    "unknown-request": ("has 1 requests", [Operation(Kind.SUBMIT, 0, 1, 2, 1)]),
    "no-request": ("names no request", [Operation(Kind.SUBMIT, 0, 1, 2)]),
    "ring-wide-request": ("names a request", [Operation(Kind.QUIET, 0, 1, 2, 0)]),
    "returned-too-early": ("returned before", [Operation(Kind.SUBMIT, 0, 2, 1, 0)]),
    "event-without-outcome": ("has an outcome", [Operation(Kind.TOKEN, 0, 1, None, 0)]),
    "failed-and-unknown": ("either failed or", [Operation(Kind.CANCEL, 0, 1, None, 0, failed=True)]),
    "count": ("count is 0", [Operation(Kind.TOKEN, 0, 1, 2, 0, count=0)]),
    "back-in-time": ("back in time", [Operation(Kind.SUBMIT, 0, 5, 6, 0), Operation(Kind.CANCEL, 0, 1, 2, 0)]),
    "two-pollers": ("polled by two", [Operation(Kind.TOKEN, p, 1, 4, 0, p) for p in (0, 1)]),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_history_is_refused(name: str) -> None:
    """Catches: a recorder's fault taken for the engine's, or passed over."""
    message, operations = DAMAGED[name]
    with pytest.raises(ValueError, match=message):
        OperationHistory((R0,), tuple(operations))


def test_requests_must_differ() -> None:
    """Catches: two requests of which nobody can say whose an event is."""
    with pytest.raises(ValueError, match="both slot 0 generation 1"):
        OperationHistory((R0, R0), ())
    OperationHistory((R0, Request(0, 1, epoch=1)), ())


def test_json_round_trip() -> None:
    """Catches: a field that a stored history loses; a file of another kind or version that is read all the same."""
    operations = (
        Operation(Kind.SUBMIT, 1, 1, None, 0),
        Operation(Kind.SUBMIT, 2, 1, 2, 1, failed=True),
        Operation(Kind.TOKEN, 0, 3, 4, 0, 0, count=3),
        Operation(Kind.ERROR, 0, 5, 6, 0, 3, reason="DEADLINE"),
        Operation(Kind.EPOCH, 0, 7, 8, index=2),
    )
    history = OperationHistory((Request(0, 1, 3, frozenset({"DEADLINE"})), Request(1, 2, None, epoch=2)), operations)
    assert OperationHistory.from_json(json.loads(dumps(history, label="good"))) == history
    for wrong in ({"version": 9}, {"format": "other"}, {"operations": [{"kind": "sing"}]}, {"requests": [{"x": 1}]}):
        with pytest.raises(ValueError):
            OperationHistory.from_json({**history.to_json(), **wrong})


# ---- the picture


def log_of(*rows: tuple[LogKind, int, int, int, int]) -> np.ndarray:
    """Entries (kind, slot, a, b, c) of ring 1, generation 1."""
    log = np.zeros(len(rows), LOG_ENTRY)
    for entry, (kind, slot, a, b, c) in zip(log, rows, strict=True):
        entry["kind"], entry["ring"], entry["slot"], entry["generation"] = kind, 1, slot, 1
        entry["a"], entry["b"], entry["c"] = a, b, c
    return log


LOG = log_of(
    (LogKind.PAGE_ALLOC, 0, 2, 0, 0),
    (LogKind.PAGE_ALLOC, 0, 3, 1, 0),
    (LogKind.PAGE_PUBLISH, 0, 2, 0, 0),
    (LogKind.PAGE_SHARE, 1, 2, 0, 2),
    (LogKind.PAGE_FREE, 0, 3, 1, 0),
    (LogKind.PAGE_UNSHARE, 0, 2, 1, 0),
    (LogKind.PAGE_UNQUARANTINE, 0, 3, 0, 0),
    (LogKind.PAGE_UNSHARE, 1, 2, 0, 0),
    (LogKind.PAGE_EVICT, 0, 2, 0, 0),
)


def test_pages_over_time() -> None:
    """Catches: a page shown with the wrong holder or for the wrong time; a use that never ends."""
    found = {(s.page, s.use, None if s.key is None else s.key[1], s.start, s.end) for s in spans(LOG)}
    assert found == {
        (2, Use.OWNED, 0, 0, 2),
        (2, Use.CACHED, None, 2, 8),
        (2, Use.HELD, 0, 2, 5),
        (2, Use.HELD, 1, 3, 7),
        (3, Use.OWNED, 0, 1, 4),
        (3, Use.QUARANTINED, None, 4, 6),
    }
    assert [(s.page, s.end) for s in spans(LOG[:1])] == [(2, 1)]


def test_picture(tmp_path: Path) -> None:
    """Catches: a picture that is no SVG, reaches outside itself, leaves out a request, the fault or the pages."""
    _, history = load(FOLDER / "bad-cancel-lost.json")
    decision = check(history)
    scene = draw(history, decision, title="a < b & c", pages=PageUse(spans(LOG), len(LOG), 1))
    text = to_svg(scene)
    root = ElementTree.fromstring(text)
    words = [e.text or "" for e in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "a < b & c" in words
    assert any(word.startswith("invalid: V9") for word in words)
    assert {"request 0  slot 0 gen 1", "request 1  slot 1 gen 1", "page 2", "page 3", "LENGTH 9"} <= set(words)
    assert "href" not in text
    assert "<script" not in text
    hints = [e.text or "" for e in root.iter("{http://www.w3.org/2000/svg}title")]
    assert sum(hint.startswith(("SUBMIT", "CANCEL", "TOKEN", "FINISH")) for hint in hints) == 9
    assert sum(hint.startswith("page ") for hint in hints) == 6
    red = [e for e in root.iter("{http://www.w3.org/2000/svg}rect") if e.get("fill") == "#d0021b"]
    assert len(red) == 1
    assert (red[0].find("{http://www.w3.org/2000/svg}title")) is not None
    write_png(scene, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_picture_of_a_large_history_is_bounded() -> None:
    """Catches: a picture that grows without limit, or drops the request that it is about."""
    requests = tuple(Request(slot, 1, 1) for slot in range(200))
    operations = [Operation(Kind.SUBMIT, 1, 2 * i, 2 * i + 1, i) for i in range(200)]
    operations.append(Operation(Kind.TOKEN, 0, 1000, 1001, 150, 4))
    history = OperationHistory(requests, tuple(operations))
    text = to_svg(draw(history, check(history)))
    assert "request 150  slot 150" in text
    assert "160 further requests are not shown" in text


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches: an exit status that hides an invalid or unreadable history; a picture that is not written."""
    good, bad = FOLDER / "good-plain.json", FOLDER / "bad-two-ends.json"
    assert main([str(good)]) == 0
    assert main([str(good), str(bad), "--out", str(tmp_path)]) == 1
    assert "bad-two-ends.json: invalid: V3: no legal order" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"good-plain.svg", "bad-two-ends.svg"}
    assert main([str(good), "--budget", "1"]) == 2
    (tmp_path / "x.json").write_text("{}")
    assert main([str(tmp_path / "x.json")]) == 2
