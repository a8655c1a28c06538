"""Runs one profile many times with different seeds and names every outcome that is not `passed`.

``python -m verification.benchmarks.flakes --runs 20`` on an otherwise quiet machine; exit 0 when all runs passed, 1
when a test did not, 2 when a run could not be made. Each run's signed report stays in its own folder. A test that
passes with one seed and not with another is flaky, or it has found something: both are failures here.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verification.certificate.certify import certify
from verification.certificate.collector import DESELECTED
from verification.certificate.outcomes import Outcome
from verification.certificate.output import REPORT

EXPECTED = (Outcome.PASSED, Outcome.FILTERED)


@dataclass
class Tally:
    """What the runs showed. bad: (seed, test, outcome, message) of everything that did not pass. unmade: seeds of runs
    without a report. missed: situations that were expected and not reached, by number of runs."""

    runs: int = 0
    tests: int = 0
    bad: list[tuple[int, str, str, str]] = field(default_factory=list)
    unmade: list[int] = field(default_factory=list)
    missed: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)

    def add(self, seed: int, report: dict[str, Any]) -> None:
        """Counts one run."""
        self.runs += 1
        self.seconds.append(report["run"]["duration_s"])
        for test in report["tests"]:
            if test["message"] == DESELECTED:  # by -k
                continue
            self.tests += 1
            if test["outcome"] not in EXPECTED:
                first = (test["message"].splitlines() or [""])[0]
                self.bad.append((seed, test["id"], test["outcome"], first))
        self.bad += [(seed, "session", "error", error) for error in report["session_errors"]]
        whole = all(test["message"] != DESELECTED for test in report["tests"])  # else nothing can be expected
        expected = [s for s in report["situations"] if whole and s["expected"] and s["applies"]]
        self.missed.update(s["name"] for s in expected if not s["reached"])

    @property
    def code(self) -> int:
        return 2 if self.unmade or not self.runs else 1 if self.bad else 0

    def lines(self) -> list[str]:
        """The tally for a terminal."""
        said = [f"seed {seed}: {test} is {outcome}: {message}" for seed, test, outcome, message in self.bad]
        said += [f"seed {seed}: the run left no report" for seed in self.unmade]
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
    parser.add_argument("-k", dest="select", default=None, help="only these tests, as pytest selects them")
    parser.add_argument(
        "--tally", type=Path, nargs="+", metavar="DIR", help="run nothing, count what these folders hold"
    )
    chosen = parser.parse_args(arguments)
    if chosen.runs < 1:
        parser.error(f"--runs is {chosen.runs}, at least 1 is needed")
    tally = Tally()
    if chosen.tally:
        return _tell(tally, chosen.tally)
    for seed in range(chosen.first_seed, chosen.first_seed + chosen.runs):
        out = chosen.out / f"seed-{seed}"
        started, text = time.monotonic(), io.StringIO()
        more = () if chosen.select is None else ("-k", chosen.select)
        with contextlib.redirect_stdout(text):
            certify(chosen.rig, chosen.model, chosen.profile, out, seed, as_json=True, pytest_arguments=more)
        if (out / REPORT).is_file():
            tally.add(seed, json.loads((out / REPORT).read_text(encoding="utf-8")))
        else:
            tally.unmade.append(seed)
        passed = f"{len(tally.bad)} not passed so far"
        print(f"seed {seed}: {time.monotonic() - started:.0f} s, {passed}", flush=True)
    print("\n".join(tally.lines()), flush=True)
    return tally.code


def _tell(tally: Tally, folders: Sequence[Path]) -> int:
    """Counts finished runs, each folder with its ``seed-N`` folders. A seed without a report is a run not made, and one
    that is there twice counts once: it would be the same run."""
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
    print("\n".join(tally.lines()), flush=True)
    return tally.code


if __name__ == "__main__":
    sys.exit(main())
