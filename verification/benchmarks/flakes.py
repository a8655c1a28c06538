"""Runs one profile many times with different seeds and names every outcome that is not `passed`.

``python -m verification.benchmarks.flakes --runs 20`` on an otherwise quiet machine; exit 0 when all runs passed, 1
when a test did not, 2 when a run could not be made. Each run's signed report stays in its own folder. A test that
passes with one seed and not with another is flaky, or it has found something: both are failures here. A signal stops
the run in hand, no other follows, and what there is is told: exit 2.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from verification.certificate.certify import certify
from verification.certificate.collector import DESELECTED
from verification.certificate.fleet import follow_parent, run_fleet
from verification.certificate.outcomes import Outcome
from verification.certificate.output import REPORT, stamp
from verification.certificate.supervise import INTERRUPTED, interruptible

EXPECTED = (Outcome.PASSED, Outcome.FILTERED)
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Tally:
    """What the runs showed. bad: (seed, test, outcome, message) of everything that did not pass. unmade: seeds of runs
    without a report. missed: situations that were expected and not reached, by number of runs. interrupted: seeds of
    runs that a signal ended; of their tests those count that had ended, and the runs themselves do not."""

    runs: int = 0
    tests: int = 0
    bad: list[tuple[int, str, str, str]] = field(default_factory=list)
    unmade: list[int] = field(default_factory=list)
    missed: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    interrupted: list[int] = field(default_factory=list)
    stopped: bool = False  # by a signal, before all runs were made

    def add(self, seed: int, report: dict[str, Any]) -> None:
        """Counts one run."""
        errors = report["session_errors"]
        whole = INTERRUPTED not in errors
        if whole:
            self.runs += 1
            self.seconds.append(report["run"]["duration_s"])
        else:
            self.interrupted.append(seed)
            errors = [error for error in errors if not error.startswith("interrupted")]  # pytest tells of it too
        for test in report["tests"]:
            if test["message"] == DESELECTED:  # by -k
                continue
            if not whole and (test["outcome"] == Outcome.MISSING or test["message"] == INTERRUPTED):  # it had not ended
                continue
            self.tests += 1
            if test["outcome"] not in EXPECTED:
                first = (test["message"].splitlines() or [""])[0]
                self.bad.append((seed, test["id"], test["outcome"], first))
        self.bad += [(seed, "session", "error", error) for error in errors]
        # Of a part nothing can be expected.
        whole = whole and all(test["message"] != DESELECTED for test in report["tests"])
        expected = [s for s in report["situations"] if whole and s["expected"] and s["applies"]]
        self.missed.update(s["name"] for s in expected if not s["reached"])

    @property
    def code(self) -> int:
        return 2 if self.unmade or self.interrupted or self.stopped or not self.runs else 1 if self.bad else 0

    def lines(self) -> list[str]:
        """The tally for a terminal."""
        said = [f"seed {seed}: {test} is {outcome}: {message}" for seed, test, outcome, message in self.bad]
        said += [f"seed {seed}: the run left no report" for seed in self.unmade]
        said += [f"seed {seed}: the run was {INTERRUPTED}" for seed in self.interrupted]
        said += ["stopped by a signal: no further run was made"] if self.stopped else []
        said += [
            f"situation {name} was not reached in {n} of {self.runs} runs" for name, n in self.missed.most_common()
        ]
        mean = sum(self.seconds) / max(1, len(self.seconds))
        said.append(f"{self.runs} runs of {mean:.0f} s on average, {self.tests} outcomes, {len(self.bad)} not passed")
        return said


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs and tells; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m verification.benchmarks.flakes", description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=1, help="the runs have this seed and the next ones")
    parser.add_argument("--rig", default="local")
    parser.add_argument("--model", default=None)
    parser.add_argument("--profile", default="smoke")
    parser.add_argument("--out", type=Path, default=Path("out/flakes"))
    parser.add_argument("--jobs", type=int, default=1, help="so many runs side by side; two cores each are needed")
    parser.add_argument("-k", dest="select", default=None, help="only these tests, as pytest selects them")
    parser.add_argument(
        "--tally", type=Path, nargs="+", metavar="DIR", help="run nothing, count what these folders hold"
    )
    chosen = parser.parse_args(arguments)
    if chosen.runs < 1:
        parser.error(f"--runs is {chosen.runs}, at least 1 is needed")
    if chosen.jobs < 1:
        parser.error(f"--jobs is {chosen.jobs}, at least 1 is needed")
    tally = Tally()
    if chosen.tally:
        return _tell(tally, chosen.tally)
    if chosen.jobs > 1:
        return _side_by_side(tally, chosen)
    follow_parent()
    with _Signals() as signals:
        for seed in range(chosen.first_seed, chosen.first_seed + chosen.runs):
            if signals.came:
                tally.stopped = True
                break
            _run(tally, chosen, seed, signals)
    print("\n".join(tally.lines()), flush=True)
    return tally.code


def _side_by_side(tally: Tally, chosen: argparse.Namespace) -> int:
    """Makes every run in a process of its own, then counts what they left."""
    seeds = [str(seed) for seed in range(chosen.first_seed, chosen.first_seed + chosen.runs)]
    if stale := [seed for seed in seeds if (chosen.out / f"seed-{seed}").exists()]:
        print(f"error: {chosen.out} holds runs of the seeds {', '.join(stale)}: name another folder", file=sys.stderr)
        return 2
    given = {"--model": chosen.model, "-k": chosen.select}
    words = [sys.executable, "-m", "verification.benchmarks.flakes", "--rig", chosen.rig, "--profile", chosen.profile]
    words += ["--runs", "1", "--out", str(chosen.out)]
    words += [word for name, value in given.items() if value is not None for word in (name, value)]
    commands = {f"seed-{seed}": [*words, "--first-seed", seed] for seed in seeds}
    with interruptible() as interrupted:
        run_fleet(commands, chosen.jobs, chosen.out / "logs", interrupted, _ended)
        tally.stopped = interrupted.is_set()
    return _tell(tally, [chosen.out], () if tally.stopped else map(int, seeds))


def _ended(name: str, code: int, seconds: float) -> None:
    print(f"{name}: exit {code}, {seconds:.0f} s", flush=True)


def _run(tally: Tally, chosen: argparse.Namespace, seed: int, signals: _Signals) -> None:
    """Makes one run and counts it."""
    out = chosen.out / f"seed-{seed}"
    started, text = time.monotonic(), io.StringIO()
    more = () if chosen.select is None else ("-k", chosen.select)
    earlier = stamp(out)
    with contextlib.redirect_stdout(text), signals.breaking():
        certify(chosen.rig, chosen.model, chosen.profile, out, seed, as_json=True, pytest_arguments=more)
    if stamp(out) not in (None, earlier):  # where it was refused, or a signal came before, an earlier one's is left
        tally.add(seed, json.loads((out / REPORT).read_text(encoding="utf-8")))
    else:
        tally.unmade.append(seed)
    passed = f"{len(tally.bad)} not passed so far"
    print(f"seed {seed}: {time.monotonic() - started:.0f} s, {passed}", flush=True)


class _Signals:
    """Notices every signal to stop, while in force.

    Within a run they are `certify`'s, which has handlers of its own, stops pytest, and tells nobody if all tests were
    done already: the wake-up socket gets them all the same.
    """

    def __enter__(self) -> _Signals:
        self._came = self._breaks = False
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)
        self._previous = {number: signal.signal(number, self._handle) for number in STOPPING}
        self._descriptor = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._descriptor)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._receiver.close()
        self._sender.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._breaks:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def breaking(self) -> Iterator[None]:
        """Inside, a signal that `certify` has no handler for yet, or any more, breaks it off: it would make its run."""
        try:
            self._breaks = True
            yield
        except KeyboardInterrupt:
            pass
        finally:
            self._breaks = False

    @property
    def came(self) -> bool:
        """Whether one has come so far."""
        with contextlib.suppress(BlockingIOError):
            self._came |= any(number in STOPPING for number in self._receiver.recv(4096))
        return self._came


def _tell(tally: Tally, folders: Sequence[Path], expected: Iterable[int] = ()) -> int:
    """Counts finished runs, each folder with its ``seed-N`` folders. A seed without a report, and one of ``expected``
    without a folder, is a run not made, and one that is there twice counts once: it would be the same run."""
    seen: set[int] = set()
    for path in sorted(run for folder in folders for run in folder.glob("seed-*")):
        seed = int(path.name.removeprefix("seed-"))
        if seed in seen:
            continue
        seen.add(seed)
        report = path / REPORT
        if report.is_file():
            tally.add(seed, json.loads(report.read_text(encoding="utf-8")))
        else:
            tally.unmade.append(seed)
    tally.unmade += sorted(set(expected) - seen)
    print("\n".join(tally.lines()), flush=True)
    return tally.code


if __name__ == "__main__":
    sys.exit(main())
