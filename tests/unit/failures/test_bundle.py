"""Bundles: nothing secret, nothing too large, everything joined."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from blink_core.abi.enums import LogKind
from tests.unit.failures import material as made
from verification.failures import triage
from verification.failures.bundle import Material, write
from verification.failures.engine_log import LOG_FIELDS, decode, key_of, select
from verification.failures.evidence import failing_keys
from verification.failures.limits import BUNDLE_BYTES, SHARES
from verification.failures.redact import Redactor
from verification.program import Program
from verification.result import CheckResult, Verdict

SECRETS = [str(token) for ids in (*made.PROMPTS, made.OUTPUT, made.STOPS) for token in ids]
SECRETS += [str(made.LOGPROB_BITS)]
SECRETS += [made.SECRET, made.SECRET.encode("ascii", "backslashreplace").decode(), "swordfish"]


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]


def bundle(folder: Path, given: Material | None = None, *, show: bool = False, limit: int = BUNDLE_BYTES) -> Any:
    redactor = Redactor(show=show)
    given = given or made.material()
    result = given.runs[-1].result
    assert result is not None
    redactor.learn(given.texts)
    given.facts |= {"message": redactor.text(result.message), "witness": redactor.value(result.witness)}
    return write(folder, given, redactor, limit)


def test_no_prompt_and_no_token_is_in_a_bundle(tmp_path: Path) -> None:
    """Catches: a prompt, a stop id, a generated token or a text of a user in any file of a bundle, in any form."""
    bundle(tmp_path / "b")
    text = made.everything(tmp_path / "b")
    assert [secret for secret in SECRETS if secret in text] == []
    # What is needed to understand the failure is still there.
    failure = json.loads((tmp_path / "b" / "failure.json").read_text())
    assert failure["message"].startswith("request 1 got token <n> at index 0 where <n> was next")
    assert failure["witness"]["event"]["slot"] == 2
    assert failure["witness"]["prompt"]["tokens"] == len(made.PROMPTS[1])
    program = json.loads((tmp_path / "b" / "program-0.json").read_text())
    assert [request["prompt"]["tokens"] for request in program["requests"]] == [3, 2]
    assert program["requests"][0]["params"]["max_tokens"] == 8


def test_prompts_are_there_when_asked_for(tmp_path: Path) -> None:
    """Catches: a bundle that stays blind although prompts were asked for; a program that no longer replays."""
    facts = bundle(tmp_path / "b", show=True)
    assert facts["prompts_included"] is True
    program = Program.from_json(json.loads((tmp_path / "b" / "program-0.json").read_text()))
    assert program == made.run().history.program
    assert all(secret in made.everything(tmp_path / "b") for secret in (SECRETS[0], str(made.OUTPUT[1]), "swordfish"))


def test_picture_of_the_failing_run(tmp_path: Path) -> None:
    """Catches: a bundle without the picture of its history, or one that does not show what is wrong."""
    facts = bundle(tmp_path / "b")
    text = (tmp_path / "b" / "history.svg").read_text(encoding="utf-8")
    assert "invalid: V2: no legal order: TOKEN index 0 of request 1" in text
    assert facts["files"]["history.svg"]["truncated"] is None


def test_digests_join_within_a_run_and_not_beyond(tmp_path: Path) -> None:
    """Catches: digests without a salt, which a list of words undoes; digests that do not tell equal from unequal."""
    one, other = Redactor(), Redactor()
    assert one.tokens([1, 2]) == one.tokens([1, 2]) != one.tokens([1, 3])
    assert one.tokens([1, 2])["digest"] != other.tokens([1, 2])["digest"]


@pytest.mark.parametrize(
    "text",
    [
        "got 1712345671",
        "token 1712345671 at index 4",
        "ids (1712345671,) and [1712345671, 5]",
        "{'prompt': [1712345671]}",
        "id=1712345671.",
        "said \"zzsecret\", then b'zzsecret'",
        "input_value='zzsecret', input_type=str",
        "known zzsecret bare",
    ],
)
def test_free_text_gives_nothing_away(text: str) -> None:
    """Catches: a shape of message in which ids or texts get through."""
    redactor = Redactor()
    redactor.learn(["zzsecret"])
    shown = redactor.text(text)
    assert "1712345671" not in shown
    assert "zzsecret" not in shown


@pytest.mark.parametrize("name", ["reason", "state", "kind", "clause", "property", "fault", "verdict"])
def test_one_word_under_a_name_is_withheld(name: str) -> None:
    """Catches: what a model answered in one word, kept because it stands under a name that the engine uses as well."""
    assert "Paris" not in str(Redactor().value({name: "Paris", "list": [{name: ["Paris"]}]}))


def test_words_of_the_engine_are_kept() -> None:
    """Catches: a redaction so broad that a witness tells nothing."""
    known = {"kind": "TOKEN", "reason": "MODEL_ERROR", "state": "DRAINING", "verdict": "invalid"}
    known |= {"clause": "goodput", "property": "kv-content", "fault": "engine-kill"}
    assert Redactor().value(known) == known


def test_free_text_keeps_places() -> None:
    """Catches: a redaction so broad that a message tells nothing."""
    text = "2026-01-01 10:00:00,123 INFO blink.engine: slot 3 generation 4: page 17 leaked after 12 steps\n"
    text += "RMS 1.25e-3 above 8.5, exited with status -11"
    redactor = Redactor()
    redactor.learn([" leak", "the", "after"])  # stop strings of a request
    assert redactor.text(text) == text


def test_every_kind_of_the_log_is_classified() -> None:
    """Catches: a new kind of log entry whose fields nobody has said to be free of tokens."""
    assert set(LOG_FIELDS) == {kind.name for kind in LogKind}


def test_entries_of_a_ring_name_no_request() -> None:
    """Catches: a lease or an epoch of ring 1 taken for something that happened to its slot 0, generation 0."""
    log = made.log_of([(LogKind.LEASE, 7, 1, 0, 0, 1, 3, 0), (LogKind.CLOCK, 7, 0, 0, 0, 5, 0, 0)])
    lease, clock = (decode(n, entry, Redactor()) for n, entry in enumerate(log))
    assert (lease["ring"], lease["ended_requests"], clock["us_low"]) == (1, 3, 5)
    assert [key_of(entry) for entry in log] == [None, None]
    assert not {"slot", "generation"} & {*lease, *clock}


def test_unknown_kind_shows_no_numbers() -> None:
    """Catches: tokens shown because an engine of a later version logs them under a new kind."""
    log = made.log_of([(99, 1, 1, 2, 3, 1712345671, 1712345672, 0)])  # type: ignore[list-item]
    shown = decode(0, log[0], Redactor())
    assert "17123456" not in json.dumps(shown)
    assert shown["kind"] == "99 (no LogKind)"


def test_timeline_joins_all_sources_by_request(tmp_path: Path) -> None:
    """Catches: a source left out of the timeline, events out of order, rows that do not say whose they are."""
    bundle(tmp_path / "b")
    rows = lines(tmp_path / "b", "timeline.jsonl")
    mine = [r for r in rows if r.get("request") == 1]
    assert all(r["failing"] for r in mine)
    told = [(r["source"], r.get("what") or r.get("kind")) for r in mine]
    assert told == [
        ("ring", "SUBMIT"),
        ("engine-log", "ACCEPT"),
        ("engine-log", "TOKEN"),
        ("ring", "event LOGPROBS"),
        ("ring", "event TOKEN"),
        ("ring", "event TOKEN"),
    ]
    http = [r for r in rows if r.get("http_request") == made.HTTP_ID]
    assert [r["source"] for r in http] == ["http", "engine-log", "frontend.log", "frontend.log"]
    assert {(r["ring"], r["slot"], r["generation"]) for r in http} == {(0, made.HTTP_SLOT, made.HTTP_GENERATION)}
    cancelled = [r.get("what") or r.get("kind") for r in rows if r.get("request") == 0]
    assert cancelled[-4:] == ["CANCEL", "CANCEL", "FINISH", "event FINISH"]
    assert [r["n"] for r in rows] == sorted(r["n"] for r in rows)
    text = (tmp_path / "b" / "timeline.txt").read_text()
    assert "replay: pytest test_fifo.py::test_fifo" in text
    assert "Requests of the failure: ring 1 slot 2 generation 4" in text


@pytest.mark.parametrize("limit", [40_000, 200_000])
def test_size_limit_holds_and_the_failing_request_is_kept(tmp_path: Path, limit: int) -> None:
    """Catches: a bundle that fills the disk; truncation without a word; the failing request among what is cut."""
    given = made.material(extra=50_000)
    given.engine.logs["frontend"] += "\n2026-01-01 10:00:04,000 INFO blink.frontend: a line" * 20_000  # type: ignore[union-attr]
    given.runs[0].history.events += [dict(given.runs[0].history.events[0]) for _ in range(20_000)]
    given.facts["traceback"] = ["x" * 1000] * 200
    facts = bundle(tmp_path / "b", given, limit=limit)
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "b").iterdir()}
    assert sum(sizes.values()) <= limit
    truncated = {name for name, entry in facts["files"].items() if entry["truncated"]}
    assert {"engine-log.jsonl", "history-0.jsonl", "frontend.log", "timeline.jsonl"} <= truncated
    assert any("left_out" in row for row in lines(tmp_path / "b", "timeline.jsonl"))
    kept = [row for row in lines(tmp_path / "b", "engine-log.jsonl") if row.get("slot") == 2]
    assert [row["kind"] for row in kept] == ["ACCEPT", "TOKEN"]
    assert any(row.get("what") == "END" for row in lines(tmp_path / "b", "history-0.jsonl"))
    assert triage.read(tmp_path / "b" / "failure.json")["signature"] == given.facts["signature"]


def test_shares_fit_into_the_limit() -> None:
    """Catches: shares that add up to more than the limit."""
    assert sum(SHARES.values()) <= 1


def test_bundle_satisfies_its_schema(tmp_path: Path) -> None:
    """Catches: a bundle that `blink triage` would refuse."""
    bundle(tmp_path / "b")
    found = triage.read(tmp_path / "b" / "failure.json")
    assert found["failing_requests"] == [{"ring": 1, "slot": 2, "generation": 4}]
    with pytest.raises(jsonschema.ValidationError):
        triage._validator().validate({**found, "signature": "none"})


def test_selection_prefers_the_failing_request() -> None:
    """Catches: a window that ends before the failing request's first entry when the log is long."""
    log = made.log_of([(LogKind.PLAN_ROW, n, 1, n % 7, 1, 0, 0, 0) for n in range(10_000)])
    chosen = select(log, [(1, 3, 1)], 16, 2000)
    own = np.flatnonzero(log["slot"] == 3)
    assert np.isin(own, chosen).all()
    assert len(chosen) == 2000
    assert (np.diff(chosen) > 0).all()


def test_request_numbers_of_raw_memory_are_engine_indexes() -> None:
    """Catches: a request of the program blamed for what raw memory says of another."""
    one = made.run(CheckResult(Verdict.INVALID, "kv-conservation", "owner", "request 13 runs twice", {}))
    assert failing_keys(one, made.engine(), []) == [(1, 5, 0)]
    assert failing_keys(None, made.engine(), made.material().exchanges) == [(0, made.HTTP_SLOT, made.HTTP_GENERATION)]


def test_fault_scenario_is_bundled_without_its_prompts(tmp_path: Path) -> None:
    """Catches: a failed fault of which the bundle does not say what was drawn and seen; a prompt or an answer in it."""
    given = made.material()
    victim = {"prompt": list(made.PROMPTS[0]), "max_tokens": 4, "seed": 9}
    calls = {"http-0": ["finished", "length", [made.SECRET]], "ring-0": ["error", "ENGINE_DEAD", list(made.OUTPUT)]}
    given.scenario = {"plan": {"fault": "engine-kill", "victims": [victim]}, "observed": {"calls": calls}}
    bundle(tmp_path / "b", given)
    shown = json.loads((tmp_path / "b" / "scenario.json").read_text())
    assert shown["plan"]["fault"] == "engine-kill"
    assert shown["plan"]["victims"][0]["prompt"]["tokens"] == 3
    assert shown["plan"]["victims"][0]["max_tokens"] == 4
    assert shown["observed"]["calls"]["ring-0"][:2] == ["error", "ENGINE_DEAD"]
    text = made.everything(tmp_path / "b")
    assert [secret for secret in SECRETS if secret in text] == []


def test_dead_engine_without_memory_still_makes_a_bundle(tmp_path: Path) -> None:
    """Catches: a crash bundle that needs what the crash took away."""
    given = made.material()
    assert given.engine is not None
    given.engine.state, given.engine.boundary = None, False
    given.engine.died = f"engine exited with status -11\nFatal Python error: Segmentation fault\n{made.SECRET!r}"
    facts = bundle(tmp_path / "b", given)
    assert facts["engine"]["died"].startswith("engine exited with status -11\nFatal Python error")
    assert lines(tmp_path / "b", "timeline.jsonl")[-1]["what"] == "died"
    assert "swordfish" not in made.everything(tmp_path / "b")


def test_first_violated_clause_is_named(tmp_path: Path) -> None:
    """Catches: a log that violates a clause, in a bundle that does not say so, or only where nobody reads it."""
    material = made.material()
    assert material.engine is not None
    material.engine.log_verdict = {
        "word": "violated",
        "clause": "K4",
        "entry": 7,
        "step": 3,
        "way": "value a of the entry",
    }
    facts = bundle(tmp_path / "b", material)
    assert facts["engine"]["log_verdict"]["clause"] == "K4"
    text = (tmp_path / "b" / "timeline.txt").read_text()
    assert "event log: clause K4 at entry 7, step 3: value a of the entry" in text
