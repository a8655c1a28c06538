"""Mutants of the tester: the specification and the checkers, mutated by mutmut's operators and run by their own tests.

mutmut's runner works on a copy of the whole tree under one choice of tests; here a sample is drawn by seed, and each
mutant is a module of other text (`hook`) under the tests of its own module, so only mutmut's operators are used. A kill
is a test that fails: an error of collection, or a run that does not end, is none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verification.certificate.certify import plugin_arguments
from verification.mutants import hook
from verification.mutants.automatic import wilson
from verification.mutants.model import PRODUCT
from verification.mutants.weave import BuildFailed

SECONDS = 120.0
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


def draw(count: int, seed: int) -> tuple[list[TesterMutant], int]:
    """A sample of all mutants of the modules of `TESTS`, and how many there are. Raises BuildFailed without mutmut."""
    try:
        with contextlib.chdir(PRODUCT):  # mutmut looks there for its configuration, pyproject.toml
            import libcst
            from mutmut.mutation.file_mutation import create_mutations

            of = {file: create_mutations(file, _source(file)) for file in TESTS}
    except ImportError as error:
        raise BuildFailed("mutants of the tester are made with mutmut's operators: pip install mutmut") from error
    every = [(file, i) for file, made in of.items() for i in range(len(made[1]))]
    order = random.Random(f"tester/{seed}").sample(every, len(every))
    out: list[TesterMutant] = []
    for file, i in order:
        if len(out) == count:
            break
        module, mutations = of[file][:2]
        old, new = mutations[i].original_node, mutations[i].mutated_node
        text, source = module.deep_replace(old, new).code, _source(file)
        if text == source:
            continue
        lines = zip(source.splitlines(), text.splitlines(), strict=False)
        line = next((at for at, (a, b) in enumerate(lines, 1) if a != b), 0)
        words = [" ".join(libcst.Module([]).code_for_node(node).split())[:80] for node in (old, new)]
        key = hashlib.sha256(f"{file}|{i}|{text}".encode()).hexdigest()[:10]
        out.append(TesterMutant(f"tester-{key}", file, line, " -> ".join(words), text))
    return out, len(every)


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
    """Killed of a sample, with its 95 % interval."""

    results: list[TesterResult]
    universe: int

    def __str__(self) -> str:
        n, killed = len(self.results), sum(r.word == "killed" for r in self.results)
        low, high = wilson(killed, n)
        rest = {word: sum(r.word == word for r in self.results) for word in ("error", "timeout", "survived")}
        words = ", ".join(f"{count} {word}" for word, count in rest.items())
        return (
            f"{killed} of {n} mutants of the tester killed ({killed / max(1, n):.3f}, 95 % {low:.3f} to {high:.3f}); "
            f"{words}; sampled from {self.universe}"
        )

    def to_json(self) -> dict[str, Any]:
        keys = ("name", "file", "line", "what")
        rows = [{key: getattr(r.mutant, key) for key in keys} | {"word": r.word} for r in self.results]
        return {"universe": self.universe, "score": str(self), "mutants": rows}


def run(
    count: int, seed: int, *, shard: tuple[int, int] = (1, 1), say: Callable[[str], None] = lambda line: None
) -> TesterScore:
    """Runs a sample; of it every n-th from the i-th on. Raises BuildFailed where mutmut or the tests are missing."""
    if not (PRODUCT / "tests").is_dir():
        raise BuildFailed(f"{PRODUCT} holds no tests: mutants of the tester are run in a clone of Blink")
    sample, universe = draw(count, seed)
    results: list[TesterResult] = []
    with tempfile.TemporaryDirectory(prefix="blink-tester-") as name:
        for mutant in sample[shard[0] - 1 :: shard[1]]:
            results.append(judge(mutant, Path(name)))
            say(f"{results[-1].word:8} {mutant.name} verification/{mutant.file}:{mutant.line} {mutant.what}")
    return TesterScore(results, universe)
