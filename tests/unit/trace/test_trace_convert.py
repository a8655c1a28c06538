"""`blink trace convert`: JSON lines and Chrome's trace events."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest

from blink_core.abi.enums import LogKind
from tests.unit.trace.mutations import places
from tests.unit.trace.runs import drawn
from verification.trace.convert import jsonl, perfetto

SEEDS = range(12)


def events(seed: int) -> list[dict[str, Any]]:
    made = json.loads(json.dumps(perfetto(drawn(seed))))
    assert set(made) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert made["displayTimeUnit"] in ("ms", "ns")
    found: list[dict[str, Any]] = made["traceEvents"]
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_events_are_of_the_documented_format(seed: int) -> None:
    """Catches: an event that Perfetto drops: a phase, a time, a scope or an argument not of the format."""
    for event in events(seed):
        assert isinstance(event["name"], str)
        assert event["name"]
        assert isinstance(event["ts"], int)
        assert event["ts"] >= 0
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ph"] in "XCiM"
        if event["ph"] == "X":
            assert isinstance(event["dur"], int)
            assert event["dur"] >= 0
        elif event["ph"] == "i":
            assert event["s"] in ("g", "p", "t")
        elif event["ph"] == "C":
            assert event["args"]
            assert all(isinstance(value, int) for value in event["args"].values())
        else:
            assert event["name"] in ("process_name", "thread_name")
            assert set(event["args"]) == {"name"}


@pytest.mark.parametrize("seed", SEEDS)
def test_slices_of_a_track_nest(seed: int) -> None:
    """Catches: a request's states that stick out of its life, which Perfetto draws on a wrong line."""
    tracks = defaultdict(list)
    for event in events(seed):
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for slices in tracks.values():
        for one in slices:
            for two in slices:
                assert not one[0] < two[0] < one[1] < two[1]


@pytest.mark.parametrize("seed", SEEDS)
def test_every_request_and_step_is_drawn(seed: int) -> None:
    """Catches: a request, a step or a page that the picture leaves out."""
    log, made = drawn(seed).entries, events(seed)
    names = [event["name"] for event in made if event["ph"] == "X"]
    assert sum(name.startswith("request g") for name in names) == len(places(log, LogKind.ACCEPT))
    assert sum(name.startswith("step ") for name in names) == len(places(log, LogKind.STEP))
    assert names.count("preempted") == len(places(log, LogKind.PREEMPT))
    total = drawn(seed).header.config.pages - 2
    pages = [event["args"] for event in made if event["ph"] == "C" and event["name"] == "pages"]
    assert all(sum(counts.values()) == total and min(counts.values()) >= 0 for counts in pages)


def test_lines_hold_every_entry_and_no_content() -> None:
    """Catches: token ids in a file that is passed on, or entries that are left out."""
    trace = drawn(0)
    lines = [json.loads(line) for line in jsonl(trace)]
    assert [line["log"] for line in lines[1:-1]] == list(range(len(trace.entries)))
    assert set(lines[0]) == {"header"}
    assert set(lines[-1]) == {"end", "problem"}
    assert not any("token" in line or "logprob_bits" in line for line in lines[1:-1])
    shown = [json.loads(line) for line in jsonl(trace, content=True)][1:-1]
    tokens = places(trace.entries, LogKind.TOKEN)
    assert [shown[i]["token"] for i in tokens] == [trace.entries[i][6] for i in tokens]


def test_lines_show_the_clock() -> None:
    """Catches: entries whose time is that of another call."""
    trace = drawn(0)
    clock = 0
    for entry, line in zip(trace.entries, list(jsonl(trace))[1:-1], strict=True):
        if entry[1] == LogKind.CLOCK:
            clock = entry[5] | entry[6] << 32
        assert json.loads(line)["clock_us"] == clock
