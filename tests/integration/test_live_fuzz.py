"""Descriptors fuzzed in shared memory against a running engine: an ERROR with a reason, and nobody else affected."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from blink_core.abi.dtypes import SLOT
from blink_core.abi.enums import ErrorReason, EventKind
from blink_core.abi.params import SamplingParams
from blink_core.frontend.ring_client import RingClient
from blink_core.transport.checksum import seal_slot, words_checksum
from hil_rigs.local import LocalRig

CASES = {True: 8, False: 1}  # a descriptor that stays torn takes the whole visibility deadline
FIELDS = [name for name in SLOT.names or () if name not in ("generation", "prompt_offset", "tag")]


@pytest.fixture(scope="module")
def ring(tiny_rig: LocalRig) -> RingClient:
    return tiny_rig.ring(1)


def finish(client: RingClient) -> list[tuple[int, int, int, int]]:
    """(slot, generation, kind, reason) of every terminal event until nothing is live."""
    ended = []
    for _ in range(600):
        events = client.poll(0.1)
        ended += [
            (int(e["slot"]), int(e["generation"]), int(e["kind"]), int(e["reason"]))
            for e in events
            if e["kind"] != EventKind.TOKEN
        ]
        if client.live == 0:
            return ended
    raise AssertionError(f"{client.live} requests never ended")


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("field", FIELDS)
def test_each_field(ring: RingClient, field: str, sealed: bool) -> None:
    """Random bytes in one field, with a checksum that fits them or not, beside a good request each time.

    Catches: a value that crashes, hangs or bypasses the scheduler's validation, and damage to a neighbour.
    """
    draw = np.random.default_rng([FIELDS.index(field), sealed])
    for _ in range(CASES[sealed]):
        prompt = draw.integers(3, 200, 20).astype("<i4")
        slot = np.zeros(1, SLOT)
        slot["prompt_len"], slot["max_tokens"], slot["top_p"] = prompt.size, 3, 1.0
        slot["prompt_checksum"] = words_checksum(prompt)
        seal_slot(slot)
        slot[field] = np.frombuffer(draw.bytes(slot[field].nbytes), slot[field].dtype).reshape(slot[field].shape)
        good = ring.submit(prompt, SamplingParams(max_tokens=3, ignore_eos=True))
        bad = ring.submit_slot(slot, prompt, seal=sealed)
        ended = finish(ring)
        assert (good.slot, good.generation, int(EventKind.FINISH)) in [e[:3] for e in ended]
        (verdict,) = [e for e in ended if e[:2] == (bad.slot, bad.generation)]
        if verdict[2] == EventKind.ERROR:
            assert ErrorReason(verdict[3]) is not ErrorReason.ENGINE_DEAD
        else:
            assert sealed, f"{field}: a descriptor with a wrong checksum was taken"


def test_engine_is_well_afterwards(tiny_rig: LocalRig, ring: RingClient) -> None:
    """Catches: a slow leak of pages or slots by refused requests."""
    with tiny_rig.memory.hold():
        snapshot = tiny_rig.memory.snapshot()
    assert int(snapshot.header["live"]) == 0
    assert len(snapshot.free_list) + int(snapshot.header["idle_cached"]) == snapshot.config.pages - 2
    assert Path(f"/proc/{tiny_rig.pid('engine')}").exists()
