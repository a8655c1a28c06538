"""Corpus rows B, D, T and X that the host can show: what arrives in which order in a ring, ends, and limits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from blink_core.abi.enums import ErrorReason, FinishReason, LogKind
from tests.scenarios.common import ERROR, FINISH, alone, of, started, submit, submit_tokens
from verification.scheduler.front_end import Submission
from verification.scheduler.harness import VOCAB, Harness, small_config

WORD = 8


@pytest.mark.parametrize("order", ["ascending", "descending", "shuffled"])
@pytest.mark.parametrize("parts", [["slots"], ["arena"], ["slots", "arena"]], ids="+".join)
def test_d01_d05_d07_payload_that_arrives_after_its_notification(parts: list[str], order: str) -> None:
    """D01, D05, D07. Catches: a request taken because its word, or its last byte, is there while the rest is not.

    Condition: the entry is published first; then descriptor, prompt or both arrive eight bytes at a time, the last ones
    first in one order; until the whole is there the memory still holds what the slot's former request left, which was
    whole.
    """
    h, front = started(slots=1, sq_entries=8, visibility_us=10**6)
    submit(front, 13, 2, tag=0x1122334455667788)
    h.settle()
    memory = [front.views[name].view(np.uint8) for name in parts]
    stale = [section.copy() for section in memory]
    x = submit(front, 14, 3, tag=0x8877665544332211, seed=99, temperature=0.0)
    fresh = [section.copy() for section in memory]
    places = [(i, at) for i in range(len(parts)) for at in range(0, fresh[i].size, WORD)]
    differs = [(i, at) for i, at in places if (fresh[i][at : at + WORD] != stale[i][at : at + WORD]).any()]
    assert len(differs) >= 5, "too little differs from what was there before"
    for section, old in zip(memory, stale, strict=True):
        section[:] = old
    if order == "descending":
        differs.reverse()
    elif order == "shuffled":
        np.random.default_rng(0).shuffle(differs)
    for arrived, (i, at) in enumerate(differs):
        assert h.poll() == 0, f"taken with {arrived} of {len(differs)} words there"
        assert not x.terminal
        memory[i][at : at + WORD] = fresh[i][at : at + WORD]
    assert h.poll() == 1
    h.settle()
    assert x.tokens == alone(x.prompt, 3)
    assert int(h.state["rings"]["torn"][0]) == 1


@pytest.mark.parametrize("place", ["slots", "arena"])
def test_d08_a_last_word_that_never_comes(place: str) -> None:
    """D08. Catches: a record whose last word is missing that holds its ring up for ever.

    Condition: the last word of a descriptor, or of a prompt, stays what it was; requests wait behind it.
    """
    h, front = started(slots=4, sq_entries=16, visibility_us=20)
    x = submit(front, 9, 2, tag=1)
    behind = [submit(front, 3, 2) for _ in range(2)]
    section = front.views[place]
    if place == "slots":
        section["mask_box"][x.slot] ^= 1  # in the last word that the checksum covers
    else:
        section[int(x.descriptor["prompt_offset"]) + 8] ^= 1
    x.refusal = ErrorReason.CHECKSUM
    for _ in range(19):
        assert h.poll() == 0
    h.settle()
    assert x.terminal == (ERROR, ErrorReason.CHECKSUM, 0)
    assert [y.terminal for y in behind] == [(FINISH, FinishReason.LENGTH, 2)] * 2


def test_d08_records_of_any_size_across_the_wrap() -> None:
    """D08. Catches: a record cut where the ring wraps, or whose last word is missing.

    Condition: rings of the least sizes wrapped dozens of times with answers of drawn lengths, so that the parts of one
    token (alternatives, then the token) lie on both sides of the wrap.
    """
    h, front = started(slots=2, sq_entries=4, cq_entries=16, max_rows=2, token_budget=8, pages=2 + 20)
    rng = np.random.default_rng(0)
    across = 0
    for _ in range(60):
        length, most, asked = (int(n) for n in rng.integers(1, (12, 9, 7)))
        x = submit(front, length, most, logprobs=asked)
        per_token = 1 + -(-asked // 2)
        start = front.cq_head
        h.settle()
        assert x.terminal == (FINISH, FinishReason.LENGTH, most)
        size = h.config.cq_entries
        groups = [start + i * per_token for i in range(most)]
        across += sum(g // size != (g + per_token - 1) // size for g in groups)
    assert across >= 10, "no token's events lay on both sides of the wrap"
    assert front.cq_head > 30 * h.config.cq_entries
    assert front.sq_tail > 10 * h.config.sq_entries


class ManyEnds(Harness):
    """Judges ends by all end-of-sequence ids of the configuration."""

    def expected_finish(self, x: Submission) -> FinishReason | None:
        ended = x.tokens and x.tokens[-1] in self.config.eos_ids and not int(x.descriptor["flags"]) & 1
        return FinishReason.EOS if ended else super().expected_finish(x)


def test_t08_each_end_of_sequence_id_ends() -> None:
    """T08. Catches: a list of end-of-sequence ids of which only the first ends a request.

    Condition: requests that reach each of three ids, and none of the others before it.
    """
    eos_ids = (0, 11, 29)
    h = ManyEnds(small_config(eos_ids=eos_ids, token_budget=16))
    h.attach()
    front, ended = h.fronts[0], {}
    for first in range(VOCAB):
        tokens = alone([first, 3], 12)
        at = next((i for i, token in enumerate(tokens) if token in eos_ids), None)
        if at is None or tokens[at] in ended:
            continue
        x = submit_tokens(front, [first, 3], 12, eos=True)
        h.settle()
        assert x.terminal == (FINISH, FinishReason.EOS, at + 1)
        ended[tokens[at]] = x
    assert set(ended) == set(eos_ids)
    ignoring = submit_tokens(front, ended[29].prompt, 12)
    h.settle()
    assert ignoring.tokens == alone(ignoring.prompt, 12)


@pytest.mark.parametrize("max_len", [16, 24, 57])
def test_b01_lengths_about_the_limit(max_len: int) -> None:
    """B01. Catches: a prompt at the limit, just over it or far over it that ends the engine or is served.

    Condition: max - 1, max, max + 1 and 10 max, with a neighbour that runs through each.
    """
    for length in (max_len - 1, max_len, max_len + 1, 10 * max_len):
        h, front = started(max_len=max_len, pages=2 + 40, arena_tokens=4 * 10 * max_len + 64)
        neighbour = submit(front, 3, 8)
        h.tick()
        x = submit(front, length, 2)
        good = length < max_len
        x.refusal = None if good else ErrorReason.BAD_LENGTH
        h.settle()
        assert x.terminal == ((FINISH, FinishReason.CONTEXT, 1) if good else (ERROR, ErrorReason.BAD_LENGTH, 0))
        assert neighbour.tokens == alone(neighbour.prompt, 8)


def test_l20_equal_requests_have_an_order() -> None:
    """L20. Catches: two requests of one class that compare equal: a crash, or one taken for the other.

    Condition: choices of one prompt, equal but for their number, published in one poll, in a full pool, with classes.
    """
    h, front = started(slots=8, max_rows=3, pages=2 + 6, sq_entries=32, prefix_cache=0)
    made = [submit_tokens(front, [5, 6, 7], 9, choice=i, priority=i % 2, seed=4) for i in range(6)]
    h.poll()
    records = h.state["requests"]
    assert len({int(records["arrival"][x.slot]) for x in made}) == 6
    h.settle()
    assert h.entries(LogKind.PREEMPT)
    assert all(x.terminal == (FINISH, FinishReason.LENGTH, 9) for x in made)
    assert all(len(of(x, h.entries(LogKind.FINISH))) == 1 for x in made)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("rings", [1, 3])
@pytest.mark.parametrize("extra", [{}, {"prefix_cache": 0}, {"admission": 1}, {"masks": 0}, {"max_logprobs": 0}])
def test_x08_features_together(extra: dict[str, Any], rings: int, page_size: int) -> None:
    """X08. Catches: two features that are fine alone and stop the loop together.

    Condition: each configuration serves requests with every feature that it has at once, within a bound of steps.
    """
    fields: dict[str, Any] = {"rings": rings, "page_size": page_size, "pages": 2 + 48 // page_size, "slots": 6}
    h = Harness(small_config(**fields, sq_entries=32, cq_entries=64, max_len=24, **extra))
    h.attach()
    used = 0
    for at in range(6):
        for front in h.fronts:
            masked = h.config.masks > 0 and at % 3 == 2
            submit(
                front,
                2 + 3 * at,
                4,
                flags=1 | 4 * masked,
                priority=at % 4,
                logprobs=min(h.config.max_logprobs, at),
                deadline_us=10**9 * (at % 2),
                bias=[(at, 1.0)] * (at % 2),
            )
            used += 1
    h.settle(limit=400)
    assert used == 6 * rings
    assert all(x.terminal is not None and x.terminal[0] == FINISH for x in h.history)
