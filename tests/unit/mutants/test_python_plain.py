"""A plain single request passes with every Python mutant that is not numeric: each hides behind a condition."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.tiny_models import tiny_model
from verification.mutants import hook
from verification.mutants.engines import SIZES
from verification.mutants.model import Mutant, load
from verification.mutants.parts import Parts

BODY = {"model": "tiny", "prompt": "The first rule", "max_tokens": 8, "temperature": 0}


def together(mutants: Sequence[Mutant]) -> list[list[Mutant]]:
    """Groups of mutants whose texts do not overlap, so that each group can be in force at once."""
    groups: list[list[Mutant]] = []
    taken: list[dict[str, list[tuple[int, int]]]] = []
    for mutant in mutants:
        span = mutant.locate(mutant.path.read_text(encoding="utf-8"))
        for group, places in zip(groups, taken, strict=True):
            mine = places.setdefault(mutant.file, [])
            if all(span.end + 200 <= first or stop + 200 <= span.start for first, stop in mine):
                group.append(mutant)
                mine.append((span.start, span.end))
                break
        else:
            groups.append([mutant])
            taken.append({mutant.file: [(span.start, span.end)]})
    return groups


def answer(mutants: Sequence[Mutant], folder: Path) -> Any:
    """The plain answer of a product with all these mutants in force."""
    texts: dict[str, str] = {}
    for file in {m.file for m in mutants}:
        mine = [m for m in mutants if m.file == file]
        source = mine[0].path.read_text(encoding="utf-8")
        for span in sorted((m.locate(source) for m in mine), key=lambda span: -span.start):
            source = source[: span.start] + span.new + source[span.end :]
        texts[mine[0].module] = source
    folder.mkdir()
    with Parts(hook.environment_of(texts, folder)) as parts:
        served = parts.keep("hil_rigs.served:ServedModel", str(tiny_model("llama-gqa3").path), str(folder), SIZES)
        reply = httpx.post(f"{served.call('url')}/v1/completions", json=BODY, timeout=20.0)
        served.call("close")
    return reply.json()["choices"], reply.json()["usage"]


def test_a_plain_request_passes(tmp_path: Path) -> None:
    """Catches: a mutant that any request would show, which says nothing of a checker."""
    clean = answer([], tmp_path / "clean")
    assert clean[1]["completion_tokens"] >= 2
    broken: list[str] = []
    plain = [m for m in load() if m.where == "python" and not m.numeric]
    for number, group in enumerate(together(plain)):
        if answer(group, tmp_path / f"group{number}") != clean:
            # One of the group: each by itself says which.
            broken += [m.name for m in group if answer([m], tmp_path / m.name) != clean]
    assert broken == []
