"""`blink trace record` on live engines, and the command line."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hil_rigs.description import load_rig
from hil_rigs.local import LocalOptions, LocalRig
from tests.unit.trace.mutations import MUTATIONS
from tests.unit.trace.runs import drawn, with_log
from verification.drivers.ring import run_program
from verification.program import draw_program
from verification.serving import COMMON_SIZES, TINY_SIZES, shape_of
from verification.trace.cli import trace_app
from verification.trace.format import Header, read, write
from verification.trace.live import following
from verification.trace.monitor import UNKNOWN, VALID, check
from verification.trace.record import Recorder
from verification.trace.replay import replay


def engine(**fields: int) -> LocalRig:
    options = LocalOptions(engine=COMMON_SIZES | TINY_SIZES | {"lease_us": 0} | fields)
    return LocalRig(load_rig("local"), None, http=False, options=options)


@pytest.fixture(scope="module")
def rig() -> Iterator[LocalRig]:
    with engine() as made:
        yield made


def programs(rig: LocalRig, count: int, recorder: Recorder | None = None, *, seed: int = 3) -> None:
    """Runs `count` programs. recorder: who has seen each before the next begins: it copies a descriptor from its slot,
    which a later program uses again, and a program has fewer requests than there are slots."""
    client, rng = rig.ring(1), random.Random(seed)
    for _ in range(count):
        assert run_program(client, draw_program(rng, shape_of(rig, (3, 10), 24))).complete
        if recorder is not None:
            recorder.settle()


def record(rig: LocalRig, path: Path, count: int = 3, **options: Any) -> Recorder:
    header = Header(rig.memory.config, "live", payloads=options.pop("payloads", False))
    with Recorder(rig.memory, path, header, **options) as recorder:
        programs(rig, count, recorder)
    return recorder


def test_recorded_run_of_a_live_engine_is_valid_and_replays(rig: LocalRig, tmp_path: Path) -> None:
    """Catches: a recorder that loses entries or descriptors of a running engine, or a loop that breaks a clause."""
    recorder = record(rig, tmp_path / "a.trace", payloads=True, snapshot_every_s=0.02)
    assert (recorder.problem, recorder.warning, recorder.submissions_missed) == (None, None, 0)
    trace = read(tmp_path / "a.trace")
    verdict = check(trace)
    assert verdict.word == VALID, str(verdict)
    assert verdict.checked == len(trace.entries) > 300
    assert trace.snapshots
    done = replay(trace)
    assert (done.same, done.whole) == (True, True), done.message


def test_recording_may_begin_late_while_the_log_holds_all(rig: LocalRig, tmp_path: Path) -> None:
    """Catches: a recorder that begins with what comes after it has attached."""
    programs(rig, 1)
    with Recorder(rig.memory, tmp_path / "a.trace", Header(rig.memory.config, "live")):
        pass
    trace = read(tmp_path / "a.trace")
    assert trace.first == 0
    assert check(trace).word in (VALID, UNKNOWN)


def test_engine_that_is_followed_can_be_judged_while_it_runs(tmp_path: Path) -> None:
    """Catches: a failure's bundle without the clause that the log violates, or with one although it violates none."""
    with engine() as rig, following(rig.memory) as live:
        programs(rig, 2, live.recorder)
        first = rig.memory.log_tail()
        good = live.facts()
        last = rig.memory.log_tail()  # the engine goes on: it takes the credits of what was read last
        assert (good["word"], good["clause"], good["reasons"]) == (VALID, "", [])
        assert first <= good["checked"] == good["total"] <= last
        trace = read(live.path)
        write(tmp_path / "bad.trace", with_log(trace, MUTATIONS["page of another id"][0](trace.entries) or []))
        bad = replace(live, path=tmp_path / "bad.trace").facts()
    assert (bad["word"], bad["clause"]) == ("violated", "K2")
    assert not {"expected", "found", "excerpt"} & set(bad)  # they hold tokens


def test_overwritten_entries_are_a_counted_gap(tmp_path: Path) -> None:
    """Catches: a recorder that came too late and does not say so."""
    with engine(log_entries=256) as small:
        programs(small, 3)
        tail = small.memory.log_tail()
        with Recorder(small.memory, tmp_path / "a.trace", Header(small.memory.config, "live")) as recorder:
            pass
    trace = read(tmp_path / "a.trace")
    assert recorder.writer.lost == trace.gaps >= tail - 256 > 0
    assert recorder.warning is not None
    verdict = check(trace)
    assert verdict.word == UNKNOWN


def test_recording_at_level_decisions_says_what_it_lacks(tmp_path: Path) -> None:
    """Catches: a recording that looks good and can never be checked."""
    with engine(log_level=1) as quiet:
        recorder = record(quiet, tmp_path / "a.trace", 1)
    assert "needs ALL" in str(recorder.warning)
    assert check(read(tmp_path / "a.trace")).word == UNKNOWN


def test_recording_ends_at_its_limit(rig: LocalRig, tmp_path: Path) -> None:
    """Catches: a recording that fills the disk."""
    recorder = record(rig, tmp_path / "a.trace", limit_bytes=100)
    assert "limit of 100 bytes" in str(recorder.problem)
    assert check(read(tmp_path / "a.trace")).word == UNKNOWN


def call(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(trace_app, [str(argument) for argument in arguments])
    return done.exit_code, done.output


def test_command_records_a_running_engine(rig: LocalRig, tmp_path: Path) -> None:
    """Catches: a recorder that cannot be pointed at an engine by its descriptor."""
    assert rig.run_dir is not None
    code, text = call("record", "--engine", rig.run_dir, "--seconds", 0.2, "--out", tmp_path / "a.trace")
    assert (code, "0 lost" in text) == (0, True), text
    assert read(tmp_path / "a.trace").end is not None
    code, text = call("record", "--engine", tmp_path / "none", "--out", tmp_path / "b.trace")
    assert code == 2
    assert "engine descriptor" in text


def test_exit_codes_tell_valid_violated_and_unknown(tmp_path: Path) -> None:
    """Catches: a script that takes a violated or an unreadable log for a good one."""
    good, bad, cut, none = (tmp_path / f"{name}.trace" for name in ("good", "bad", "cut", "none"))
    write(good, drawn(0))
    write(bad, with_log(drawn(0), MUTATIONS["page of another id"][0](list(drawn(0).entries)) or []))
    cut.write_bytes(good.read_bytes()[:-9])
    assert call("check", good)[0] == 0
    code, text = call("check", bad)
    assert code == 1
    assert "clause K2 is violated at entry" in text
    assert call("check", cut)[0] == 2
    assert call("check", none)[0] == 2
    assert call("check", good, cut, bad)[0] == 1
    assert call("replay", good)[0] == 0
    assert call("replay", bad)[0] == 1
    facts = json.loads(call("check", "--json", bad)[1])
    assert (facts["word"], facts["clause"]) == ("violated", "K2")


def test_command_converts(tmp_path: Path) -> None:
    """Catches: a conversion that writes no file, or one of another kind."""
    write(tmp_path / "a.trace", drawn(0))
    assert call("convert", tmp_path / "a.trace", "--to", "perfetto", "--out", tmp_path / "a.json")[0] == 0
    assert json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    code, text = call("convert", tmp_path / "a.trace", "--to", "jsonl")
    assert code == 0
    assert len(text.splitlines()) == len(drawn(0).entries) + 2
    assert call("convert", tmp_path / "a.trace", "--to", "csv")[0] == 2


def test_record_wants_one_source(tmp_path: Path) -> None:
    """Catches: a command that records something else than was asked for."""
    assert call("record", "--out", tmp_path / "a.trace")[0] == 2
    assert call("record", "--out", tmp_path / "a.trace", "--lockstep", 1, "--program", 1)[0] == 2
    assert call("record", "--out", tmp_path / "a.trace", "--lockstep", 1)[0] == 0
    code, text = call("record", "--out", tmp_path / "a.trace", "--lockstep", 1)
    assert code == 2
    assert "is there already" in text
