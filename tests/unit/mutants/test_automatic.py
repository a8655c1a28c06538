"""Sampled mutants, of the scheduler and of the tester: what is drawn, what is left out, and what a result hangs on."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from verification.mutants import automatic, native, sources, tester, weave
from verification.mutants.automatic import CHECKERS, LATER, Automatic, Result, Score
from verification.mutants.checkers import NATIVE, all_modules
from verification.mutants.model import PRODUCT
from verification.mutants.operators import Site, sites
from verification.mutants.weave import Woven
from verification.mutants.worker import CRASH, FOUND, NOTHING, TIMEOUT, Job, Outcome
from verification.result import Verdict
from verification.suite import test_mutants
from verification.thresholds import default_thresholds

TEXT = "BLINK_FN void f(uint32_t n) {\n  static_assert(sizeof(A) == 4);\n  use(n + 1);\n}\n"


def mutant(name: str, file: str = "blink_core/device/ring.hpp") -> Automatic:
    return Automatic(name, file, 1, Site("deletion", 0, 1, ";", "statement", "deleted"))


def test_what_only_a_compiler_sees_is_not_deleted() -> None:
    """Catches: mutants that no running program can differ by; statements that are left out with them."""
    deleted = [site.what for site in sites(TEXT) if site.operator == "deletion"]
    assert deleted == ["deleted: use(n + 1);"]


def test_what_only_a_gpu_compiler_sees_has_no_mutants() -> None:
    """Catches: mutants that survive because no host build holds them; an `#else` or an inner `#endif` that is taken for
    the end of what the host leaves out, or for more of it."""
    text = (
        "#if defined(__CUDACC__)\nvoid gpu() {\n#if defined(OTHER)\n  one(1);\n#endif\n  two(2);\n}\n#endif\n"
        "void f() {\n#if defined(__CUDA_ARCH__)\n  three(3);\n#else\n  four(4);\n#endif\n  five(5);\n}\n"
    )
    deleted = [site.what for site in sites(text) if site.operator == "deletion"]
    assert deleted == ["deleted: four(4);", "deleted: five(5);"]


def test_sample_stays_while_the_product_changes_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a sample that is another one after any edit, so that no argument and no result of it lasts."""
    every = [mutant(f"auto-{i}") for i in range(200)]
    monkeypatch.setattr(automatic, "_compiling", lambda chosen: (list(chosen), []))
    monkeypatch.setattr(automatic, "universe", lambda: every)
    before = [m.name for m in automatic.draw(50, 1).mutants]
    monkeypatch.setattr(automatic, "universe", lambda: [mutant("auto-new"), *every[:10], *every[11:]])
    after = [m.name for m in automatic.draw(50, 1).mutants]
    assert len(set(before) - set(after)) <= 2
    assert before[:5] != [m.name for m in every[:5]]
    assert before != [m.name for m in automatic.draw(50, 2).mutants]


@pytest.mark.parametrize(
    ("told", "word", "killer"),
    [
        ({}, "survived", ""),
        ({"lock-step": TIMEOUT, "progress": FOUND}, "killed", "progress"),
        ({"lock-step": CRASH, "group-races": FOUND}, "killed", "group-races"),
        ({"live-thread": CRASH}, "crash", ""),
        ({"plan-and-kv": TIMEOUT}, "timeout", ""),
    ],
)
def test_word_of_a_mutant(told: dict[str, str], word: str, killer: str) -> None:
    """Catches: a crash or a hang that counts as a kill, or that keeps later checkers from one."""
    asked: list[str] = []

    class Told:
        def run(self, job: Job) -> Outcome:
            asked.append(job.checker)
            return Outcome(told.get(job.checker, NOTHING), "clause", [])

    session: Any = Told()
    result = automatic._judge(session, mutant("auto-0"), 1, [1, 2, 3])
    assert (result.word, result.checker) == (word, killer)
    if word != "killed":
        assert list(dict.fromkeys(asked)) == [*CHECKERS, *LATER]
    asked.clear()
    automatic._judge(session, mutant("auto-1", "blink_core/device/steady.hpp"), 1, [1, 2, 3])
    assert not set(asked) & set(CHECKERS), "a group of one never comes there"


def test_shares_deal_out_one_sample(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches: shares that draw a sample each, or of which two run the same part and nobody another; one that fails no
    one though it lets most pass; a share whose rate is not handed on."""
    asked: list[tuple[int, int, tuple[int, int]]] = []
    record: Any = Mock()
    run: Any = SimpleNamespace(derive_seed=lambda *names: hash(names))

    def ran(killed: int) -> Callable[..., Score]:
        def made(count: int, seed: int, *, shard: tuple[int, int], **rest: Any) -> Score:
            asked.append((count, seed, shard))
            return Score(
                [Result(mutant(f"auto-{i}"), "killed" if i < killed else "survived") for i in range(10)], 10, 0
            )

        return made

    monkeypatch.setattr(automatic, "run", ran(9))
    marks: Any = getattr(test_mutants.test_automatic, "pytestmark")  # noqa: B009
    (shares,) = (mark.args[1] for mark in marks if mark.name == "parametrize")
    for share in shares:
        test_mutants.test_automatic(Mock(), share, tmp_path, record, default_thresholds(), run)
    assert [shard for _, _, shard in asked] == [(i, len(shares)) for i in range(1, len(shares) + 1)]
    assert len({(count, seed) for count, seed, _ in asked}) == 1
    record.planted_fault.assert_called_with("automatic mutants", caught=9, planted=10)
    monkeypatch.setattr(automatic, "run", ran(5))
    test_mutants.test_automatic(Mock(), 1, tmp_path, record, default_thresholds(), run)
    verdicts = [call.args[0].verdict for call in record.check.call_args_list]
    assert verdicts == [Verdict.VALID] * len(shares) + [Verdict.INVALID]


def test_argument_that_a_kill_refutes_is_told() -> None:
    """Catches: a mutant that is left out of the score by an argument, though a checker tells it from the product."""
    results = [Result(mutant("auto-0"), "killed", "progress"), Result(mutant("auto-1"), "survived")]
    score = Score(results, 10, 0, equivalent={"auto-0": "because", "auto-1": "because"})
    assert score.refuted == ["auto-0: killed by progress"]
    assert Score(results, 10, 0, equivalent={"auto-1": "because"}).refuted == []


@pytest.mark.parametrize(
    ("word", "argument", "wrong"),
    [
        ("killed", "It only takes longer.", True),
        (CRASH, "It only takes longer.", True),
        (TIMEOUT, "Nobody reads it.", True),
        (TIMEOUT, "It only takes longer.", False),
        ("survived", "Nobody reads it.", False),
    ],
)
def test_what_refutes_an_argument(word: str, argument: str, wrong: bool) -> None:
    """Catches: a mutant that is argued equivalent and crashes or hangs, taken for one that nobody can tell; one that
    was not drawn, and whose argument nobody looks at."""
    result = Result(mutant("auto-0"), word)
    for score in (
        Score([result], 10, 0, equivalent={"auto-0": argument}),
        Score([], 10, 0, equivalent={"auto-0": argument}, argued=[result]),
    ):
        assert bool(score.refuted) is wrong
        assert score.counted == []


def test_argued_mutants_are_run_whatever_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: an argument that holds because its mutant is never run, or is not there any more."""
    every = [placed(f"auto-{i}", 10 * i, 10 * i + 5) for i in range(20)]
    monkeypatch.setattr(automatic, "universe", lambda: every)
    monkeypatch.setattr(automatic, "_compiling", lambda all_: ([m for m in all_ if m.name != "auto-7"], []))
    monkeypatch.setattr(weave, "build", lambda faults, folder: Woven(folder, {f.name: 1 for f in faults}))
    monkeypatch.setattr(native, "environment", lambda path, identity: {})
    monkeypatch.setattr(automatic, "Session", Silent)
    monkeypatch.setattr(automatic, "_judge", lambda session, m, *rest: Result(m, "survived"))
    arguments = dict.fromkeys(("auto-3", "auto-4", "auto-7", "auto-99", "named"), "because")
    for shards in (1, 2):
        parts = [automatic.run(0, 1, equivalent=arguments, shard=(i + 1, shards)) for i in range(shards)]
        assert sorted(r.mutant.name for score in parts for r in score.argued) == ["auto-3", "auto-4"]
        for score in parts:
            assert score.results == []
            assert [one.split(":")[0] for one in score.refuted] == ["auto-7", "auto-99"]
    score = automatic.run(19, 1, equivalent=arguments)
    assert (len(score.results), score.argued, len(score.counted)) == (19, [], 17)
    assert automatic.run(0, 1, equivalent=arguments, argued=False).argued == []


def placed(name: str, start: int, end: int) -> Automatic:
    """A mutant of that text."""
    return Automatic(name, "blink_core/device/ring.hpp", 1, Site("relational", start, end, "x", "expression", "<"))


class Silent:
    """A session that runs nothing."""

    def __init__(self, environ: Any) -> None:
        pass

    def prepare(self, checkers: Any, seeds: Any) -> None:
        pass

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *raised: object) -> None:
        pass


def test_overlapping_mutants_are_drawn_and_built_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: mutants of dense expressions that are left out because another was drawn before, told as such that do
    not compile: the score would be of sparse code."""
    crossing = [placed(f"auto-{i}", i, i + 10) for i in range(3)]
    nested, elsewhere, broken = placed("auto-n", 2, 4), placed("auto-e", 50, 60), placed("auto-b", 70, 80)
    every = [*crossing, nested, elsewhere, broken]
    monkeypatch.setattr(automatic, "universe", lambda: every)
    monkeypatch.setattr(automatic, "_compiling", lambda all_: ([m for m in all_ if m is not broken], []))
    sample = automatic.draw(5, 1)
    if broken not in sample.mutants:
        sample = automatic.draw(6, 1)
    assert sorted(m.name for m in sample.mutants) == ["auto-0", "auto-1", "auto-2", "auto-e", "auto-n"]
    assert (len(sample.builds), sample.rejected, sample.apart) == (3, 1, 2)
    for together in sample.builds:
        assert not any(automatic.overlap(a, b) for a in together for b in together)
    assert "1 did not compile, 2 built apart" in str(Score([], 6, sample.rejected, sample.apart))


def test_mutants_that_compile_alone_only_are_built_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: mutants lost because others beside them keep them from compiling."""
    every = [placed(f"auto-{i}", 10 * i, 10 * i + 5) for i in range(8)]
    monkeypatch.setattr(automatic, "universe", lambda: every)
    monkeypatch.setattr(weave, "write", lambda faults, folder: {f.name: f for f in faults})
    monkeypatch.setattr(automatic, "_errors", lambda folder: [])
    # Two of them hide a name from each other: an error in nobody's text.
    hidden = {"auto-1", "auto-6"}
    monkeypatch.setattr(automatic, "_blamed", lambda folder, woven, errors: None if hidden <= woven.keys() else set())
    sample = automatic.draw(8, 1)
    assert (len(sample.mutants), sample.rejected) == (8, 0)
    assert not any(hidden <= {m.name for m in together} for together in sample.builds)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"no such page"', '"XXno such pageXX"', True),
        ('"one-state"', '"XXone-stateXX"', False),
        (r'"\N{REPLACEMENT CHARACTER}"', r'"XX\N{REPLACEMENT CHARACTER}XX"', False),
        ('"V4: after its end"', '"v4: after its end"', False),
        ('bad("refs", f"page {page} is lost")', 'bad("refs", None)', True),
        ('bad("refs", f"page {page} is lost")', 'bad(None, f"page {page} is lost")', False),
        ('bad("refs", f"page {page} is lost")', 'bad("refs", )', False),
        ("bad(page, found)", "bad(page, None)", False),
        ("1 + 2", "1 - 2", False),
    ],
)
def test_only_words_for_readers_are_left_out(old: str, new: str, words: bool) -> None:
    """Catches: mutants of logic or of names that are compared, left out of the score as words; words that count."""
    libcst = pytest.importorskip("libcst")
    assert tester.only_words(libcst.parse_expression(old), libcst.parse_expression(new)) is words


def test_a_message_that_is_not_made_is_words() -> None:
    """Catches: a value other than a message, whose loss is left out of the score."""
    libcst = pytest.importorskip("libcst")

    def assigned(text: str) -> Any:
        return libcst.parse_statement(text).body[0]

    assert tester.only_words(assigned('message = f"{n} rows are bad"'), assigned("message = None"))
    assert not tester.only_words(assigned("split = [1, 2]"), assigned("split = None"))


def test_arguments_about_the_tester_are_held_to_its_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a mutant of the tester that an argument takes out of the score though a test notices it, or though it is
    not there any more; one that survives and is counted though it is argued; arguments about the product asked here."""
    words = {"tester-0": "killed", "tester-1": "survived", "tester-2": "killed", "tester-3": "error"}
    made = [tester.TesterMutant(name, "spec/kv.py", 1, "a -> b", "") for name in words]

    def draw(count: int, seed: int, names: Collection[str]) -> tuple[list[Any], list[Any], int]:
        return made[:count], [m for m in made[count:] if m.name in names], 10

    monkeypatch.setattr(tester, "draw", draw)
    monkeypatch.setattr(tester, "judge", lambda mutant, folder: tester.TesterResult(mutant, words[mutant.name]))
    arguments = {"tester-1": "because", "auto-0": "because"}
    score = tester.run(2, 1, equivalent=arguments)
    assert (score.refuted, [r.mutant.name for r in score.counted]) == ([], ["tester-0"])
    assert str(score).startswith("1 of 1 mutants of the tester killed")
    wrong = tester.run(2, 1, equivalent={f"tester-{i}": "because" for i in (0, 1, 2, 3, 9)})
    told = ["tester-0: killed", "tester-2: killed", "tester-3: error", "tester-9: there is no such mutant"]
    assert wrong.refuted == told
    assert tester.run(2, 1).refuted == []


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Appends a line to a file of ours, as the digest sees it."""
    read = Path.read_bytes
    changed: set[Path] = set()
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + (b"#" if path in changed else b""))

    def change(name: str) -> None:
        changed.clear()
        changed.add(PRODUCT / name)

    return change


def test_what_a_row_hangs_on(copied: Callable[[str], None]) -> None:
    """Catches: results that are kept though what they were made with has changed, or thrown away for a page of text."""

    def digests() -> tuple[str, str]:
        return sources.digest("native", NATIVE), sources.digest("python", all_modules())

    before = digests()
    both = ("verification/spec/ring.py", "verification/mutants/worker.py", "verification/thresholds.yaml")
    native = ("tests/planted/threads.cpp", "CMakeLists.txt")
    python = ["blink_core/frontend/tokenizer.py", "verification/mutants/checkers/text.py", "hil_rigs/stepped.py"]
    python += ["hil_rigs/rigs/local.yaml", "verification/oracles/hf.py"]
    neither = ["README.md", "verification/certificate/report.py", "hil_rigs/gpu/bench.py"]
    neither += ["blink_core/device/kernels/moe.cu", "verification/mutants/equivalent.yaml"]
    shared = ("blink_core/device/ring.hpp", "verification/mutants/site/sitecustomize.py")
    for name in (*both, *shared):
        copied(name)
        assert all(a != b for a, b in zip(digests(), before, strict=True)), name
    for name in native:
        copied(name)
        assert digests()[0] != before[0], name
    for name in python:
        copied(name)
        assert digests()[1] != before[1], name
    for name in neither:
        copied(name)
        assert digests() == before, name
