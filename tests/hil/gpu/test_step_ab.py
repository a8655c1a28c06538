"""How variants of a decode step are compared; what needs no GPU."""

from __future__ import annotations

import pytest

from hil_rigs.gpu.step_ab import VARIANTS, Found, chosen, main, rounds_of, table


def test_samples_are_taken_there_and_back() -> None:
    """Catches: a variant that always follows the same other one, or that is left out of a round."""
    assert rounds_of(["a", "b", "c"], 3) == ["a", "b", "c", "c", "b", "a", "a", "b", "c"]


def test_a_dense_model_skips_what_is_a_mixtures() -> None:
    """Catches: time of the device spent on variants that are equal there, or a variant that is measured nowhere."""
    assert chosen("qwen-1", list(VARIANTS)) == list(VARIANTS)
    dense = chosen("llama-1", list(VARIANTS))
    assert set(VARIANTS) - set(dense) == {"gate-9", "gate-14", "ahead-0", "ahead-64"}


def test_ratio_is_of_the_same_round() -> None:
    """Catches: a ratio of medians, which drift between rounds moves; a difference that is not printed."""
    found = [Found("qwen-1", "base", [100.0, 200.0, 400.0], True), Found("qwen-1", "join", [90.0, 180.0, 390.0], False)]
    lines = table(found)
    assert lines[1].split() == ["qwen-1", "base", "200.0", "100.0", "400.0", "1.0000", "same"]
    assert lines[2].split() == ["qwen-1", "join", "180.0", "90.0", "390.0", "0.9000", "DIFFER"]


@pytest.mark.parametrize("arguments", [["--steps", "qwen-2"], ["--variants", "besides"], ["--rounds", "0"]])
def test_what_is_unknown_is_refused(arguments: list[str]) -> None:
    """Catches: a misspelt variant that is silently not measured."""
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
