"""What tests hand to the report."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass

import numpy as np
import pytest

from blink_core.abi.config import EngineConfig
from verification.certificate.jsonable import bounded, jsonable
from verification.certificate.outcomes import PropertyViolation
from verification.certificate.recorder import MAX_SERIES_POINTS, Recorder
from verification.properties import service_order
from verification.result import CheckResult, Measurement, Verdict
from verification.suite.pressure import KvPressure


class Colour(enum.IntEnum):
    RED = 1


@dataclass
class Pair:
    left: int
    right: float


def test_jsonable_makes_strict_json_of_anything() -> None:
    """Catches: a NaN or a NumPy value that makes report.json unreadable, at the end of a long run."""
    value = {
        "array": np.arange(3, dtype=np.int64),
        "nan": np.float32("nan"),
        "inf": float("-inf"),
        "bytes": b"\x01\xff",
        "enum": Colour.RED,
        "pair": Pair(1, float("inf")),
        "set": {2, 1},
        3: (True, None),
        "odd": object,
    }
    text = json.dumps(jsonable(value), allow_nan=False)
    read = json.loads(text)
    assert read["array"] == [0, 1, 2]
    assert (read["nan"], read["inf"], read["bytes"], read["enum"]) == ("nan", "-inf", "01ff", "RED")
    assert read["pair"] == {"left": 1, "right": "inf"}
    assert (read["set"], read["3"]) == ([1, 2], [True, None])


def test_large_witness_is_cut_and_says_so() -> None:
    """Catches: a witness that makes the report unusable, or one that is cut without a word."""
    cut = bounded({"x": "y" * 100}, limit=50)
    assert cut["truncated"] is True
    assert cut["bytes"] == 109
    assert len(cut["head"]) == 50


def test_check_records_measurements_and_witness_then_raises() -> None:
    """Catches: measurements of a failed check that never reach the report."""
    recorder = Recorder()
    result = CheckResult(
        Verdict.INVALID, "kv-content", "C3", "row 9", {"row": 9}, {"ratio": Measurement(30.5, "x", 8.0, 512)}
    )
    with pytest.raises(PropertyViolation):
        recorder.check(result)
    values = recorder.as_dict()
    assert values["measurements"] == {"ratio": {"value": 30.5, "unit": "x", "limit": 8.0, "limit_is": "max", "n": 512}}
    assert (values["clause"], values["witness"], values["cases"]) == ("C3", {"row": 9}, 0)


def test_valid_checks_give_clauses_and_no_witness() -> None:
    """Catches: a witness of a check that held, shown as if something were wrong."""
    recorder = Recorder()
    for clause in ("C1", "C2", "C1"):
        recorder.check(CheckResult(Verdict.VALID, "kv-content", clause, "equal", {"rows": 3}))
    values = recorder.as_dict()
    assert (values["clause"], values["witness"], values["cases"]) == ("C1; C2", None, 0)


def test_only_counted_programs_are_cases() -> None:
    """Catches: several checks of one program counted as independent draws, which makes the bounds too narrow."""
    recorder = Recorder()
    for _ in range(2):
        recorder.cases()
        for _ in range(5):
            recorder.check(CheckResult(Verdict.VALID, "kv-content", "C1", "equal"))
    assert recorder.as_dict()["cases"] == 2


def test_repeated_measurement_keeps_the_value_nearest_its_limit() -> None:
    """Catches: the worst of many checks overwritten by the last; a least value taken for an exceeded limit."""
    recorder = Recorder()
    for ratio, rows in ((2.0, 400), (7.5, 120), (3.0, 900)):
        measured = {"ratio": Measurement(ratio, "x", 8.0, 10), "rows": Measurement(rows, "rows", 100, limit_is="min")}
        recorder.check(CheckResult(Verdict.VALID, "kv-content", "C1", "equal", {}, measured))
    values = recorder.as_dict()["measurements"]
    assert (values["ratio"]["value"], values["ratio"]["limit_is"]) == (7.5, "max")
    assert (values["rows"]["value"], values["rows"]["limit_is"]) == (120, "min")


@pytest.mark.parametrize("verdict", list(Verdict))
def test_sense_of_a_limit_is_the_measurements_own(verdict: Verdict) -> None:
    """Catches: a value at its least limit, or below it in a check that failed, told as one held to a greatest value."""
    recorder = Recorder()
    measured = {"once": Measurement(1, "times", 1, limit_is="min"), "never": Measurement(0, "times", 1, None, "min")}
    recorder.take(CheckResult(verdict, "kv-content", "C1", "counted", {}, measured))
    told = recorder.as_dict()["measurements"]
    assert [told[name]["limit_is"] for name in measured] == ["min", "min"]


def test_least_numbers_of_the_suite_are_declared_as_least() -> None:
    """Catches: what must have happened at least once, told in the report as what may happen once at most."""
    pressure = KvPressure(EngineConfig(vocab=8))
    pressure.counts = dict.fromkeys(pressure.counts, 1)
    contested = service_order.check_contested([], 3)
    for name, measurement in (pressure.check("p").measurements | contested.measurements).items():
        assert measurement.limit_is == "min", name


def test_long_series_is_thinned_and_counts_its_points() -> None:
    """Catches: a report of hundreds of megabytes, or a thinned series that hides its true length."""
    recorder = Recorder()
    recorder.series("pages", range(10 * MAX_SERIES_POINTS + 1), range(10 * MAX_SERIES_POINTS + 1), "pages")
    (series,) = recorder.as_dict()["series"]
    assert len(series["x"]) == len(series["y"]) <= MAX_SERIES_POINTS
    assert series["points"] == 10 * MAX_SERIES_POINTS + 1


def test_situation_once_reached_stays_reached() -> None:
    """Catches: a situation reached in one example and reported as not reached because the next did not."""
    recorder = Recorder()
    for reached in (False, True, False):
        recorder.situation("preemption", reached)
    assert recorder.as_dict()["situations"] == {"preemption": True}


def test_bad_records_are_refused_with_their_values() -> None:
    """Catches: nonsense in the report instead of an error in the test that made it."""
    recorder = Recorder()
    with pytest.raises(ValueError, match="2 x values for 3 y values"):
        recorder.series("s", [1, 2], [1, 2, 3])
    with pytest.raises(ValueError, match="3 caught of 2 planted"):
        recorder.planted_fault("f", caught=3, planted=2)
    with pytest.raises(ValueError, match="-1"):
        recorder.measure("m", 1.0, n=-1)
    with pytest.raises(ValueError, match="pie"):
        recorder.series("s", [], [], kind="pie")  # type: ignore[arg-type]
