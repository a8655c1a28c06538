"""Checkers of the scheduler on faults that some of them once let pass: each is noticed in every seed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Literal, NamedTuple

import pytest

from verification.mutants import native, weave
from verification.mutants.checkers import find
from verification.mutants.model import PRODUCT, Span
from verification.mutants.session import Session
from verification.mutants.weave import BuildFailed, Fault, Woven
from verification.mutants.worker import FOUND, NOTHING, Job

SEEDS = (1, 2, 3)


class Planted(NamedTuple):
    """`old` of a device header, an expression or a statement behind `before`, becomes `new`; who must notice."""

    name: str
    file: str
    before: str
    old: str
    new: str
    checker: str
    kind: Literal["expression", "statement"] = "expression"

    def fault(self, identity: int) -> Fault:
        path = PRODUCT / "blink_core" / "device" / self.file
        source = path.read_text(encoding="utf-8")
        assert source.count(self.before + self.old) == 1, f"{self.name}: the text does not stand there once"
        start = source.index(self.before + self.old) + len(self.before)
        file = path.relative_to(PRODUCT).as_posix()
        return Fault(identity, self.name, file, Span(start, start + len(self.old), self.new), self.kind)


_ALL = "c.config->log_level >= uint32_t(LogLevel::ALL)"
_ARENA = "k.arena_tokens - s.prompt_offset", "k.arena_tokens + s.prompt_offset"
_EDGE = "~uint64_t(0) - clock", "~uint64_t(1) - clock"
_LENGTH = "q.total + 1 < c.config->max_len", "q.total + 2 < c.config->max_len"
_TWIN = tuple(f"m.twin {sign} 0 || m.chain != chain || m.parent != parent" for sign in (">=", "<"))
_WORD = "place < w * 64 + 64", "place < w * 63 + 64"
_TABLE = "table_of(uint32_t(q.row));\n  for (uint32_t i = 0; "
_SET = "words[row / 64] >> (row % "
PLANTED = (
    Planted("extent-by-a-sum", "ring.hpp", "s.prompt_len > ", *_ARENA, "lock-step"),
    Planted("deadline-at-the-edge", "ring.hpp", "deadline_us < ", *_EDGE, "lock-step"),
    Planted("lease-of-one", "ring.hpp", "if (", "c.config->lease_us != 0", "c.config->lease_us > 1", "lock-step"),
    Planted("row-writes-one-more", "plan.hpp", _TABLE, "i < n", "i <= n", "lock-step"),
    Planted("decodes-count-this-one", "plan.hpp", "decodes = count_decodes(c, ", "i + 1", "i", "lock-step"),
    Planted("gives-way-to-the-younger", "admission.hpp", "!fits(c, request); ", "--after", "++after", "lock-step"),
    Planted("rings-of-one-word", "admission.hpp", "bits[ring / 64] >> (ring % ", "64", "65", "lock-step"),
    Planted("bias-of-one-member", "ring.hpp", "", "bad_bias = g.any(bad_bias);", ";", "lock-step-group", "statement"),
    Planted("together-at-level-all", "steady.hpp", "h.in_flight == 0 || ", _ALL, "false", "lock-step-group"),
    Planted("twins-both-enter", "steady.hpp", "if (", _TWIN[0], _TWIN[1], "lock-step-group"),
    Planted("pages-beyond-the-moves", "steady.hpp", "STEADY_MOVES) return ", "false", "true", "steady-boundaries"),
    Planted("apart-near-the-limit", "steady.hpp", "", *_LENGTH, "steady-boundaries"),
    Planted("third-word-of-rows", "steady.hpp", "place < rows && ", *_WORD, "steady-boundaries"),
    Planted("row-set-of-63", "next.hpp", _SET, "64", "63", "group-races"),
    Planted("word-by-another-name", "ring.hpp", "g.peek(", "words + 1", "words + 2", "group-races"),
    Planted("pair-too-many", "lifecycle.hpp", "e.logprobs[i] = ", "i < e.count", "i <= e.count", "group-races"),
)


@cache
def _built() -> Woven:
    faults = [planted.fault(identity) for identity, planted in enumerate(PLANTED, 1)]
    return weave.build(faults, PRODUCT / "build" / "mutants-planted")


@contextmanager
def _session(checker: str) -> Iterator[tuple[Session, Woven]]:
    try:
        woven = _built()
    except BuildFailed as failed:
        pytest.skip(str(failed).splitlines()[0])
    with Session(native.environment(woven.path, 0, dict(os.environ))) as session:
        session.prepare([checker], SEEDS)
        yield session, woven


@pytest.mark.timeout(1200)  # the first builds a native module, and `group-races` a program
@pytest.mark.parametrize("checker", sorted({planted.checker for planted in PLANTED}))
def test_planted_faults_are_noticed_in_every_seed(checker: str) -> None:
    """Catches: programs and observables that reach a decision by luck or not at all; a checker that objects to the
    product as it is."""
    with _session(checker) as (session, woven):
        limit = 5 * find(checker).seconds  # of a fixed number of programs: a busy machine is no finding
        for seed in SEEDS:
            clean = session.run(Job(checker, seed, "", 0, limit))
            assert clean.word == NOTHING, f"the product, seed {seed}: {clean.clause}: {clean.witness}"
        for planted in PLANTED:
            if planted.checker == checker:
                runs = (Job(checker, seed, "", woven.identities[planted.name], limit) for seed in SEEDS)
                words = [session.run(job).word for job in runs]
                assert words == [FOUND] * len(SEEDS), f"{planted.name}: {words}"
