"""Reads situations from one engine's event log (level ALL), entry by entry, as it grows.

The state kept is small: who owns what, who runs, how many events each ring is owed. A gap in the log forgets it, so
that nothing is concluded across the gap.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from blink_core.abi.config import EngineConfig
from blink_core.abi.enums import ErrorReason, FinishReason, LogKind
from blink_core.frontend.epoch_word import FENCE

Key = tuple[int, int, int]  # ring, slot, generation
Entry = tuple[int, ...]  # step, kind, ring, slot, generation, a, b, c

_LAUNCHES = 118  # of one execution of the scheduler graph (design section 6)
_NEAR = {-1: "prefix-hit-before-boundary", 0: "prefix-hit-on-boundary", 1: "prefix-hit-past-boundary"}


class LogObserver:
    """`feed` log entries in order; `counts` says how often each situation was seen since `take` was called last.

    `cancelled` maps requests that were cancelled with a step in flight to the position of the token that it computed;
    the caller may look that up among captured tokens.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.counts: Counter[str] = Counter()
        self.cancelled: dict[Key, int] = {}
        self._forget()

    def _forget(self) -> None:
        self.prompts: dict[Key, int] = {}
        self.owners: dict[int, Key] = {}
        self.quarantined: set[int] = set()
        self.freed_in_flight: Counter[Key] = Counter()
        self.newest: dict[tuple[int, int], int] = {}
        self.epochs: set[int] = set()
        self.running: set[Key] = set()
        self.masked: dict[Key, int] = {}
        self.emitted: Counter[Key] = Counter()
        self.context: dict[Key, int] = {}  # tokens that a running request's plans have reached
        self.owed: defaultdict[int, int] = defaultdict(int)  # events written and not given back, by ring: at least
        self.written: defaultdict[int, int] = defaultdict(int)
        self.heads: dict[int, int] = {}
        self.planned: dict[Key, tuple[int, int]] = {}
        self.plan: int = -1
        self.preempts: int = 0  # since the last entry that explains them
        self.before: Entry = (0,) * 8
        self.last_plan: set[Key] = set()

    def take(self) -> Counter[str]:
        """What was seen since the last call."""
        counts, self.counts = self.counts, Counter()
        return counts

    def gap(self) -> None:
        """Entries were lost: what was known of requests, pages and rings is forgotten."""
        self._forget()

    def feed(self, entries: Iterable[Any]) -> None:
        """Takes log entries (fields in the order of `LogEntry`), oldest first."""
        for entry in entries:
            self._one(tuple(entry))
            self.before = entry

    def _one(self, entry: Entry) -> None:
        step, kind, ring, slot, generation, a, b, c = entry
        handler = _HANDLERS.get(kind)
        if handler is not None:
            handler(self, step, (ring, slot, generation), a, b, c)
        if kind == LogKind.PREEMPT:
            self.preempts += 1
        elif kind in (LogKind.RESERVATION, LogKind.STEP):
            # Those that gave way to a reservation precede its entry; any others made room for somebody's pages.
            forced = kind == LogKind.RESERVATION and a == 2
            self.counts["pool-exhausted"] += 0 if forced else self.preempts
            self.preempts = 0

    # ---- rings

    def _accept(self, step: int, key: Key, a: int, b: int, c: int) -> None:
        place = key[:2]
        if place in self.newest:
            self.counts["slot-reuse"] += 1
        self.newest[place] = key[2]
        self.prompts[key] = a

    def _sq_entry(self, step: int, key: Key, a: int, b: int, c: int) -> None:
        if c and c % self.config.sq_entries == 0:
            self.counts["ring-wrap"] += 1

    def _reject(self, step: int, key: Key, a: int, b: int, c: int) -> None:
        self.counts["refused"] += 1
        self.counts["torn-entry"] += a == ErrorReason.CHECKSUM
        self._write(key[0])

    def _epoch(self, step: int, key: Key, a: int, b: int, c: int) -> None:
        ring = key[0]
        fence = a & FENCE  # the epoch behind it is still to come, while the old one's requests have gone (R2)
        if ring in self.epochs:
            self.counts["epoch-change"] += not fence
            self.counts["epoch-change-alive"] += b > 0
        if not fence:
            self.epochs.add(ring)
        self.newest = {place: g for place, g in self.newest.items() if place[0] != ring}
        self.running = {one for one in self.running if one[0] != ring}
        self.written[ring] = self.heads[ring] = 0

    def _lease(self, step: int, key: Key, a: int, b: int, c: int) -> None:
        self.counts["lease-lapse" if a else "lease-renewed"] += 1

    def _credits(self, step: int, key: Key, a: int, b: int, c: int) -> None:
        self.heads[key[0]] = a | b << 32

    def _mask(self, step: int, key: Key, a: int, b: int, c: int) -> None:
        self.counts["mask-read"] += 1
        self.masked[key] = a

    def _cancel(self, step: int, key: Key, a: int, b: int, c: int) -> None:
        self.counts["stale-cancel"] += not a

    def _write(self, ring: int) -> None:
        self.written[ring] += 1

    # ---- requests

    def _admit(self, step: int, key: Key, a: int, b: int, c: int) -> None:
        self.running.add(key)
        self.counts["resume"] += c >= 1
        self.counts["preempted-twice"] += c >= 2

    def _preempt(self, step: int, key: Key, a: int, b: int, c: int) -> None:
        self.running.discard(key)
        self.counts["preemption"] += 1
        self.planned.pop(key, None)
        self.context.pop(key, None)

    def _token(self, step: int, key: Key, a: int, b: int, c: int) -> None:
        self.emitted[key] += 1
        self._write(key[0])

    def _finish(self, step: int, key: Key, a: int, b: int, c: int) -> None:
        if a == FinishReason.CANCELLED:
            self.counts["cancel"] += 1
            if key not in self.running:
                self.counts["cancel-waiting"] += 1
            elif self.freed_in_flight[key] and key in self.last_plan:
                self.counts["cancel-in-flight"] += 1
                if key in self.prompts:
                    self.cancelled[key] = self.prompts[key] + b
        elif a == FinishReason.EOS:
            self.counts["end-of-sequence"] += 1
            whole = key in self.prompts and (self.prompts[key] + b) % self.config.page_size == 0
            self.counts["eos-on-page-boundary"] += whole
        elif a == FinishReason.STOP_TOKEN:
            self.counts["stop-token"] += 1
        elif a == FinishReason.CONTEXT:
            self.counts["context-full"] += 1
        self._over(key)

    def _error(self, step: int, key: Key, a: int, b: int, c: int) -> None:
        self.counts["deadline-passed"] += a == ErrorReason.DEADLINE
        self._over(key)

    def _over(self, key: Key) -> None:
        self._write(key[0])
        self.running.discard(key)
        for known in (self.emitted, self.masked, self.prompts, self.freed_in_flight, self.context):
            known.pop(key, None)

    # ---- steps

    def _plan_row(self, step: int, key: Key, a: int, b: int, c: int) -> None:
        if step != self.plan:
            self.planned, self.plan = {}, step
        self.planned[key] = (a, b)
        self.context[key] = b

    def _step(self, step: int, key: Key, a: int, b: int, c: int) -> None:
        rows = self.planned if self.plan == step else {}
        self.counts["batch-full"] += a == self.config.max_rows
        self.counts["batch-one-below"] += a == self.config.max_rows - 1 > 0
        self.counts["several-rings"] += len({one[0] for one in rows}) > 1
        self.counts["launch-118"] += step % _LAUNCHES == 0
        prompts = decodes = 0
        for one, (tokens, after) in rows.items():
            prompt = self.prompts.get(one)
            if prompt is None:
                continue
            is_part = after < prompt
            self.counts["chunked-prefill"] += is_part
            self.counts["chunk-inside-page"] += is_part and after % self.config.page_size != 0
            prompts += after <= prompt
            decodes += after > prompt and tokens == 1
        self.counts["decode-with-prefill"] += bool(prompts and decodes)
        for one in self.running - rows.keys():
            self._left_out(one)
        self.last_plan = set(rows)

    def _left_out(self, key: Key) -> None:
        """A running row without a place in a step: for want of its mask, or of credits (docs/rules.md, P1 to P3)."""
        ring, emitted = key[0], self.emitted[key]
        # Alternatives are not in the log, so that this is the least that the ring owes.
        owed = self.written[ring] - self.heads.get(ring, 0)
        unmasked = not self.config.masks or (emitted > 0 and key not in self.masked)
        # A decode always has its token of the budget, so one that needs no mask lacks credits, whatever the log shows.
        decode = emitted > 0 and key in self.prompts and self.context.get(key) == self.prompts[key] + emitted - 1
        if owed + 1 + self.config.slots >= self.config.cq_entries or (decode and unmasked):
            self.counts["credits-withheld"] += 1
        elif not unmasked and self.masked.get(key, -1) < emitted:
            self.counts["mask-late"] += 1

    # ---- pages

    def _reservation(self, step: int, key: Key, a: int, b: int, c: int) -> None:
        self.counts["reservation"] += a == 1
        self.counts["reservation-enforced"] += a == 2

    def _page_alloc(self, step: int, key: Key, a: int, b: int, c: int) -> None:
        self.counts["page-reuse"] += self.owners.get(a, key) != key
        self.owners[a] = key

    def _page_free(self, step: int, key: Key, a: int, b: int, c: int) -> None:
        if b:
            self.quarantined.add(a)
            self.freed_in_flight[key] += 1
        elif self.before[1] == LogKind.PAGE_SHARE and self.before[2:5] == key:
            self.counts["prefix-twin"] += 1

    def _page_unquarantine(self, step: int, key: Key, a: int, b: int, c: int) -> None:
        if a in self.quarantined:
            self.quarantined.discard(a)
            self.counts["quarantine"] += 1

    def _prefix_hit(self, step: int, key: Key, a: int, b: int, c: int) -> None:
        if not b:
            return
        self.counts["prefix-hit"] += 1
        if self.emitted[key]:
            self.counts["prefix-hit-on-resume"] += 1
            return
        size = self.config.page_size
        prompt = self.prompts.get(key, 0)
        past = (prompt + 1) % size - 1
        if prompt and size > 2 and past in _NEAR:
            self.counts[_NEAR[past]] += 1

    def _page_evict(self, step: int, key: Key, a: int, b: int, c: int) -> None:
        self.counts["prefix-eviction"] += 1


_HANDLERS: dict[int, Any] = {
    LogKind.ACCEPT: LogObserver._accept,
    LogKind.SQ_ENTRY: LogObserver._sq_entry,
    LogKind.REJECT: LogObserver._reject,
    LogKind.EPOCH: LogObserver._epoch,
    LogKind.LEASE: LogObserver._lease,
    LogKind.CREDITS: LogObserver._credits,
    LogKind.MASK: LogObserver._mask,
    LogKind.CANCEL: LogObserver._cancel,
    LogKind.ADMIT: LogObserver._admit,
    LogKind.PREEMPT: LogObserver._preempt,
    LogKind.TOKEN: LogObserver._token,
    LogKind.FINISH: LogObserver._finish,
    LogKind.ERROR: LogObserver._error,
    LogKind.PLAN_ROW: LogObserver._plan_row,
    LogKind.STEP: LogObserver._step,
    LogKind.RESERVATION: LogObserver._reservation,
    LogKind.PAGE_ALLOC: LogObserver._page_alloc,
    LogKind.PAGE_FREE: LogObserver._page_free,
    LogKind.PAGE_UNQUARANTINE: LogObserver._page_unquarantine,
    LogKind.PREFIX_HIT: LogObserver._prefix_hit,
    LogKind.PAGE_EVICT: LogObserver._page_evict,
}
