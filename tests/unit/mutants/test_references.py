"""What HuggingFace gives, kept on disk for all checkers."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from verification.mutants import references


def test_an_answer_is_computed_once_for_all_who_want_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: shards side by side that all compute the same HuggingFace answers, which took most of a machine's time;
    one that reads a file while another still writes it."""
    monkeypatch.setattr(references, "FOLDER", tmp_path)
    first, second = threading.Event(), threading.Event()
    answers: list[object] = []

    def compute() -> list[int]:
        if first.is_set():
            second.set()
            return [2]
        first.set()
        assert not second.wait(1.0)  # the other one would have begun by now
        return [1]

    def want() -> None:
        answers.append(references.remembered("kind", ["told"], compute))

    threads = [threading.Thread(target=want) for _ in range(2)]
    threads[0].start()
    assert first.wait(10.0)
    threads[1].start()
    for thread in threads:
        thread.join(20.0)
    assert answers == [[1], [1]]


def test_a_computation_that_fails_leaves_the_next_one_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: half an answer taken for a whole one; a lock that outlives who held it."""
    monkeypatch.setattr(references, "FOLDER", tmp_path)

    def fails() -> None:
        raise ArithmeticError("no")

    with pytest.raises(ArithmeticError):
        references.remembered("kind", 1, fails)
    assert references.remembered("kind", 1, lambda: "whole") == "whole"
    assert references.remembered("kind", 1, fails) == "whole"
