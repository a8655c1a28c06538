"""Automatic mutants of the scheduler: a random sample of all that `operators` can make, and the score of the checkers.

The sample is drawn by seed from the mutants that compile, so its score is an unbiased estimate of that of all of them;
beside it stands its 95 % interval (Wilson, 1927). Drawn ones that overlap cannot be woven together and are built apart:
to leave out the later one would draw dense expressions less. A mutant's place in the draw hangs on its own name alone:
a change of the product exchanges those that it touches, and leaves the rest of the sample as it was. Mutants that do
not compile are found by one compiler run over all of them at once, each error put down to the mutant in whose text it
stands.

Mutants that are argued to be equivalent are run like all others, drawn or not: what a checker notices, or what crashes
or hangs, refutes its argument.
"""

from __future__ import annotations

import hashlib
import math
import random
import re
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hil_rigs.scratch import Scratch
from verification.mutants import native, weave
from verification.mutants.checkers.lock_step import GROUP_ONLY
from verification.mutants.matrix import refutes
from verification.mutants.model import PRODUCT, Span
from verification.mutants.operators import Site, sites
from verification.mutants.session import Session
from verification.mutants.weave import BuildFailed, Fault
from verification.mutants.worker import CRASH, FOUND, NOTHING, TIMEOUT, Job

GENERATED = ("abi.hpp",)  # written by blink_core.abi.header, whose own tests hold it to its definition
CHECKERS = ("lock-step", "raw-memory", "cache-recount", "client-ledger", "plan-and-kv", "progress", "log-inputs")
ATTEMPTS = 3  # seeds of each checker: the first that finds something kills
SECONDS = 6.0  # of one seed of these
# In time of their own, for what the others have let pass, with so many seeds: what a group of threads does, the loop's
# own duties, and what the group agrees upon.
LATER = {"lock-step-group": 3, "steady-boundaries": 2, "live-thread": 1, "group-races": 2}
_Z = 1.959964  # 95 %


@dataclass(frozen=True, slots=True)
class Automatic:
    """One mutant by an operator. name: by file, change and surroundings, so that it stays while those do."""

    name: str
    file: str
    line: int
    site: Site


def universe() -> list[Automatic]:
    """All mutants of all operators on the device headers, in order of file and place."""
    out: list[Automatic] = []
    for path in sorted((PRODUCT / weave.FOLDERS[0]).glob("*.hpp")):
        if path.name in GENERATED:
            continue
        source, file = path.read_text(encoding="utf-8"), path.relative_to(PRODUCT).as_posix()
        seen: dict[str, int] = {}
        for site in sites(source):
            around = source[max(0, site.start - 80) : site.end + 80]
            key = hashlib.sha256(f"{file}|{around}|{site.new}|{site.operator}".encode()).hexdigest()[:10]
            seen[key] = seen.get(key, 0) + 1
            name = f"auto-{key}" if seen[key] == 1 else f"auto-{key}-{seen[key]}"
            out.append(Automatic(name, file, source.count("\n", 0, site.start) + 1, site))
    return out


@dataclass(slots=True)
class Sample:
    """A sample that compiles, in order of the draw, and what was asked for beside it.

    builds: mutants that are woven together; those that overlap stand in different ones. universe: how many there are.
    rejected: drawn ones that do not compile. apart: drawn ones that are in another build than the first, because they
    overlap one of it or do not compile beside it. lost: names that were asked for and do not compile.
    """

    mutants: list[Automatic]
    beside: list[Automatic]
    builds: list[list[Automatic]]
    universe: int
    rejected: int
    lost: list[str] = field(default_factory=list)

    @property
    def apart(self) -> int:
        first = {m.name for m in self.builds[0]} if self.builds else set()
        return sum(m.name not in first for m in self.mutants)


def draw(count: int, seed: int, *, names: Collection[str] = ()) -> Sample:
    """`count` mutants that compile, drawn by `seed`, and beside them those of `names`. Raises BuildFailed."""
    every = universe()
    order = sorted(every, key=lambda m: hashlib.sha256(f"automatic/{seed}/{m.name}".encode()).digest())
    builds: list[list[Automatic]] = []
    drawn = good = 0
    while good < count and drawn < len(order):
        fresh = order[drawn : drawn + count - good]
        drawn += len(fresh)
        _place(builds, fresh)
        good = sum(map(len, builds))
    _place(builds, [m for m in order[drawn:] if m.name in names])
    placed = {m.name for build in builds for m in build}
    chosen = [m for m in order[:drawn] if m.name in placed]
    lost = [m.name for m in every if m.name in names and m.name not in placed]
    beside = [m for m in order[drawn:] if m.name in placed]
    return Sample(chosen, beside, builds, len(every), drawn - len(chosen), lost)


def number(mutants: Sequence[Automatic]) -> list[Fault]:
    return [
        Fault(identity, m.name, m.file, Span(m.site.start, m.site.end, m.site.new), m.site.kind)
        for identity, m in enumerate(mutants, 1)
    ]


def overlap(one: Automatic, other: Automatic) -> bool:
    """Whether two mutants cannot be woven together: their texts overlap, and neither holds the other."""
    a, b = sorted((one.site, other.site), key=lambda site: (site.start, -site.end))
    return one.file == other.file and a.start < b.start < a.end < b.end


def _place(builds: list[list[Automatic]], mutants: Sequence[Automatic]) -> None:
    """Adds each mutant that compiles to the first build in which it can stand, or to a new one."""
    waiting, at = list(mutants), 0
    while waiting:
        if at == len(builds):
            builds.append([])
        together, later = list(builds[at]), list[Automatic]()
        for mutant in waiting:
            (later if any(overlap(mutant, other) for other in together) else together).append(mutant)
        apart: list[Automatic] = []
        if len(together) > len(builds[at]):
            builds[at], apart = _compiling(together)
        waiting, at = [*apart, *later], at + 1
    if builds and not builds[-1]:
        builds.pop()


def _compiling(mutants: Sequence[Automatic]) -> tuple[list[Automatic], list[Automatic]]:
    """Those that compile together, and those that compile, but not beside the former."""
    left = list(mutants)
    with Scratch("automatic") as scratch:
        folder = scratch.path
        while left:
            woven = weave.write(number(left), folder)
            bad = _blamed(folder, woven, _errors(folder))
            if bad is None:  # an error that a mutant has elsewhere, such as for a name that it hides
                half = len(left) // 2
                if half == 0:
                    return [], []
                (first, others), (second, more) = _compiling(left[:half]), _compiling(left[half:])
                if len(first) + len(second) == len(left):  # each half for itself, not both together
                    return first, second
                both, apart = _compiling([*first, *second])
                return both, [*others, *more, *apart]
            if not bad:
                return left, []
            left = [m for identity, m in enumerate(left, 1) if identity not in bad]
    return [], []


def _errors(folder: Path) -> list[tuple[str, int, int]]:
    """Errors of the compiler on the woven copy: file, line, column. Raises BuildFailed for output without a place."""
    unit = folder / "unit.cpp"
    unit.write_text(
        '#include "lockstep.hpp"\nstd::vector<int64_t> use(const blink::Config& c) {\n'
        "  return blink::Lockstep(c, 2).run(nullptr, 0);\n}\n",
        encoding="utf-8",
    )
    includes = [f"-I{folder / part}" for part in weave.FOLDERS]
    command = [weave.compiler(), "-std=c++20", "-fsyntax-only", "-w", "-fmax-errors=0", *includes, *weave.includes()]
    done = subprocess.run(
        [*command, str(unit)], capture_output=True, text=True, timeout=weave.BUILD_TIMEOUT_S, check=False
    )
    places = re.findall(rf"^{re.escape(str(folder))}/(\S+?):(\d+):(\d+): (?:fatal )?error", done.stderr, re.MULTILINE)
    if done.returncode and not places:
        raise BuildFailed(f"{' '.join(command)}\n{done.stderr[-3000:]}")
    return [(file, int(line), int(column)) for file, line, column in places]


def _blamed(folder: Path, woven: dict[str, weave.Rendered], errors: list[tuple[str, int, int]]) -> set[int] | None:
    """Numbers of the faults in whose text an error stands, the innermost of each; None if one stands in no fault's."""
    bad: set[int] = set()
    for file, line, column in errors:
        text = (folder / file).read_text(encoding="utf-8")
        rendered = woven.get(file)
        if rendered is None:
            continue
        shift = len(text) - len(rendered.text)  # the guard's include stands before
        at = sum(map(len, text.splitlines(keepends=True)[: line - 1])) + column - 1 - shift
        inside = [
            (end - begin, i)
            for ranges in (rendered.places, rendered.guarded)
            for i, (begin, end) in ranges.items()
            if begin <= at <= end
        ]
        if inside:
            bad.add(min(inside)[1])
    return bad if bad or not errors else None


@dataclass(slots=True)
class Result:
    """What became of one mutant. word: killed, crash, timeout or survived."""

    mutant: Automatic
    word: str
    checker: str = ""
    clause: str = ""

    def to_json(self) -> dict[str, Any]:
        m = self.mutant
        told = {"name": m.name, "file": m.file, "line": m.line, "operator": m.site.operator, "what": m.site.what}
        return told | {"word": self.word, "checker": self.checker, "clause": self.clause}


@dataclass(slots=True)
class Score:
    """Killed of those that are not argued equivalent, with the 95 % interval.

    results: of the sample. argued: of those that are argued equivalent and were not drawn. equivalent: arguments by
    name, of both. unknown: names that are argued and that no operator makes, or that do not compile.
    """

    results: list[Result]
    universe: int
    rejected: int
    apart: int = 0
    equivalent: Mapping[str, str] = field(default_factory=dict)
    argued: list[Result] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    @property
    def counted(self) -> list[Result]:
        return [r for r in self.results if r.mutant.name not in self.equivalent]

    @property
    def refuted(self) -> list[str]:
        """What is wrong with arguments for equivalence: what they are about can be told from the product, or is not
        there."""
        told = [
            f"{r.mutant.name}: {r.word}{f' by {r.checker}' if r.checker else ''}"
            for r in (*self.results, *self.argued)
            if r.mutant.name in self.equivalent and refutes(r.word, self.equivalent[r.mutant.name])
        ]
        return told + [f"{name}: there is no such mutant, or it does not compile" for name in self.unknown]

    @property
    def words(self) -> dict[str, int]:
        return {word: sum(r.word == word for r in self.counted) for word in ("killed", CRASH, TIMEOUT, "survived")}

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.words["killed"], len(self.counted))

    def __str__(self) -> str:
        killed, n = self.words["killed"], len(self.counted)
        low, high = self.interval
        return (
            f"{killed} of {n} automatic mutants killed ({killed / max(1, n):.3f}, 95 % {low:.3f} to {high:.3f}); "
            f"{self.words[CRASH]} crash, {self.words[TIMEOUT]} hang, {self.words['survived']} survive; "
            f"{len(self.results) - n} argued equivalent; sampled from {self.universe}, "
            f"{self.rejected} did not compile, {self.apart} built apart"
        )

    def to_json(self) -> dict[str, Any]:
        low, high = self.interval
        return {
            "killed": self.words["killed"], "counted": len(self.counted), "low": low, "high": high,
            "words": self.words, "universe": self.universe, "rejected": self.rejected, "apart": self.apart,
            "equivalent": list(self.equivalent), "refuted": self.refuted,
            "mutants": [r.to_json() for r in self.results], "argued": [r.to_json() for r in self.argued],
        }  # fmt: skip


def wilson(hits: int, n: int) -> tuple[float, float]:
    """95 % score interval of a share; (0, 1) of nothing."""
    if n == 0:
        return 0.0, 1.0
    p, z2 = hits / n, _Z * _Z
    centre, half = p + z2 / (2 * n), _Z * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    low, high = (centre - half) / (1 + z2 / n), (centre + half) / (1 + z2 / n)
    return (0.0 if hits == 0 else max(0.0, low)), (1.0 if hits == n else min(1.0, high))


def run(
    count: int,
    seed: int,
    *,
    shard: tuple[int, int] = (1, 1),
    equivalent: Mapping[str, str] | None = None,
    argued: bool = True,
    say: Callable[[str], None] = lambda line: None,
) -> Score:
    """Draws, builds and runs a sample; of it every n-th from the i-th on. Raises BuildFailed or WorkerLost.

    equivalent: arguments by name; those of named mutants are not looked at. argued: whether those mutants are run that
    are argued equivalent and not drawn.
    """
    known = {m.name for m in universe()}
    arguments = {name: text for name, text in (equivalent or {}).items() if name.startswith("auto-")}
    sample = draw(count, seed, names=arguments if argued else ())
    part, parts = shard
    mine = {m.name for group in (sample.mutants, sample.beside) for m in group[part - 1 :: parts]}
    rng = random.Random(f"automatic/seeds/{seed}")
    seeds = [rng.randrange(1 << 32) for _ in range(ATTEMPTS)]
    found: dict[str, Result] = {}
    for at, together in enumerate(sample.builds):
        chosen = [m for m in together if m.name in mine]
        if not chosen:
            continue
        folder = PRODUCT / "build" / ("mutants-automatic" if at == 0 else f"mutants-automatic-{at + 1}")
        woven = weave.build(number(together), folder)
        with Session(native.environment(woven.path, 0)) as session:
            session.prepare([*CHECKERS, *LATER], seeds)
            for mutant in chosen:
                result = found[mutant.name] = _judge(session, mutant, woven.identities[mutant.name], seeds)
                where = f"{mutant.file}:{mutant.line}"
                say(f"{result.word:8} {mutant.name} {where} {mutant.site.operator} {mutant.site.what}")
    drawn, beside = ([found[m.name] for m in group if m.name in found] for group in (sample.mutants, sample.beside))
    unknown = [name for name in arguments if name not in known or name in sample.lost]
    its = {r.mutant.name: arguments[r.mutant.name] for r in (*drawn, *beside) if r.mutant.name in arguments}
    return Score(drawn, sample.universe, sample.rejected, sample.apart, its, beside, unknown)


def _judge(session: Session, mutant: Automatic, identity: int, seeds: Sequence[int]) -> Result:
    """Killed by the first checker that finds something; else it crashes, hangs or survives."""
    worst = NOTHING
    solo = [] if mutant.file.endswith(GROUP_ONLY) else [(name, seeds, SECONDS) for name in CHECKERS]
    for checker, drawn, seconds in [*solo, *((name, seeds[:count], 0.0) for name, count in LATER.items())]:
        for seed in drawn:
            outcome = session.run(Job(checker, seed, mutant.name, identity, seconds))
            if outcome.word == FOUND:
                return Result(mutant, "killed", checker, outcome.clause)
            if outcome.word in (CRASH, TIMEOUT):
                worst = outcome.word
                break  # the next checker: this one will not get farther
    return Result(mutant, "survived" if worst == NOTHING else worst)
