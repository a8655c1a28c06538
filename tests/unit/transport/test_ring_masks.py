"""The ring client posts grammar masks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from blink_core.abi.enums import EventKind
from blink_core.abi.params import SamplingParams
from blink_core.frontend.ring_client import (
    Handle,
    RingFull,
)
from blink_core.runtime.cpu import noop_step
from tests.unit.transport.ring_engine import Stepped, bits_of


def test_masks_reach_the_row(make: Callable[..., Stepped]) -> None:
    """Catches: a mask for another index, row or request, a token planned without its mask, a mailbox never freed."""
    e = make(masks=2)
    handles = [e.client.submit([1, 2], SamplingParams(2), masked=True) for _ in range(2)]
    assert [handle.mask_box for handle in handles] == [0, 1]
    with pytest.raises(RingFull, match="all 2 mask mailboxes are in use"):
        e.client.submit([1], SamplingParams(2), masked=True)
    with pytest.raises(RingFull, match="mask mailbox 1 is in use"):
        e.client.submit([1], SamplingParams(2, mask_box=1))
    assert e.client.live == 2
    for _ in range(5):
        e.step()
    assert len(e.client.poll(0.0)) == 0
    seen: dict[int, list[int]] = {}
    for index in range(2):
        for request in (1, 0):
            assert e.client.post_mask(handles[request], index, bits_of(e.config, 10 * request + index, 250))
        for _ in range(3):
            e.runtime.scheduler.poll(e.now)
            if e.runtime.scheduler.boundary(e.now):
                plan = e.runtime.current_plan()
                noop_step(plan)
                for row, mask in zip(plan.rows, plan.masks, strict=True):
                    if row["sample"]:
                        assert row["masked"] == 1
                        words = bits_of(e.config, 10 * int(row["slot"]) + int(row["emitted"]), 250)
                        assert mask.tolist() == words.tolist()
                        seen.setdefault(int(row["slot"]), []).append(int(row["emitted"]))
        if index == 0:
            assert e.client.poll(0.0)["kind"].tolist() == [EventKind.TOKEN] * 2
    assert seen == {0: [0, 1], 1: [0, 1]}
    e.finish()
    assert not e.client.post_mask(handles[0], 2, bits_of(e.config))
    again = e.client.submit([1], SamplingParams(1), masked=True)
    assert again.mask_box is not None
    e.client.cancel(again)
    e.finish()


def test_masks_are_checked(make: Callable[..., Stepped]) -> None:
    """Catches: a mask of another size or for a request without masks written into somebody's mailbox."""
    e = make(masks=1)
    plain = e.client.submit([1], SamplingParams(1))
    with pytest.raises(ValueError, match="slot 0 was submitted without masks"):
        e.client.post_mask(plain, 0, bits_of(e.config))
    masked = e.client.submit([1], SamplingParams(1), masked=True)
    with pytest.raises(ValueError, match=r"must be uint32 \[8\]"):
        e.client.post_mask(masked, 0, np.zeros(7, np.uint32))
    with pytest.raises(ValueError, match="output index is -1"):
        e.client.post_mask(masked, -1, bits_of(e.config))
    e.client.cancel(masked)
    e.finish()
    none = make()
    with pytest.raises(ValueError, match="no mask mailboxes"):
        none.client.submit([1], SamplingParams(1), masked=True)


def test_attach_clears_mailboxes(make: Callable[..., Stepped]) -> None:
    """Catches: a mask of the old epoch taken for the first token of a new request with the same generation."""
    e = make(masks=1)
    handle = e.client.submit([1], SamplingParams(1), masked=True)
    e.client.post_mask(handle, 0, bits_of(e.config, 3))
    assert int(e.ring["mask_boxes"]["ready"][0]) == 1 << 40 | 1
    e.attach(e.client)
    assert int(e.ring["mask_boxes"]["ready"][0]) == 0
    assert e.client.submit([1], SamplingParams(1), masked=True) == Handle(0, 1, 0, 0)
    for _ in range(4):
        e.step()
    assert len(e.client.poll(0.0)) == 0
