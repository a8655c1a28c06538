"""The kill matrix: every mutant against every checker that can name its class, over fresh seeds (design section 9).

A cell is a kill if at least 9 of 10 seeds end with a finding that names the mutant's class. A crash and a timeout are
none. A cell ends early when the seeds that are left can change nothing. The control column runs the product as it is
with the same seeds: it must find nothing. One file a mutant, which a later run takes over while nothing it depends on
has changed (`sources`).
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import yaml

from hil_rigs.scratch import Scratch
from verification.mutants import hook, native, sources, weave
from verification.mutants.checkers import NATIVE as NATIVE_MODULES
from verification.mutants.checkers import all_modules, every, find
from verification.mutants.checkers.base import Checker, classes_of, independent
from verification.mutants.model import Mutant, RegistryError
from verification.mutants.session import Session, WorkerLost
from verification.mutants.worker import CRASH, FOUND, NOTHING, TIMEOUT, Job, Outcome

SEEDS = 10
KILLED_SHARE = 0.9
EQUIVALENT = Path(__file__).parent / "equivalent.yaml"
CONTROL = "control"
ONLY_LONGER = "only takes longer"  # in an argument: that the mutant hangs says nothing against it


@dataclass(slots=True)
class Cell:
    """One mutant against one checker. hits: seeds with a finding that names the class; run: seeds that were run."""

    checker: str
    seeds: int
    run: int = 0
    hits: int = 0
    words: dict[str, int] = field(default_factory=dict)  # found, nothing, crash, timeout
    misnamed: int = 0  # findings that name other classes only
    clause: str = ""
    witness: str = ""
    seconds: float = 0.0

    @property
    def killed(self) -> bool:
        return self.run > 0 and self.hits >= needed(self.seeds)

    @property
    def decided(self) -> bool:
        """Whether the seeds that are left can change nothing."""
        misses = self.run - self.hits
        return self.run == self.seeds or self.killed or misses > self.seeds - needed(self.seeds)

    def add(self, outcome: Outcome, cls: str) -> None:
        self.run += 1
        self.seconds += outcome.seconds
        self.words[outcome.word] = self.words.get(outcome.word, 0) + 1
        names = outcome.word == FOUND and cls in outcome.classes
        self.hits += names
        self.misnamed += outcome.word == FOUND and not names
        if names or not self.clause:
            self.clause, self.witness = outcome.clause, outcome.witness

    def __str__(self) -> str:
        return f"{self.hits}/{self.run}{' killed' if self.killed else ''}"


@dataclass(slots=True)
class Row:
    """One mutant and its cells; cls "" for the control. sources: digest of product and suite that it was run on."""

    mutant: str
    cls: str
    where: str
    digest: str
    cells: dict[str, Cell]
    sources: str = ""

    @property
    def killers(self) -> list[str]:
        return [name for name, cell in self.cells.items() if cell.killed]

    def to_json(self) -> dict[str, Any]:
        cells = {
            name: {key: getattr(cell, key) for key in Cell.__slots__} | {"killed": cell.killed}
            for name, cell in self.cells.items()
        }
        told = {"mutant": self.mutant, "class": self.cls, "where": self.where, "digest": self.digest}
        return told | {"sources": self.sources, "cells": cells}

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Row:
        cells = {
            name: Cell(**{key: value for key, value in cell.items() if key != "killed"})
            for name, cell in told["cells"].items()
        }
        return cls(told["mutant"], told["class"], told["where"], told["digest"], cells, told.get("sources", ""))


def needed(seeds: int) -> int:
    """Hits that make a kill of so many seeds: 9 of 10, all of fewer."""
    return max(1, int(KILLED_SHARE * seeds)) if seeds >= SEEDS else seeds


def seeds_of(root: int, count: int) -> list[int]:
    """Seeds that a root gives, the same for every mutant and the control."""
    rng = random.Random(f"mutants/{root}")
    return [rng.randrange(1 << 32) for _ in range(count)]


def able(mutant: Mutant, checkers: Sequence[Checker]) -> list[Checker]:
    """Checkers that notice such mutants and can name this one's class."""
    chosen = [one for one in checkers if mutant.where in one.where and mutant.cls in classes_of(one)]
    return [one for one in chosen if getattr(one, "applies", lambda mutant: True)(mutant)]


class Matrix:
    """Runs rows and keeps them in `folder`.

    controls: whether `rows` runs the control columns of its mutants; runs of parts have them apart, once (`control`).
    say: gets a line for each row.
    """

    def __init__(
        self,
        folder: Path,
        seeds: Sequence[int],
        *,
        checkers: Sequence[str] | None = None,
        controls: bool = True,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.folder, self.seeds, self._controls, self._say = folder, list(seeds), controls, say
        self._chosen = None if checkers is None else frozenset(checkers)
        self._sources = {
            "native": sources.digest("native", NATIVE_MODULES),
            "python": sources.digest("python", all_modules()),
        }
        folder.mkdir(parents=True, exist_ok=True)

    def checkers(self, where: str) -> list[Checker]:
        return [one for one in every(where) if self._chosen is None or one.name in self._chosen]

    def rows(self, mutants: Sequence[Mutant]) -> list[Row]:
        """Rows of these mutants, and of the controls that they need unless those are run apart. Raises RegistryError,
        BuildFailed or WorkerLost."""
        out: list[Row] = []
        natives = [m for m in mutants if m.where == "native"]
        if natives:
            out += self._native_rows(natives)
        for mutant in (m for m in mutants if m.where == "python"):
            out.append(self._python_row(mutant))
        if self._controls and any(row.where == "python" for row in out):
            out.append(self._control("python", self._names("python", mutants), None))
        return out

    def control(self, where: str, share: tuple[int, int] = (1, 1)) -> Row:
        """The product as it is against every n-th checker of `where` from the i-th on; all shares together stand for
        the controls of all its mutants."""
        names = sorted(one.name for one in self.checkers(where))[share[0] - 1 :: share[1]]
        if where == "python":
            return self._control(where, names, None)
        woven = weave.build()
        with _lazily(lambda: _prepared(native.environment(woven.path, 0), names, self.seeds)) as session:
            return self._control(where, names, session)

    def _names(self, where: str, mutants: Sequence[Mutant]) -> list[str]:
        """Checkers that any of these mutants needs."""
        return sorted({one.name for m in mutants if m.where == where for one in able(m, self.checkers(where))})

    def _native_rows(self, mutants: Sequence[Mutant]) -> list[Row]:
        woven = weave.build()
        names = self._names("native", mutants)
        out = []
        with _lazily(lambda: _prepared(native.environment(woven.path, 0), names, self.seeds)) as session:
            if self._controls:
                out.append(self._control("native", names, session))
            for mutant in mutants:
                identity = woven.identities[mutant.name]
                out.append(self._row(mutant, able(mutant, self.checkers("native")), session, identity))
        return out

    def _python_row(self, mutant: Mutant) -> Row:
        with (
            Scratch("mutant") as scratch,
            _lazily(lambda: Session(hook.environment(mutant, scratch.path))) as session,
        ):
            return self._row(mutant, able(mutant, self.checkers("python")), session, 0)

    def _control(self, where: str, names: Sequence[str], session: _Lazy | None) -> Row:
        known = self._known(f"{CONTROL}-{where}", where, "".join(names))
        if known is not None:
            return known
        row = Row(f"{CONTROL}-{where}", "", where, self._digest(where, "".join(names)), {}, self._sources[where])
        with _lazily(lambda: Session(hook.environment(None, self.folder))) as own:
            for name in names:
                row.cells[name] = self._cell(find(name), session or own, None, 0)
        return self._keep(row)

    def _row(self, mutant: Mutant, checkers: Sequence[Checker], session: _Lazy, identity: int) -> Row:
        key = mutant.model_dump_json() + "".join(one.name for one in checkers)
        known = self._known(mutant.name, mutant.where, key)
        if known is not None:
            return known
        where = mutant.where
        row = Row(mutant.name, mutant.cls, where, self._digest(where, key), {}, self._sources[where])
        for checker in checkers:
            row.cells[checker.name] = self._cell(checker, session, mutant, identity)
        return self._keep(row)

    def _cell(self, checker: Checker, session: _Lazy, mutant: Mutant | None, identity: int) -> Cell:
        """All seeds of one checker, or as many as decide; one run stands for all of a checker that takes no seed."""
        cell, outcome = Cell(checker.name, len(self.seeds)), None
        name, cls = ("", "") if mutant is None else (mutant.name, mutant.cls)
        for seed in self.seeds:
            if mutant is not None and cell.decided:
                break
            if outcome is None or not getattr(checker, "deterministic", False):
                outcome = session.get().run(Job(checker.name, seed, name, identity))
            else:
                outcome = replace(outcome, seconds=0.0)
            cell.add(outcome, cls)
        return cell

    def _digest(self, where: str, key: str) -> str:
        return hashlib.sha256(f"{self._sources[where]}{key}{self.seeds}".encode()).hexdigest()

    def _known(self, name: str, where: str, key: str) -> Row | None:
        path = self.folder / f"{name}.json"
        try:
            row = Row.from_json(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return row if row.digest == self._digest(where, key) else None

    def _keep(self, row: Row) -> Row:
        path = self.folder / f"{row.mutant}.json"
        part = path.with_suffix(".part")
        part.write_text(json.dumps(row.to_json(), indent=1), encoding="utf-8")
        part.replace(path)
        cells = ", ".join(f"{name} {cell}" for name, cell in row.cells.items())
        self._say(f"{row.cls or '-'} {row.mutant}: {cells or 'no checker can name its class'}")
        return row


class _Lazy:
    """A session that is started when it is first asked for, so that rows taken over start nothing."""

    def __init__(self, start: Callable[[], Session]) -> None:
        self._start = start
        self._session: Session | None = None

    def get(self) -> Session:
        if self._session is None:
            self._session = self._start()
        return self._session

    def close(self) -> None:
        if self._session is not None:
            self._session.close()


@contextmanager
def _lazily(start: Callable[[], Session]) -> Iterator[_Lazy]:
    lazy = _Lazy(start)
    try:
        yield lazy
    finally:
        lazy.close()


def _prepared(environ: dict[str, str], checkers: Sequence[str], seeds: Sequence[int]) -> Session:
    session = Session(environ)
    try:
        session.prepare(checkers, seeds)
    except WorkerLost:
        session.close()
        raise
    return session


def equivalents(path: Path = EQUIVALENT) -> dict[str, str]:
    """Mutants that change nothing anybody can see, by name, with the argument for it. Raises RegistryError."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8")) or []
        out = {entry["name"]: entry["argument"].strip() for entry in raw}
    except (OSError, yaml.YAMLError, TypeError, KeyError, AttributeError) as error:
        raise RegistryError(f"{path}: {error}") from error
    empty = sorted(name for name, argument in out.items() if len(argument) < 20)
    if empty:
        raise RegistryError(f"{path}: without an argument: {', '.join(empty)}")
    return out


def refutes(word: str, argument: str) -> bool:
    """Whether what became of a mutant refutes the argument that nobody can tell it from the product: that a checker
    found something, that it crashed, or that it hung and the argument does not say `ONLY_LONGER`."""
    return word in ("killed", FOUND, CRASH) or (word == TIMEOUT and ONLY_LONGER not in argument)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a matrix says. problems: one line each; empty if it holds."""

    killed: int
    total: int
    equivalent: int
    problems: tuple[str, ...]

    def __str__(self) -> str:
        word = "failed" if self.problems else "passed"
        return f"mutants {word}: {self.killed} of {self.total} killed, {self.equivalent} argued equivalent"


def judge(rows: Sequence[Row], *, whole: Sequence[str] = (), excused: dict[str, str] | None = None) -> Verdict:
    """Controls find nothing; every mutant is killed, or argued equivalent and nothing refutes it; two independent
    checkers kill in each class.

    whole: classes that were run whole, of which the last is asked. excused: as `equivalents` gives them.
    """
    excused = excused or {}
    problems: list[str] = []
    mutants = [row for row in rows if row.cls]
    for row in rows:
        if not row.cls:
            for name, cell in row.cells.items():
                if cell.words != {NOTHING: cell.run}:
                    words = ", ".join(f"{n} {word}" for word, n in sorted(cell.words.items()))
                    problems.append(f"{row.mutant}: {name}: {words} without any mutant: {cell.clause} {cell.witness}")
        elif row.mutant in excused:
            against = [
                f"{name}: {n} {word}"
                for name, cell in row.cells.items()
                for word, n in sorted(cell.words.items())
                if refutes(word, excused[row.mutant])
            ]
            if against:
                problems.append(
                    f"{row.mutant} (class {row.cls}) is argued equivalent, and is not: {', '.join(against)}"
                )
        elif not row.killers:
            tried = ", ".join(f"{name} {cell}" for name, cell in row.cells.items()) or "no checker"
            problems.append(f"{row.mutant} (class {row.cls}) survives: {tried}")
    for one in by_class(mutants, excused):
        if one.cls in whole and not one.pair:
            problems.append(f"class {one.cls}: no two checkers that share no check function have kills in it")
    counted = [row for row in mutants if row.mutant not in excused]
    return Verdict(
        sum(bool(row.killers) for row in counted), len(counted), len(mutants) - len(counted), tuple(problems)
    )


@dataclass(frozen=True, slots=True)
class ClassResult:
    """Of one class: mutants, those killed, those argued equivalent, and those killed by two independent checkers.

    pair: two checkers that share no check function and have kills in the class, those with the most; empty if none.
    """

    cls: str
    mutants: int
    killed: int
    equivalent: int
    twice: int
    pair: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        pair = " and ".join(f"{name} ({kills})" for name, kills in self.pair) or "no two independent checkers"
        argued = f", {self.equivalent} argued equivalent" if self.equivalent else ""
        return (
            f"class {self.cls}: {self.mutants} mutants, {self.killed} killed{argued}, "
            f"{self.twice} by two independent checkers; {pair}"
        )


def by_class(rows: Sequence[Row], excused: dict[str, str] | None = None) -> list[ClassResult]:
    """The classes of these rows, in order of their letters."""
    checkers = {one.name: one for one in every()}
    out = []
    for cls in sorted({row.cls for row in rows if row.cls}):
        mine = [row for row in rows if row.cls == cls]
        kills = {name: sum(name in row.killers for row in mine) for name in checkers}
        pairs = [
            (a, b)
            for a, b in combinations((name for name in checkers if kills[name]), 2)
            if independent(checkers[a], checkers[b])
        ]
        best = max(pairs, key=lambda pair: (min(kills[n] for n in pair), sum(kills[n] for n in pair)), default=())
        twice = sum(any(a in row.killers and b in row.killers for a, b in pairs) for row in mine)
        argued = sum(row.mutant in (excused or {}) and not row.killers for row in mine)
        killed = sum(bool(row.killers) for row in mine)
        most_first = sorted(((name, kills[name]) for name in best), key=lambda one: (-one[1], one[0]))
        out.append(ClassResult(cls, len(mine), killed, argued, twice, tuple(most_first)))
    return out


def until_pair(
    run: Callable[[Mutant], Sequence[Row]],
    mutants: Sequence[Mutant],
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[list[Row], str]:
    """Rows of mutants of one class, one after the other, until two independent checkers have kills in it; no other is
    begun beyond `seconds`. With them what came of it, in words."""
    rows: list[Row] = []
    end = clock() + seconds
    for done, mutant in enumerate(mutants):
        if clock() >= end:
            return rows, f"no two independent checkers in {seconds:g} s: {done} of {len(mutants)} mutants were run"
        rows += [row for row in run(mutant) if row.cls]
        if by_class(rows)[0].pair:
            break
    return rows, str(by_class(rows)[0]) if rows else "no mutant was run"


def kept(folders: Sequence[Path]) -> list[Row]:
    """The rows that lie in these folders, such as those of shards; of one mutant, that of the first folder. Raises
    RegistryError for folders without any."""
    out: dict[str, Row] = {}
    for folder in folders:
        for path in sorted(folder.glob("*.json")):
            try:
                told = json.loads(path.read_text(encoding="utf-8"))
                row = Row.from_json(told) if "cells" in told else None
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise RegistryError(f"{path}: no row of a kill matrix: {error}") from error
            if row is not None:
                out.setdefault(f"{folder}/{row.mutant}" if not row.cls else row.mutant, row)
    if not out:
        raise RegistryError(f"no rows in {', '.join(map(str, folders))}")
    return list(out.values())


def table(rows: Sequence[Row]) -> str:
    """The matrix as text: a line a mutant; `hits/run`, `*` a kill, `-` a checker that cannot name the class."""
    names = sorted({name for row in rows for name in row.cells})
    width = max((len(row.mutant) for row in rows), default=6)
    lines = [f"{'':{width}} class " + " ".join(f"{name:>14}" for name in names)]
    for row in sorted(rows, key=lambda row: (row.cls, row.mutant)):
        cells = (row.cells.get(name) for name in names)
        marks = " ".join(f"{'-' if c is None else f'{c.hits}/{c.run}' + '*' * c.killed:>14}" for c in cells)
        lines.append(f"{row.mutant:{width}} {row.cls:5} {marks}")
    return "\n".join(lines)
