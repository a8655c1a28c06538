"""The checkers of the KV sanitizer and of schedules, on what they must accept and refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from blink_core.abi.dtypes import LOG_ENTRY
from blink_core.abi.enums import ErrorReason, EventKind, FinishReason, LogKind
from blink_core.abi.params import SamplingParams
from blink_core.runtime.descriptor import KV_COUNTERS
from blink_core.runtime.kv_report import Mismatch
from verification.faults.wrong_plans import FAULTS
from verification.history import History, Submitted
from verification.program import Program, RequestSpec
from verification.properties.kv_sanitizer import (
    KINDS,
    check_alone,
    check_named,
    check_poison,
    check_quiet,
    fault_found,
)
from verification.properties.kv_schedules import check_marks, marks
from verification.suite.pressure import chunks_inside_page

ZERO = dict.fromkeys(KV_COUNTERS, 0)
READER, WRITER = (1, 2, 3), (1, 4, 5)


def party(who: tuple[int, int, int], position: int, step: int) -> dict[str, int]:
    return dict(zip(("ring", "slot", "generation", "position", "step"), (*who, position, step), strict=True))


def report(**changes: Any) -> dict[str, Any]:
    made = {
        "kind": "foreign", "step": 9, "layer": 0, "kv": "k", "page": 7, "offset": 0, "table_index": 1,
        "reader": party(READER, 16, 9), "writer": party(WRITER, 16, 4), "same_tokens": False, "page_state": "FREE",
        "page_owner": None,
    }  # fmt: skip
    return made | changes


def planted(**changes: Any) -> dict[str, Any]:
    made = {"fault": "freed-page", "step": 9, "reader": list(READER), "page": 7, "position": 16, "writer": list(WRITER)}
    return made | changes


def test_every_fault_has_kinds_and_every_kind_a_fault() -> None:
    """Catches: a planted fault that any report satisfies, a kind that no fault can show."""
    assert set(KINDS) == set(FAULTS)
    assert set().union(*KINDS.values()) <= {kind.value for kind in Mismatch}
    assert all(KINDS.values())


def test_quiet() -> None:
    """Catches: a report that is passed over, and a sanitizer that checked nothing taken for one that found nothing."""
    done = ZERO | {"rows": 5, "steps": 2}
    assert check_quiet(ZERO, done, []).ok()
    assert str(check_quiet(ZERO, done, [report()]).verdict) == "invalid"
    assert str(check_quiet(ZERO, done | {"reports": 1}, []).verdict) == "invalid"
    assert str(check_quiet(done, done, []).verdict) == "unknown"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"kind": "position"}, "called position"),
        ({"step": 10}, "in step 10"),
        ({"page": 8}, "of page 8"),
        ({"reader": party(READER, 17, 9)}, "at position 17"),
        ({"writer": None}, "written by None"),
        ({"writer": party(READER, 16, 4)}, "written by"),
        ({"reader": party(WRITER, 16, 9)}, "not reported"),
    ],
)
def test_report_that_differs_is_refused(changes: dict[str, Any], why: str) -> None:
    """Catches: a self-test that is content with any report, whoever, wherever and whatever it names."""
    assert fault_found(planted(), [report()]) is None
    found = fault_found(planted(), [report(**changes)])
    assert found is not None
    assert why in found
    assert str(check_named([planted()], [report(**changes)]).verdict) == "invalid"


def test_page_owner_and_missing_writer() -> None:
    """Catches: an owner of the page that is not compared; a row said to be written although nobody is named."""
    taken = planted(fault="given-away", page_owner=[1, 6, 7])
    assert fault_found(taken, [report(kind="taken", page_owner=[1, 6, 7])]) is None
    assert fault_found(taken, [report(kind="taken", page_owner=[1, 6, 8])]) is not None
    lost = {k: v for k, v in planted(fault="lost-append").items() if k != "writer"}
    assert fault_found(lost, [report(kind="unwritten", writer=None)]) is None
    assert fault_found(lost, [report(kind="foreign", writer=None)]) is not None
    assert fault_found(lost, [report(kind="unwritten")]) is not None


def test_fault_that_was_never_planted_is_unknown() -> None:
    """Catches: a self-test that passes because nothing was planted."""
    assert str(check_named([], []).verdict) == "unknown"
    assert "never planted" in check_named([planted()], [report()]).message


def history(*ends: tuple[EventKind, int]) -> History:
    specs = tuple(RequestSpec((1, 2), SamplingParams(2)) for _ in ends)
    made = History(Program(specs), ring=1)
    for at, (kind, reason) in enumerate(ends):
        made.submitted.append(Submitted(at, 2 + 2 * at, 3 + 2 * at, at))
        made.events.append({"slot": 2 + 2 * at, "generation": 3 + 2 * at, "kind": kind, "reason": reason})
    return made


def test_alone() -> None:
    """Catches: a bystander that is reported or broken off, a victim that finishes or ends for another reason."""
    broken, fine = (EventKind.ERROR, int(ErrorReason.MODEL_ERROR)), (EventKind.FINISH, int(FinishReason.LENGTH))
    assert check_alone(history(broken, fine), [planted()], [report()]).ok()
    assert not check_alone(history(broken, fine), [planted()], [report(), report(reader=party(WRITER, 0, 9))]).ok()
    assert not check_alone(history(broken, broken), [planted()], [report()]).ok()
    assert not check_alone(history(fine, fine), [planted()], [report()]).ok()
    other = (EventKind.ERROR, int(ErrorReason.NAN_LOGITS))
    assert not check_alone(history(other, fine), [planted()], [report()]).ok()


def test_poison() -> None:
    """Catches: a pool that starts from zeros; a run that wrote nothing taken for evidence."""
    every, three = np.ones(4, bool), np.array([True, False, True, True])
    assert check_poison(every, every, fresh=True).ok()
    assert str(check_poison(three, every, fresh=True).verdict) == "invalid"
    assert check_poison(three, np.array([True, False, False, True]), fresh=False).ok()
    assert str(check_poison(every, three, fresh=False).verdict) == "unknown"


def log(*entries: tuple[int, LogKind, int, int, int]) -> Any:
    """Entries (step, kind, slot, a, b) of ring 1; the generation is the slot plus 1."""
    made = np.zeros(len(entries), LOG_ENTRY)
    for row, (step, kind, slot, a, b) in zip(made, entries, strict=True):
        row["step"], row["kind"], row["ring"], row["slot"], row["generation"] = step, kind, 1, slot, slot + 1
        row["a"], row["b"] = a, b
    return made


ROW = LogKind.PLAN_ROW


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        (((1, ROW, 0, 6, 6),), set()),
        (((1, ROW, 0, 6, 6), (2, ROW, 0, 6, 12)), {"odd-chunk"}),
        (((1, ROW, 0, 4, 4), (2, ROW, 0, 4, 8)), set()),
        (((1, ROW, 0, 6, 6), (2, ROW, 0, 1, 7)), set()),
        (((1, ROW, 0, 6, 6), (2, ROW, 0, 1, 7), (3, ROW, 0, 2, 9)), set()),
        (((1, ROW, 0, 1, 5), (2, ROW, 0, 1, 6)), set()),
        (((1, ROW, 0, 6, 6), (2, LogKind.PREEMPT, 0, 0, 6)), set()),
        (((1, ROW, 0, 6, 6), (2, LogKind.PREEMPT, 0, 0, 6), (3, ROW, 0, 4, 4)), {"preempted"}),
        (((1, LogKind.PREFIX_HIT, 0, 1, 4), (1, ROW, 0, 4, 8)), {"prefix-hit"}),
        (((1, LogKind.PREFIX_HIT, 0, 0, 0), (1, ROW, 0, 4, 8)), set()),
    ],
)
def test_marks_of_one_request(entries: Any, expected: set[str]) -> None:
    """Catches: a schedule said to be hard that was not, and a hard one that goes unnoticed."""
    assert marks(log(*entries), 4).get((1, 0, 1), frozenset()) == expected


def test_chunks_inside_a_page() -> None:
    """Catches: a prompt that ends inside a page, then decoded, taken for a chunk that is no multiple of a page."""
    assert chunks_inside_page(log((1, ROW, 0, 6, 6), (2, ROW, 0, 1, 7)), 4) == 0
    assert chunks_inside_page(log((1, ROW, 0, 4, 4), (2, ROW, 0, 3, 7)), 4) == 0
    assert chunks_inside_page(log((1, ROW, 0, 6, 6), (1, ROW, 1, 2, 2), (2, ROW, 0, 3, 9), (2, ROW, 1, 1, 3)), 4) == 1
    assert chunks_inside_page(log((1, ROW, 0, 6, 6), (2, LogKind.PREEMPT, 0, 0, 6), (3, ROW, 0, 6, 6)), 4) == 0


def test_mark_of_a_cancelled_neighbour() -> None:
    """Catches: a cancel of a request that never shared a step, or after which the neighbour did not go on."""
    together = ((1, ROW, 0, 1, 5), (1, ROW, 1, 1, 9))
    cancel = (1, LogKind.FINISH, 1, int(FinishReason.CANCELLED), 0)
    on = (2, ROW, 0, 1, 6)
    key = (1, 0, 1)
    assert marks(log(*together, cancel, on), 4)[key] == {"cancel"}
    assert key not in marks(log(*together, cancel), 4)
    assert key not in marks(log(*together, (1, LogKind.FINISH, 1, int(FinishReason.LENGTH), 0), on), 4)
    assert key not in marks(log((1, ROW, 0, 1, 5), (2, ROW, 1, 1, 9), cancel, (3, ROW, 0, 1, 6)), 4)


def test_missing_marks_are_unknown() -> None:
    """Catches: a comparison that passes although no compared row had been through anything."""
    seen = [frozenset({"preempted"}), frozenset({"cancel", "odd-chunk"})]
    assert check_marks(seen, ("preempted", "cancel"), "kv-content").ok()
    result = check_marks(seen, ("preempted", "prefix-hit"), "kv-content")
    assert (str(result.verdict), result.measurements["compared after prefix-hit"].value) == ("unknown", 0)
    assert not check_marks([], ("preempted",), "kv-content").ok()
