"""The power of the determinism check: whether a digest of histories depends on every token that somebody got."""

from __future__ import annotations

from dataclasses import replace

import pytest

from blink_core.abi.enums import EventKind, FinishReason
from blink_core.abi.params import SamplingParams
from verification import canonical, determinism
from verification.canonical import Answer
from verification.history import History, Submitted
from verification.program import Program, RequestSpec


def history() -> History:
    """A request with three tokens, and one with two whose cancel waited for the first."""
    plain = RequestSpec((5,), SamplingParams(3))
    found = History(Program((plain, replace(plain, cancel_after=1))), ring=0)
    found.submitted = [Submitted(0, 0, 1, 0), Submitted(1, 1, 1, 1)]
    for slot, count, reason in ((0, 3, FinishReason.LENGTH), (1, 2, FinishReason.CANCELLED)):
        found.events += [
            {"slot": slot, "generation": 1, "kind": EventKind.TOKEN, "index": i, "token": 7 + i, "reason": 0}
            for i in range(count)
        ]
        end = {"slot": slot, "generation": 1, "kind": EventKind.FINISH, "index": count, "token": -1, "reason": reason}
        found.events.append(end)
    return found


def test_every_token_that_counts_is_noticed() -> None:
    """Catches: tokens that the power of the check leaves out, or one behind a cancel, which is luck, asked for."""
    assert determinism.changed_tokens_noticed(history()) == [True] * 4


def test_a_digest_that_leaves_out_tokens_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a power that asks the digest itself which tokens count, and so is never less than all."""
    whole = canonical.answers

    def lossy(of: History) -> list[Answer]:
        return [replace(answer, tokens=answer.tokens[:2]) for answer in whole(of)]

    monkeypatch.setattr(canonical, "answers", lossy)
    assert determinism.changed_tokens_noticed(history()) == [True, True, False, True]
