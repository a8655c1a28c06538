"""The checks of the gpu rig as far as they go without a GPU: what they decide from what they saw, and their load."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from blink_core.abi.enums import EventKind
from blink_core.runtime.gpu_events import EventError
from hil_rigs.gpu import all as all_checks
from hil_rigs.gpu import freeze, interference, sanitize
from hil_rigs.gpu.all import STAGES, Stage, chosen, run_all
from hil_rigs.gpu.burn import burning, parse_cores, split_cores
from hil_rigs.gpu.processes import Gpu, activity
from hil_rigs.gpu.sanitize_serve import TOOLS
from tests.hil.gpu import test_xid
from tests.waiting import DEADLINE_S, ended, until


def test_activity_is_that_of_all_threads() -> None:
    """Catches: work of a thread other than the main one that a frozen engine's record leaves out; a process that only
    waits counted as busy."""
    code = (
        "import threading; print('on', flush=True); threading.Thread(target=lambda: [0 for _ in iter(int, 1)]).start()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as busy:
        assert busy.stdout is not None
        busy.stdout.readline()
        before = activity(busy.pid)
        until(lambda: activity(busy.pid).moved_since(before), "it worked and nothing was seen")
        busy.send_signal(signal.SIGSTOP)
        still = freeze.await_stopped(busy.pid)
        assert still.states == "T"
        assert activity(busy.pid).moved_since(still) == []
        busy.kill()


def windows(*tokens: float, ends: int = 0, errors: int = 0) -> list[dict[str, float]]:
    return [{"tokens": n, "ends": ends, "errors": errors, "seconds": 0.4} for n in tokens]


STEADY = windows(*[1000.0, 1001.0, 1002.0, 1001.0, 1000.0] * 2)


def observation(**changes: Any) -> dict[str, Any]:
    seen = {"running": STEADY, "frozen": STEADY[:-1], "frozen_with_new": windows(1000, ends=4)[0]}
    return deepcopy(seen | {"moved_while_frozen": [], "gpu": {"engine": True, "others": []}} | changes)


STOOD = windows(*[0] * 9)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"frozen": STOOD}, "0.0000 of the throughput"),
        ({"running": windows(*[0] * 10)}, "nan of the throughput"),
        ({"frozen": windows(*[985, 986, 985, 987, 985] * 2)[:9]}, "0.984"),
        ({"frozen": windows(*[995, 996, 995, 997, 995] * 2)[:9]}, ""),
        ({"frozen": windows(*[995, 996, 995, 300, 995] * 2)[:9]}, ""),  # the median
        ({"frozen": windows(990, 1040, 960, 1030, 1000, 950, 1050, 1020, 1000)}, "too noisy"),
        ({"frozen": windows(*[1000] * 9, ends=1)}, "streams ended within the windows"),
        ({"frozen_with_new": STOOD[0]}, "0 of 4 new requests"),
        ({"moved_while_frozen": ["user 3 -> 4"]}, "was active: user 3 -> 4"),
        ({"gpu": {"engine": True, "others": [77]}}, "other processes have a context on the GPU: [77]"),
        ({"gpu": {"engine": False, "others": []}}, "NVML does not show the engine's own"),
        ({"gpu": {"unknown": "NVML does not start"}}, "NVML does not start"),
        ({"running": [*STEADY[:-1], *windows(1000, errors=2)]}, "ended with errors"),
    ],
)
def test_freeze_is_judged(changes: dict[str, Any], words: str) -> None:
    """Catches: a frozen engine that was active, slower by more than 1 % or not known to 1 %, a second CUDA context, or
    an NVML that shows nothing, passed; one window in which the machine was busy that decides."""
    host = observation(frozen=STOOD[:1], frozen_with_new=STOOD[0])
    wrong = freeze.judge(observation(**changes), host)
    assert (wrong == []) == (words == "")
    assert words in "; ".join(wrong)
    assert any("proves nothing" in w for w in freeze.judge(observation(), observation()))


def test_throughput_that_drifts_is_no_loss() -> None:
    """Catches: frozen windows compared with the first running one, while the machine slows down for both."""
    pace = [1000.0 - 20.0 * i for i in range(19)]
    ratio, noise = freeze.kept(windows(*pace[::2]), windows(*pace[1::2]))
    assert ratio == pytest.approx(1.0, abs=1e-9)
    assert noise < 1e-9


def test_a_window_counts_what_came_in_it_by_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a rate over the time asked for, when the last poll returned later; tokens from before it counted in; the
    end of a request lost, because it came with the first poll."""
    token, finish = EventKind.TOKEN, EventKind.FINISH
    batches = iter([[token] * 5 + [finish], [token] * 3, [finish, token]])
    now = 10.0

    def poll(timeout: float) -> dict[str, Any]:
        nonlocal now
        now += 0.03
        return {"kind": np.array(next(batches, []), np.uint32)}

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    found = freeze.collect(MagicMock(poll=poll), 0.05)
    assert found == {"tokens": 4, "ends": 2, "errors": 0, "seconds": pytest.approx(0.06)}


@pytest.mark.parametrize(
    ("before", "found", "there", "expected"),
    [
        ([], [40], [40], {"engine": True, "others": []}),
        ([7], [7, 40], [7, 40], {"engine": True, "others": [7]}),
        ([], [900], [], {"engine": True, "others": []}),  # of another namespace
        ([800], [800, 900], [], {"engine": True, "others": [800]}),
        ([], [900, 901], [], {"engine": False, "others": [900, 901]}),
        ([], [41], [41], {"engine": False, "others": [41]}),  # somebody else of this one
        ([], [], [], {"engine": False, "others": []}),
        (None, [900], [], {"engine": False, "others": [900]}),
    ],
)
def test_contexts_on_the_gpu(
    before: list[int] | None,
    found: list[int],
    there: list[int],
    expected: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches: a second context that passes as the engine's; an engine that a container's NVML shows by another pid
    taken for somebody else."""
    gpu = Gpu("uuid", "0000:01:00.0")
    monkeypatch.setattr(freeze, "gpu_processes", lambda asked: found if asked == gpu else [1])
    for pid in there:
        (tmp_path / str(pid)).mkdir()
    assert freeze.others_on_gpu(40, gpu, before, tmp_path) == {"bus": gpu.bus} | expected


def pace(idle: float, busy: float, tokens: int = 9) -> dict[str, Any]:
    return {p: {"steps_per_s": v, "tokens": tokens, "errors": 0} for p, v in (("idle", idle), ("busy", busy))}


@pytest.mark.parametrize(
    ("device", "host", "words"),
    [
        (pace(100, 99), pace(100, 20), ""),
        (pace(100, 80), pace(100, 20), "0.800 of its idle pace"),
        (pace(100, 99), pace(100, 98), "proves nothing"),
        (pace(100, 99, tokens=0), pace(100, 20), "device-driven, idle: 0 tokens"),
        (pace(0, 0), pace(100, 20), "0.000 of its idle pace"),
    ],
)
def test_interference_is_judged(device: dict[str, Any], host: dict[str, Any], words: str) -> None:
    """Catches: a GPU engine that slows down with the host's load, and a load that disturbs nobody, both passed."""
    wrong = interference.judge(device, host)
    assert (wrong == []) == (words == "")
    assert words in "; ".join(wrong)


def test_busy_processes_stay_on_their_cores_and_end() -> None:
    """Catches: a load that is not there, one on the front end's cores, one that outlives its time or its parent."""
    cores = sorted(os.sched_getaffinity(0))
    with burning(2, cores[-1:], 600.0) as running:
        for process in running:
            assert os.sched_getaffinity(process.pid) == {cores[-1]}
        before = [activity(p.pid) for p in running]
        both = list(zip(running, before, strict=True))
        until(lambda: all(activity(p.pid).user != b.user for p, b in both), "a busy process is not busy")
    assert all(process.poll() is not None for process in running)
    with burning(1, cores, 0.2) as running:
        assert running[0].wait(DEADLINE_S) == 0
    orphan = "import time; from hil_rigs.gpu.burn import burn; print(burn('arithmetic', time.monotonic() + 600, 1))"
    done = subprocess.run(
        [sys.executable, "-c", orphan], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    assert done.stdout.strip() == "0"  # its parent is not 1
    with pytest.raises(ValueError, match="known: arithmetic, memory"), burning(1, cores, 1.0, ["network"]):
        pass


def test_cores_are_read_and_split() -> None:
    """Catches: a range whose last core is left out; a machine that is given away whole."""
    assert parse_cores("0-2,5") == [0, 1, 2, 5]
    with pytest.raises(ValueError, match="3 is above 1"):
        parse_cores("3-1")
    count = len(os.sched_getaffinity(0))
    with pytest.raises(ValueError, match="at least one must be left"):
        split_cores(count)


def finding(first: str) -> str:
    trace = "=========     Saved host backtrace\n=========         Host Frame: main in a.py\n========= \n"
    return f"========= {first}\n{trace}"


PROBE = finding('Program hit CUDA_ERROR_NOT_FOUND (error 500) due to "named symbol not found" on CUDA API call to '
                "cuGetProcAddress_v2.")  # fmt: skip
LOOKUP = finding('Program hit CUDA_ERROR_INVALID_VALUE (error 1) due to "invalid argument" on CUDA API call to '
                 "cuGetProcAddress_v2.")  # fmt: skip
OTHER = finding('Program hit CUDA_ERROR_NOT_INITIALIZED (error 3) due to "initialization error" on CUDA API call to '
                "cuGetProcAddress_v2.")  # fmt: skip
CALL = finding('Program hit CUDA_ERROR_INVALID_VALUE (error 1) due to "invalid argument" on CUDA API call to '
               "cuGraphLaunch.")  # fmt: skip
READ = finding("Invalid __global__ read of size 4 bytes")
UNPRINTED = "========= ERROR SUMMARY: 14 errors were not printed. Use --print-limit option to adjust the number\n"


@pytest.mark.parametrize(
    ("text", "code", "ok"),
    [
        ("SERVED a: 30 tokens\n========= ERROR SUMMARY: 0 errors\n", 0, True),
        ("SERVED a: 30 tokens\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", 0, True),
        ("SERVED a: 30 tokens\n========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)\n", 0, False),
        ("SERVED a: 30 tokens\n========= ERROR SUMMARY: 2 errors\n", 9, False),
        ("========= ERROR SUMMARY: 0 errors\n", 0, False),
        ("SERVED a: 30 tokens\n", 0, False),
        ("SERVED a: 30 tokens\n========= ERROR SUMMARY: 0 errors\n", None, False),
        ("SERVED a: 30 tokens\n========= ERROR SUMMARY: 0 errors\n", 1, False),
        (f"SERVED a: 30 tokens\n{PROBE}========= ERROR SUMMARY: 1 error\n", 0, True),
        (f"SERVED a: 30 tokens\n{PROBE}{CALL}========= ERROR SUMMARY: 2 errors\n", 0, False),
        (f"SERVED a: 30 tokens\n{PROBE}{READ}========= ERROR SUMMARY: 2 errors\n", 0, False),
        (f"SERVED a: 30 tokens\n{LOOKUP}========= ERROR SUMMARY: 1 error\n", 0, True),
        (f"SERVED a: 30 tokens\n{OTHER}========= ERROR SUMMARY: 1 error\n", 0, False),
        (f"SERVED a: 30 tokens\n{PROBE}========= ERROR SUMMARY: 2 errors\n", 0, False),
        # One process was killed, so that it gave no summary: its probes, or findings, and another's summary.
        (f"SERVED a: 30 tokens\n{PROBE}{PROBE}{READ}{READ}========= ERROR SUMMARY: 2 errors\n", 0, False),
        (f"SERVED a: 30 tokens\n{PROBE}{PROBE}========= ERROR SUMMARY: 1 error\n", 0, False),
        (f"SERVED a: 30 tokens\n{PROBE}========= ERROR SUMMARY: 0 errors\n", 0, False),
        (f"SERVED a: 30 tokens\n{READ}========= ERROR SUMMARY: 0 errors\n", 0, False),
        (f"SERVED a: 30 tokens\n{PROBE}{PROBE}========= ERROR SUMMARY: 2 errors\n{UNPRINTED}", 0, False),
        ("SERVED a: 30 tokens\n========= Of the tool itself\n========= ERROR SUMMARY: 0 errors\n", 0, True),
        (f"SERVED a: 30 tokens\n{PROBE}========= ERROR SUMMARY: 1 error\n" * 2, 0, True),
    ],
)
def test_sanitizers_output_is_read(text: str, code: int | None, ok: bool) -> None:
    """Catches: findings that are not counted; a tool that did not run, or with nothing under it, taken for clean;
    probes of a process without a summary taken from the findings of another; a count below zero."""
    found = sanitize.read("memcheck", text, 1.0, code)
    assert found.ok == ok
    assert found.findings is None or found.findings >= 0


def test_sanitizers_findings_are_counted_once_and_told() -> None:
    """Catches: findings that were not printed counted twice; a log of many probes in which the one finding is lost."""
    text = f"{PROBE * 3}SERVED a: 30 tokens\n{READ}{CALL}{READ}========= ERROR SUMMARY: 20 errors\n{UNPRINTED}"
    found = sanitize.read("memcheck", text, 1.0, 0)
    assert (found.findings, found.probes, found.status) == (17, 3, "ended")
    lost = sanitize.read("memcheck", f"{PROBE * 2}========= ERROR SUMMARY: 1 error\n", 1.0, 0)
    assert lost.status == "PART OF IT WITHOUT A SUMMARY: 2 errors told, 1 summed up"
    assert sanitize.kinds(text) == [
        ("Invalid __global__ read of size # bytes", 2),
        (CALL.splitlines()[0].removeprefix("========= ").replace("error 1)", "error #)"), 1),
    ]
    assert sanitize.first_finding(text) == READ.removesuffix("========= \n")
    assert sanitize.first_finding(PROBE) == ""


def test_stages_are_chosen_by_pattern() -> None:
    """Catches: a misspelt stage that is passed over, so that its check never runs."""
    assert chosen("sanitize-*,group", "sanitize-racecheck") == [
        "group",
        "sanitize-memcheck",
        "sanitize-initcheck",
        "sanitize-synccheck",
    ]
    assert chosen("*", "") == list(STAGES)
    with pytest.raises(ValueError, match="no stage 'freez'"):
        chosen("freez", "")


def test_stages_that_hang_fail_or_skip_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches: a stage that hangs all others or leaves a child behind; one that failed, or skipped any of its tests, in
    a table that says pass, or without the reason; a time that is over and nobody says what did not run."""
    pid = tmp_path / "pid"
    child = (
        "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        f"open({str(pid)!r}, 'w').write(str(p.pid)); "
    )
    skipping = tmp_path / "test_skips.py"
    skipping.write_text("import pytest\n@pytest.mark.skip\ndef test_nothing(): pass\n")
    partly = tmp_path / "test_partly.py"
    partly.write_text(skipping.read_text().replace("skip", "skip('no driver here')") + "def test_one(): pass\n")
    planned = {
        "good": Stage(("-c", "print('fine')"), 200, 1),
        "bad": Stage(("-c", "import sys; print('wrong'); sys.exit(3)"), 200, 1),
        "hangs": Stage(("-c", child + "time.sleep(600)"), 10.0, 1),
        "skips": Stage((*all_checks.PYTEST, str(skipping)), 200, 1),
        "partly": Stage((*all_checks.PYTEST, str(partly)), 200, 1),
        "alone": Stage(("-c", "print('after')"), 200, 1, alone=True),
    }
    monkeypatch.setattr(all_checks, "STAGES", planned)
    ran = {r.stage: r for r in run_all(list(planned), jobs=4, limit_s=400.0, out=tmp_path, tail=100)}
    assert {name: r.state for name, r in ran.items()} == {
        "good": "pass",
        "bad": "FAIL 3",
        "hangs": "TIMEOUT",
        "skips": "SKIPPED",
        "partly": "PARTLY",
        "alone": "pass",
    }
    assert "no driver here" in capsys.readouterr().out
    child_pid = int(pid.read_text())
    until(lambda: ended(child_pid), "the child of a stage that was ended lives on")
    assert (ran["good"].said, ran["alone"].said) == ("fine", "after")
    kept = {one["stage"]: one["state"] for one in json.loads((tmp_path / "all.json").read_text())}
    assert kept == {name: r.state for name, r in ran.items()}
    lines = all_checks.table(list(ran.values()), 9.0)
    assert len(lines) == 8
    assert lines[1].split()[:2] == ["good", "pass"]
    assert float(lines[3].split()[2]) >= 5.0  # what the one that hangs took
    late = run_all(["good"], jobs=1, limit_s=0.0, out=tmp_path, tail=100)
    assert [r.state for r in late] == ["NOT RUN"]


def test_a_stage_that_skipped_a_test_is_not_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: an exit status 0 for checks of which some did not run."""
    file = tmp_path / "test_partly.py"
    file.write_text("import pytest\n@pytest.mark.skip\ndef test_nothing(): pass\ndef test_one(): pass\n")
    monkeypatch.setattr(all_checks, "STAGES", {"partly": Stage((*all_checks.PYTEST, str(file)), 200, 1)})
    assert all_checks.main(["--out", str(tmp_path / "out")]) == 1
    file.write_text("def test_one(): pass\n")
    assert all_checks.main(["--out", str(tmp_path / "out")]) == 0


def test_an_engine_that_does_not_watch_is_held_against_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: an engine that cannot register for Xid errors where everybody else can, skipped on its own word; an NVML
    that is not installed told as one that refuses."""
    gives, refuses, missing = MagicMock(), EventError("gives no Xid events"), EventError("not installed")
    refuses.__cause__, missing.__cause__ = OSError(), ImportError()
    monkeypatch.setattr(test_xid, "NvmlEvents", gives)
    with pytest.raises(pytest.fail.Exception, match="health says: not watched"):
        test_xid.engine_does_not_watch("0000:01:00.0", "not watched")
    gives.return_value.close.assert_called_once()
    gives.side_effect = refuses
    with pytest.raises(pytest.skip.Exception, match="gives no Xid events"):
        test_xid.engine_does_not_watch("0000:01:00.0", "not watched")
    gives.side_effect = missing
    with pytest.raises(EventError, match="not installed"):
        test_xid.engine_does_not_watch("0000:01:00.0", "not watched")


def test_stages_that_share_leave_the_others_their_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a stage that hangs until the time of the whole is over, so that what runs alone is never run."""
    planned = {
        "hangs": Stage(("-c", "import time; time.sleep(600)"), 300, 10),
        "first": Stage(("-c", "import time; time.sleep(600)"), 300, 3, alone=True),
        "second": Stage(("-c", "print('after')"), 300, 25, alone=True),
    }
    monkeypatch.setattr(all_checks, "STAGES", planned)
    ran = run_all(list(planned), jobs=2, limit_s=30.0, out=tmp_path, tail=100)
    assert [r.state for r in ran] == ["TIMEOUT", "TIMEOUT", "pass"]
    assert run_all(["hangs", "second"], jobs=2, limit_s=25.5, out=tmp_path, tail=100)[0].state == "NOT RUN"
    assert all(0 < s.wanted_s <= s.limit_s for s in all_checks._stages().values())


def test_every_stage_is_a_command_that_there_is() -> None:
    """Catches: a stage that names a module, a test file or a shape that was moved or renamed."""
    from verification.on_device.shapes import SHAPES

    assert {n.removeprefix("shape-") for n in STAGES if n.startswith("shape-")} == set(SHAPES)
    assert {n.removeprefix("sanitize-") for n in STAGES if n.startswith("sanitize-")} == set(TOOLS)
    assert {"watchdog", "long", "freeze", "xid", "ops_check", "batch-invariance", "mutants-1"} <= set(STAGES)
    root = all_checks.ROOT
    for stage in STAGES.values():
        for argument in stage.arguments:
            assert not argument.endswith(".py") or (root / argument).exists(), argument
            module = root / argument.replace(".", "/")
            if argument.startswith(("verification.on_device", "hil_rigs.")):
                assert module.with_suffix(".py").exists() or (module / "__main__.py").exists(), argument
    assert json.dumps(sorted(STAGES))


def test_help_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches: a stage that nobody can find, or of which nobody knows what it takes."""
    with pytest.raises(SystemExit, match="0"):
        all_checks.main(["--help"])
    told = capsys.readouterr().out
    assert all_checks.main(["--list"]) == 0
    assert capsys.readouterr().out.strip() in told
    for name, stage in STAGES.items():
        line = next(line for line in told.splitlines() if line.startswith(f"{name} "))
        assert f" {stage.wanted_s:.0f} s" in line
        assert line.rstrip().endswith(stage.what)
        assert stage.what


def test_shares_of_the_mutants_are_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a mutant that is in no share, so that nobody sees it survive; a share's status that is lost."""
    from hil_rigs.gpu import mutants
    from verification.mutants.gpu import cuda_mutants

    ran: list[str] = []

    def main(arguments: list[str]) -> int:
        ran.extend(arguments[2].split(","))
        assert (Path(arguments[0]) / "mutants.json").exists()
        return 1

    monkeypatch.setattr(mutants, "main", main)
    for name, stage in STAGES.items():
        if name.startswith("mutants-"):
            monkeypatch.setattr(sys, "argv", ["-c", *stage.arguments[2:]])
            with pytest.raises(SystemExit, match="1"):
                exec(stage.arguments[1], {})
    assert sorted(ran) == sorted(mutant.name for mutant in cuda_mutants())


def test_a_history_is_given_to_the_whole_block() -> None:
    """Catches: the comparison of the GPU's block with the host's log, run by the one thread that the harness has by
    default, while its result speaks of 256."""
    code = """
import sys
from unittest.mock import MagicMock
sys.modules["cupy"] = MagicMock()
from blink_core.abi.config import EngineConfig
from hil_rigs.gpu.scheduler import GpuNative
from verification.scheduler.harness import Harness
Harness(EngineConfig(vocab=16), native=GpuNative, checks=False)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "ValueError: a group of 1 threads on the GPU: the scheduler's block has 256" in done.stderr
