"""Faults of HTTP clients."""

from __future__ import annotations

import time

from blink_core.abi.enums import FinishReason, LogKind
from verification.faults.model import HTTP_RING, Blast, End, Fault, Proof, Site, register

EFFECT_WITHIN_S = 20.0


@register
class ClientDisconnect(Fault):
    """A client that closes its connection in mid-stream."""

    name = "client-disconnect"
    summary = "The victims' HTTP clients close their connections in mid-stream."
    blast = Blast.REQUESTS
    ends = frozenset({End.LEFT})
    expected = "the front end cancels their requests and their KV pages are free again; nobody else notices."
    recovery_s = 30.0
    alone = False

    def inject(self, site: Site) -> None:
        for call in site.victims:
            call.leave.set()

    def proof(self, site: Site) -> Proof:
        wanted = {(r.slot, r.generation) for r in site.hit.requests if r.ring == HTTP_RING}
        deadline = time.monotonic() + EFFECT_WITHIN_S
        while True:
            log = site.state(site.hit.log_from).log
            ended = log[(log["kind"] == LogKind.FINISH) & (log["ring"] == HTTP_RING)]
            ended = ended[ended["a"] == FinishReason.CANCELLED]
            gone = wanted & {(int(e["slot"]), int(e["generation"])) for e in ended}
            if gone == wanted or time.monotonic() > deadline:
                return Proof(gone == wanted, f"{len(gone)} of {len(wanted)} live requests ended as cancelled")
            site.pump(0.02)
