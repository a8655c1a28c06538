"""Shards of a run: which tests each has, and how one that was interrupted goes on (design section 10).

A run of n shards is n runs of `certify`, on one machine or on several, with one seed; `join` makes one report of them.
Tests are dealt out by their expected seconds, the longest first, each to the shard that has least (Graham, "Bounds on
multiprocessing timing anomalies", 1969); tests that share an engine stay together. The same ids, costs and n give the
same shards everywhere.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from verification.certificate.collector import JOURNAL, read_journal
from verification.certificate.interruptions import Interruption, given_up, interrupted_in
from verification.certificate.records import TestRecord

STATE = "shard.json"
OTHER = "another shard's"
DONE = "done before this shard was interrupted"
MOST = 64
_FORM = re.compile(r"(\d+)/(\d+)")


class ShardError(ValueError):
    """A shard that does not exist, or a folder that holds another run's."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The `index`-th of `count`, from 1."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


def parse_shard(text: str) -> Shard:
    """ "2/5" as a shard; `ShardError` for anything that is none."""
    found = _FORM.fullmatch(text)
    if found is None:
        raise ShardError(f"shard {text!r} is not of the form INDEX/COUNT, e.g. 2/5")
    shard = Shard(*map(int, found.groups()))
    if not 1 <= shard.count <= MOST:
        raise ShardError(f"{shard.count} shards; 1 to {MOST} are possible")
    if not 1 <= shard.index <= shard.count:
        raise ShardError(f"shard {shard.index} of {shard.count}; they are numbered from 1 to {shard.count}")
    return shard


@dataclass(frozen=True, slots=True)
class Costs:
    """Expected seconds of tests on two cores. tests: pattern of own ids -> seconds; the first that fits counts."""

    default_s: float
    tests: Mapping[str, float]

    def of(self, test: str) -> float:
        """Seconds of a test. Brackets in a pattern are those of parameters, not of sets of characters."""
        exact = self.tests.get(test)
        if exact is not None:
            return exact
        for pattern, seconds in self.tests.items():
            if "*" in pattern and fnmatch.fnmatchcase(test, pattern.replace("[", "[[]")):
                return seconds
        return self.default_s


@cache
def registered_costs() -> Costs:
    """`costs.yaml` beside this module, which `verification.certificate.costs` writes; what no run has measured is an
    estimate."""
    text = (resources.files("verification") / "certificate" / "costs.yaml").read_text(encoding="utf-8")
    values = yaml.safe_load(text)
    return Costs(float(values["default_s"]), {str(k): float(v) for k, v in values["tests"].items()})


def partition(tests: Iterable[str], count: int, costs: Costs, group: Callable[[str], str] = str) -> list[list[str]]:
    """Own ids by shard. group: tests of one group stay together, for starting what they share costs time."""
    groups: dict[str, list[str]] = {}
    for test in sorted(tests):
        groups.setdefault(group(test), []).append(test)
    weighed = sorted(((sum(map(costs.of, ids)), name) for name, ids in groups.items()), key=lambda g: (-g[0], g[1]))
    loads, shards = [0.0] * count, [list[str]() for _ in range(count)]
    for seconds, name in weighed:
        least = min(range(count), key=lambda i: (loads[i], i))
        loads[least] += seconds
        shards[least] += groups[name]
    return shards


# What must be equal for a shard to go on, or for shards to be of one run.
IDENTITY = ("rig", "profile", "seed", "model", "sources", "engine", "required", "thresholds", "options")


def differences(one: Mapping[str, Any], other: Mapping[str, Any], names: Sequence[str] = IDENTITY) -> list[str]:
    """Names of what is not equal in two identities."""
    return [name for name in names if one.get(name) != other.get(name)]


@dataclass(frozen=True, slots=True)
class State:
    """What sessions of a shard have left: their identity, tests that are done, tests that were begun and not ended."""

    identity: Mapping[str, Any]
    done: list[TestRecord]
    interrupted: list[Interruption]


def read_state(
    folder: Path,
    shard: Shard,
    identity: Mapping[str, Any] | None = None,
    *,
    why: Mapping[str, str] | None = None,
    crashed: Sequence[TestRecord] = (),
) -> State:
    """What sessions of this shard have done in `folder`; nothing for a fresh folder.

    Args:
        identity: what a session that goes on must have in common with them; None does not ask.
        why: by own id, why what was running did not end; None where the session died.
        crashed: tests that are done because the process crashed in them, by its own doing.

    Tests count as done whatever their outcome: a failed test is not run again; nor is one that was interrupted too
    often. Raises `ShardError` where the folder holds another run, or a shard of other sources, seed, model or options.
    """
    state = folder / STATE
    if not state.is_file():
        if (folder / JOURNAL).exists():
            raise ShardError(f"{folder} holds a run that is no shard; name another folder")
        return State({}, [], [])
    try:
        values = json.loads(state.read_text(encoding="utf-8"))
        known = values["identity"]
        records = [TestRecord.from_json(json.dumps(one)) for one in values["done"]]
        interrupted = [Interruption(**one) for one in values["interrupted"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ShardError(f"{state} cannot be read: {type(error).__name__}: {error}") from error
    if values.get("shard") != str(shard):
        raise ShardError(f"{folder} holds shard {values.get('shard')}, not {shard}; name another folder")
    if identity is not None and (apart := differences(known, identity)):
        shown = "; ".join(f"{name} was {known.get(name)!r} and is {identity.get(name)!r}" for name in apart)
        raise ShardError(f"{folder} holds a shard of another run: {shown[:600]}. Remove it, or name another folder")
    done = {record.id: record for record in (*records, *crashed)}
    if (folder / JOURNAL).is_file():
        journal, _ = read_journal(folder / JOURNAL)
        done |= {record.id: record for record in journal.records.values() if record.phase != "collection"}
    counted = {(one.run, one.id) for one in interrupted}
    fresh = interrupted_in(folder, why or {})
    interrupted += [one for one in fresh if (one.run, one.id) not in counted and one.id not in done]
    done |= {record.id: record for record in given_up(interrupted) if record.id not in done}
    return State(known, list(done.values()), interrupted)


def write_state(
    folder: Path,
    shard: Shard,
    identity: Mapping[str, Any],
    done: Sequence[TestRecord],
    interrupted: Sequence[Interruption] = (),
) -> Path:
    """Notes what the shard is, what of it is done, and what was interrupted."""
    values = {
        "shard": str(shard),
        "identity": dict(identity),
        "done": [json.loads(record.to_json()) for record in done],
        "interrupted": [one.to_json() for one in interrupted],
    }
    path = folder / STATE
    path.write_text(json.dumps(values), encoding="utf-8")
    return path


def done_records(path: Path) -> dict[str, TestRecord]:
    """By own id, the tests that a state file says are done; `ShardError` for a file that is none."""
    try:
        done = json.loads(path.read_text(encoding="utf-8"))["done"]
        return {str(one["id"]): TestRecord.from_json(json.dumps(one)) for one in done}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ShardError(f"{path} is no state of a shard: {type(error).__name__}: {error}") from error


def done_ids(path: Path) -> set[str]:
    """Own ids of the tests that a state file says are done; `ShardError` for a file that is none."""
    return set(done_records(path))
