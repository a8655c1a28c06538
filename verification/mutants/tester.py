"""Mutants of the tester: the specification and the checkers, mutated by mutmut's operators and run by their own tests.

mutmut's runner works on a copy of the whole tree under one choice of tests; here a sample is drawn by seed, and each
mutant is a module of other text (`hook`) under the tests of its own module, so only mutmut's operators are used. A kill
is a test that fails: an error of collection, or a run that does not end, is none.

Left out are mutants of nothing but words for a reader: see `only_words`. A mutant's name and its place in the draw hang
on the file and the change alone, so that a sample stays while the modules that it is of change elsewhere.

Those that nobody can tell from the suite as it is are argued in `equivalent.yaml`, like the product's: they are run
whether drawn or not, and one that is noticed, or is not there any more, refutes its argument.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hil_rigs.scratch import Scratch
from verification.certificate.supervise import plugin_arguments
from verification.mutants import hook
from verification.mutants.automatic import wilson
from verification.mutants.matrix import refutes
from verification.mutants.model import PRODUCT
from verification.mutants.weave import BuildFailed

SECONDS = 120.0
PREFIX = "tester-"  # of the names of these mutants
_U, _S = "tests/unit/verification", "tests/unit/spec"
_SPEC = (
    f"{_S}/test_rings.py",
    f"{_S}/test_planning.py",
    f"{_S}/test_lockstep.py::test_every_situation_is_reached_in_lock_step",
)
_LINEAR = (f"{_U}/test_linearisability.py", f"{_U}/test_linearisability_simulated.py")
# Module below `verification` -> tests that must notice what is wrong with it.
TESTS: dict[str, tuple[str, ...]] = {
    **{f"spec/{name}.py": _SPEC for name in ("kv", "life", "machine", "plan", "ring", "state")},
    "properties/queue_ordering.py": (f"{_U}/test_properties_queue_ordering.py",),
    "properties/service_order.py": (f"{_U}/test_properties_service_order.py",),
    "properties/kv_recount.py": (f"{_U}/test_properties_kv_conservation.py",),
    "properties/kv_page_life.py": (f"{_U}/test_properties_kv_conservation.py",),
    "properties/prefix_cache.py": (f"{_U}/test_properties_prefix_cache.py",),
    "properties/streaming.py": (f"{_U}/test_properties_streaming.py",),
    "linearisability/specification.py": _LINEAR,
    "linearisability/search.py": _LINEAR,
    "criterion/kv.py": (f"{_U}/test_criterion_kv.py",),
    "criterion/tokens.py": (f"{_U}/test_criterion_tokens.py",),
}


@dataclass(frozen=True, slots=True)
class TesterMutant:
    """One mutant of a module of the suite. text: of the whole module. what: the change, for a reader."""

    name: str
    file: str
    line: int
    what: str
    text: str


def draw(count: int, seed: int, names: Collection[str] = ()) -> tuple[list[TesterMutant], list[TesterMutant], int]:
    """A sample of all mutants of the modules of `TESTS`, those of `names` that are not in it, and how many there are.
    Raises BuildFailed without mutmut."""
    try:
        with contextlib.chdir(PRODUCT):  # mutmut looks there for its configuration, pyproject.toml
            from mutmut.mutation.file_mutation import create_mutations

            of = {file: create_mutations(file, _source(file)) for file in TESTS}
    except ImportError as error:
        raise BuildFailed(
            "mutants of the tester are made with mutmut's operators: pip install '.[mutation]'"
        ) from error
    every: list[tuple[str, str, Any, Any]] = []  # name, file, node, its replacement
    seen: Counter[str] = Counter()
    for file, made in of.items():
        for old, new in ((m.original_node, m.mutated_node) for m in made[1]):
            change = f"{file}|{_code(old)}|{_code(new)}"
            seen[change] += 1
            if not only_words(old, new):
                key = hashlib.sha256(f"{change}|{seen[change]}".encode()).hexdigest()[:10]
                every.append((f"{PREFIX}{key}", file, old, new))
    sample: list[TesterMutant] = []
    beside: list[TesterMutant] = []
    for name, file, old, new in sorted(every, key=lambda one: hashlib.sha256(f"{seed}/{one[0]}".encode()).digest()):
        full = len(sample) == count
        if full and name not in names:
            continue
        text, source = of[file][0].deep_replace(old, new).code, _source(file)
        if text == source:
            continue
        lines = zip(source.splitlines(), text.splitlines(), strict=False)
        line = next((at for at, (a, b) in enumerate(lines, 1) if a != b), 0)
        what = " -> ".join(" ".join(_code(node).split())[:80] for node in (old, new))
        (beside if full else sample).append(TesterMutant(name, file, line, what, text))
    return sample, beside, len(every)


def _code(node: Any) -> str:
    import libcst

    return str(libcst.Module([]).code_for_node(node))


def only_words(old: Any, new: Any) -> bool:
    """Whether a libcst node differs from its replacement in nothing but a text for readers: a string that is changed or
    is None instead, with a blank in what it says. One without may be a name that is compared, and stays, as does one
    that begins with the name of a clause."""
    import libcst

    if isinstance(old, libcst.BaseString) or isinstance(new, libcst.BaseString):
        return _is_prose(old)
    if isinstance(old, libcst.Call) and isinstance(new, libcst.Call) and len(old.args) == len(new.args):
        pairs = [(a, b) for a, b in zip(old.args, new.args, strict=True) if not a.deep_equals(b)]
        exchanged = [(a.value, b.value) for a, b in pairs if a.keyword is b.keyword or a.keyword.deep_equals(b.keyword)]
        same = old.func.deep_equals(new.func) and len(exchanged) == len(pairs) == 1
        return same and _is_none(exchanged[0][1]) and _is_prose(exchanged[0][0])
    if isinstance(old, libcst.Assign) and isinstance(new, libcst.Assign):
        return _is_none(new.value) and _is_prose(old.value)
    return False


def _is_none(node: Any) -> bool:
    return _code(node) == "None"


def _is_prose(node: Any) -> bool:
    """Whether a node is a string literal, an f-string or several of them, with a blank in what it says."""
    import libcst

    if isinstance(node, libcst.ConcatenatedString):
        return _is_prose(node.left) or _is_prose(node.right)
    if isinstance(node, libcst.FormattedString):
        return _says(*(part.value for part in node.parts if isinstance(part, libcst.FormattedStringText)))
    return isinstance(node, libcst.SimpleString) and _says(str(node.evaluated_value))


def _says(*texts: str) -> bool:
    return any(" " in text for text in texts) and not re.match(r"[A-Z]+\d+\b", texts[0])


def _source(file: str) -> str:
    return (PRODUCT / "verification" / file).read_text(encoding="utf-8")


@dataclass(slots=True)
class TesterResult:
    """word: killed, survived, error or timeout."""

    mutant: TesterMutant
    word: str


def judge(mutant: TesterMutant, folder: Path) -> TesterResult:
    """Runs the tests of the mutant's module with it in force."""
    source = folder / f"{mutant.name}.txt"
    source.write_text(mutant.text, encoding="utf-8")
    module = f"verification.{mutant.file.removesuffix('.py').replace('/', '.')}"
    environ = dict(os.environ)
    environ[hook.VARIABLE] = json.dumps([{"name": mutant.name, "module": module, "source": str(source)}])
    environ[hook.HOOK] = str(hook.__file__)
    environ["PYTHONPATH"] = os.pathsep.join([str(hook.SITE), environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-o", f"cache_dir={folder / 'cache'}"]
    command += [*plugin_arguments(), *TESTS[mutant.file]]
    try:
        done = subprocess.run(
            command, cwd=PRODUCT, env=environ, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return TesterResult(mutant, "timeout")
    return TesterResult(mutant, {0: "survived", 1: "killed"}.get(done.returncode, "error"))


@dataclass(slots=True)
class TesterScore:
    """Killed of those of a sample that are not argued equivalent, with its 95 % interval.

    argued: of those that are argued equivalent and were not drawn. equivalent: arguments by name. unknown: names that
    are argued and that no operator makes.
    """

    results: list[TesterResult]
    universe: int
    argued: list[TesterResult] = field(default_factory=list)
    equivalent: Mapping[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)

    @property
    def counted(self) -> list[TesterResult]:
        return [r for r in self.results if r.mutant.name not in self.equivalent]

    @property
    def refuted(self) -> list[str]:
        """What is wrong with arguments for equivalence."""
        told = [
            f"{r.mutant.name}: {r.word}"
            for r in (*self.results, *self.argued)
            if (argument := self.equivalent.get(r.mutant.name)) and (r.word == "error" or refutes(r.word, argument))
        ]
        return told + [f"{name}: there is no such mutant" for name in self.unknown]

    def __str__(self) -> str:
        n, killed = len(self.counted), sum(r.word == "killed" for r in self.counted)
        low, high = wilson(killed, n)
        rest = {word: sum(r.word == word for r in self.counted) for word in ("error", "timeout", "survived")}
        words = ", ".join(f"{count} {word}" for word, count in rest.items())
        return (
            f"{killed} of {n} mutants of the tester killed ({killed / max(1, n):.3f}, 95 % {low:.3f} to {high:.3f}); "
            f"{words}; {len(self.results) - n} argued equivalent; sampled from {self.universe}"
        )

    def to_json(self) -> dict[str, Any]:
        keys = ("name", "file", "line", "what")
        rows, argued = (
            [{key: getattr(r.mutant, key) for key in keys} | {"word": r.word} for r in group]
            for group in (self.results, self.argued)
        )
        told = {"universe": self.universe, "score": str(self), "mutants": rows, "argued": argued}
        return told | {"equivalent": list(self.equivalent), "refuted": self.refuted}


def run(
    count: int,
    seed: int,
    *,
    shard: tuple[int, int] = (1, 1),
    equivalent: Mapping[str, str] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> TesterScore:
    """Runs a sample and those that are argued equivalent; of both every n-th from the i-th on. Raises BuildFailed where
    mutmut or the tests are missing.

    equivalent: arguments by name; those of the product's mutants are not looked at.
    """
    if not (PRODUCT / "tests").is_dir():
        raise BuildFailed(f"{PRODUCT} holds no tests: mutants of the tester are run in a clone of Blink")
    arguments = {name: text for name, text in (equivalent or {}).items() if name.startswith(PREFIX)}
    sample, beside, universe = draw(count, seed, arguments)
    ran: list[list[TesterResult]] = [[], []]
    with Scratch("tester") as scratch:
        for results, mutants in zip(ran, (sample, beside), strict=True):
            for mutant in mutants[shard[0] - 1 :: shard[1]]:
                results.append(judge(mutant, scratch.path))
                say(f"{results[-1].word:8} {mutant.name} verification/{mutant.file}:{mutant.line} {mutant.what}")
    unknown = sorted(arguments.keys() - {m.name for m in (*sample, *beside)})
    return TesterScore(ran[0], universe, ran[1], arguments, unknown)
