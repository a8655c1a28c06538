"""How the check of batch invariance judges what it saw; needs no GPU."""

from __future__ import annotations

import numpy as np

from hil_rigs.gpu.batch_invariance import NEW, Seen, company, compare, placed, probes


def seen(rounds: list[dict[int, bytes]]) -> Seen:
    """Rounds of probes, each with one row of logits at every position."""
    return Seen(
        [{probe: dict.fromkeys(range(NEW), row) for probe, row in some.items()} for some in rounds],
        [{probe: [1] * NEW for probe in some} for some in rounds],
    )


ALONE = seen([{0: b"a"}, {1: b"b"}, {2: b"c"}])


def test_equal_rows_pass() -> None:
    """Catches: a false alarm, and rows that are not counted."""
    assert compare("way", seen([{1: b"b", 2: b"c"}, {0: b"a"}]), ALONE) == (3 * NEW, [])


def test_differences_are_named() -> None:
    """Catches: one differing row, a lost row, other tokens or a probe without any row that pass as equal."""
    one = seen([{1: b"b"}])
    one.logits[0][1][3] = b"x"
    assert compare("way", one, ALONE)[1] == ["way, round 0: probe 1 differs in 1 rows from 3 on"]
    lost = seen([{2: b"c"}])
    del lost.logits[0][2][5]
    assert compare("way", lost, ALONE)[1] == [f"way, round 0: probe 2 has {NEW - 1} rows, alone {NEW}"]
    other = seen([{0: b"a"}])
    other.tokens[0][0][-1] = 2
    assert compare("way", other, ALONE)[1] == ["way, round 0: probe 0 has other tokens"]
    empty = seen([{0: b"a"}])
    empty.logits[0][0].clear()
    assert len(compare("way", empty, ALONE)[1]) == 1


def test_probes_stand_first_in_the_middle_and_last() -> None:
    """Catches: a batch whose rows all have their probes at one end, and probes that do not fit the model."""
    rng = np.random.default_rng(0)
    watched = probes(rng, 100, 512)
    order = [p.number for p in placed(watched, company(rng, 100, 6, 512))]
    assert order == [0, None, None, None, 1, None, None, None, 2]
    assert all(len(p.prompt) + NEW <= 512 and max(p.prompt) < 100 for p in watched)
