"""Each checker of Python mutants: it names one mutant by its class, and finds nothing on the product as it is."""

from __future__ import annotations

import time
from itertools import combinations
from pathlib import Path

import pytest

from verification.mutants import hook
from verification.mutants.checkers import every, families, find, loading, strict
from verification.mutants.checkers.base import Finding, Product, classes_of, independent
from verification.mutants.engines import stop_parts
from verification.mutants.model import by_name, load

KILLS = {
    "family-logits": "window-one-short",
    "family-pages": "window-one-short",
    "family-tokens": "window-one-short",
    "strict-metamorphic": "tile-without-padding",
    "strict-bits": "short-prefill-by-rows",
    "attention-float64": "padded-rows-see-padding",
    "rotary-table-float64": "table-chunk-starts-late",
    "routing-float64": "router-clipped-at-zero",
    "sampler-rule": "draw-salted-by-slot",
    "sampler-huggingface": "top-k-ties-upwards",
    "log-probabilities": "alternatives-relative-to-best",
    "draws-metamorphic": "choice-not-in-counter",
    "stored-weights": "bfloat16-rounded-on-load",
    "config-spellings": "eos-first-of-list",
    "detokeniser": "cut-character-dropped",
    "stop-strings": "stop-held-one-short",
    "prompt-ids": "stop-ids-shown",
    "ring-write-order": "mask-ready-before-bits",
    "ring-watched": "extent-freed-early",
    "ring-ledger": "failed-slot-kept",
    "ring-words": "descriptor-fields-32-bit",
    "http-streams": "held-text-not-streamed",
    "http-huggingface": "alternatives-carried-over",
    "http-edges": "temperature-to-twenty",
    "http-drawn-bounds": "context-one-beyond",
    "liveness-standing": "lease-renewed-late",
    "liveness-gone": "request-deadline-dropped",
}
# Their controls take seconds each: the matrix runs them, and other tests of the suite look for the same on a rig.
UNCONTROLLED = ("liveness-standing", "liveness-gone", "http-streams", "http-edges")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """One family instead of all, and no model whose search for a sensitive seed takes long."""
    monkeypatch.setattr(families, "FAMILIES", ("mistral-window",))
    monkeypatch.setattr(strict, "FAMILIES", ("mistral-full",))
    monkeypatch.setattr(strict, "WAYS", dict(list(strict.WAYS.items())[:2]))
    monkeypatch.setattr(loading, "SPELLED", ("mistral-full",))


def look(checker: str, mutant: str | None, scratch: Path, seed: int = 0) -> Finding | None:
    """What a checker finds with a seed."""
    chosen = None if mutant is None else by_name(mutant)
    product = Product(chosen, hook.environment(chosen, scratch), scratch)
    one = find(checker)
    try:
        return one.run(product, seed, time.monotonic() + 3 * one.seconds)
    finally:
        stop_parts()


@pytest.mark.parametrize("checker", KILLS)
def test_a_checker_kills(checker: str, tmp_path: Path) -> None:
    """Catches: a checker that sees no fault, sees one for another reason, or sees one where there is none."""
    found = look(checker, KILLS[checker], tmp_path)
    assert found is not None
    assert by_name(KILLS[checker]).cls in found.classes, found
    if checker not in UNCONTROLLED:
        assert look(checker, None, tmp_path) is None


def test_failed_step_of_chunks_is_noticed(tmp_path: Path) -> None:
    """Catches: a step that raised and is told as a good one where no row samples: the request goes on over KV that was
    never computed, which no row's own status shows."""
    found = look("ring-watched", "failed-step-is-well", tmp_path)
    assert found is not None
    assert (found.clause, found.classes) == ("a failed step is told", frozenset("X"))
    assert "in chunks of" in found.witness


UNMISSED = (
    ("http-streams", "last-token-of-a-batch", 0),
    ("http-streams", "stop-inside-stop-missed", 1),
    ("stop-strings", "stop-inside-stop-missed", 3),
    ("family-tokens", "longrope-pages-shared", 6),
)


@pytest.mark.parametrize(("checker", "mutant", "seed"), UNMISSED)
def test_a_mutant_is_not_missed(
    checker: str, mutant: str, seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Catches: a checker that sees a fault only where the draw or the engine's pace allows: tokens of several requests
    in one poll, a stop string within another, pages that LongRoPE computed anew."""
    monkeypatch.setattr(families, "FAMILIES", ("phi3-longrope",))
    found = look(checker, mutant, tmp_path, seed)
    assert found is not None
    assert by_name(mutant).cls in found.classes, found


def test_every_checker_is_tried() -> None:
    """Catches: a checker that is added and never shown to find anything."""
    assert {one.name for one in every("python")} == set(KILLS)


@pytest.mark.parametrize("cls", sorted({m.cls for m in load() if m.where == "python"}))
def test_a_class_has_two_independent_checkers(cls: str) -> None:
    """Catches: a class whose checkers all decide by one function."""
    able = [one for one in every("python") if cls in classes_of(one)]
    assert any(independent(a, b) for a, b in combinations(able, 2)), [one.name for one in able]
