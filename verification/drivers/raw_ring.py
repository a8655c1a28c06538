"""Entries that `RingClient` itself would never publish, in its own order and bookkeeping: for faults and refusals."""

from __future__ import annotations

from collections.abc import Iterable

from blink_core.frontend.ring_client import RingClient, RingFull


def publish_entries(client: RingClient, entries: Iterable[tuple[int, int, int]]) -> int:
    """Publishes (operation, slot, generation) as they are, also unknown ones. Returns the queue's new tail.

    Nothing of the client's requests changes: events of these entries come from `poll` like any other. Raises RingFull,
    with nothing published, when the queue has no room for all of them.
    """
    todo = list(entries)
    with client._lock:
        space = client._sq_space()
        if space < len(todo):
            raise RingFull(
                f"{len(todo)} entries for a submission queue with {space} free of {client.config.sq_entries}"
            )
        works = [client._publish(operation, slot, generation) for operation, slot, generation in todo]  # type: ignore[arg-type]
        tail = client._sq_tail
    for work in works:
        client._await(work)
    return tail
