"""One scheduler stepped by hand: raw memory, independent front ends, a scripted model over a tagged KV pool."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np

from blink_core import _native
from blink_core.abi.config import EngineConfig
from blink_core.abi.dtypes import LOGPROBS_EVENT
from blink_core.abi.enums import ErrorReason, EventKind, FinishReason, LogKind, LogLevel, RequestState, StepStatus
from verification.scheduler import cache_invariants, invariants, log_inputs, scripted_model
from verification.scheduler.front_end import FrontEnd, Submission
from verification.scheduler.log_inputs import Entry
from verification.scheduler.scripted_model import EOS, VOCAB, Planned, TaggedPool, next_token

__all__ = ["CHECKS", "EOS", "VOCAB", "Harness", "next_token", "order_of_acceptance", "small_config"]

# What is checked: raw memory after each call, who is left out of a plan, the prefix cache, the event log, what front
# ends hear, and plans with the KV that they lead to.
CHECKS = frozenset({"memory", "progress", "cache", "log", "ledger", "plan"})
ALWAYS = frozenset({"ledger", "plan"})


def small_config(**fields: Any) -> EngineConfig:
    """Small rings and pool, complete event log."""
    defaults: dict[str, Any] = {
        "vocab": VOCAB,
        "eos_ids": (EOS,),
        "rings": 1,
        "slots": 4,
        "sq_entries": 16,
        "cq_entries": 32,
        "max_len": 24,
        "page_size": 4,
        "pages": 2 + 12,
        "max_rows": 3,
        "token_budget": 8,
        "visibility_us": 3,
        "paused_limit": 3,
        "log_entries": 1 << 14,
        "log_level": LogLevel.ALL,
        "quantum": 8,
        "reservation_steps": 4,
        "lease_us": 0,
        "max_bias": 3,
    }
    merged = defaults | fields
    merged.setdefault("arena_tokens", merged["slots"] * (merged["max_len"] + 2 * merged["max_bias"]))
    merged.setdefault("masks", merged["slots"])
    return EngineConfig(**merged)


class Harness:
    """`boundary`, `run_model`, `poll` in any order that the engine could; every call is followed by the checks.

    Each call of the scheduler is one microsecond after the last, unless `now` is set. checks: all (True), those that
    cost little (False), or some of CHECKS by name; what is not checked is followed as the scheduler does it.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        native: Any = _native,
        group_size: int = 1,
        checks: bool | Collection[str] = True,
    ) -> None:
        self.config = config
        self.checks = (CHECKS if checks else ALWAYS) if isinstance(checks, bool) else frozenset(checks)
        layouts = config.layouts()
        # One allocation a region, of exactly its size: an address sanitizer sees a step beyond any end.
        self.shared = np.zeros(config.shared_nbytes(), np.uint8)
        self.shared[: config.pack().nbytes] = np.frombuffer(config.pack().tobytes(), np.uint8)
        self.regions = {name: np.zeros(layouts[name].nbytes, np.uint8) for name in ("State", "Log", "Plan")}
        self.scheduler = native.Scheduler(
            self.shared.ctypes.data, *(self.regions[n].ctypes.data for n in ("State", "Log", "Plan")), group_size
        )
        self.scheduler.init()
        self.failures = 0  # steps that failed as a whole
        self.state = layouts["State"].views(self.regions["State"].data)
        self.plan = layouts["Plan"].views(self.regions["Plan"].data)
        self.log = layouts["Log"].view(self.regions["Log"].data, "entries")
        self.control = layouts["Control"].views(self.shared.data)
        base = layouts["Control"].nbytes
        self.rings = [
            layouts["Ring"].views(self.shared.data, base + i * layouts["Ring"].nbytes) for i in range(config.rings)
        ]
        self.history: list[Submission] = []
        self.fronts = [FrontEnd(i, config, views, self.history) for i, views in enumerate(self.rings)]
        self.by_key: dict[tuple[int, int, int, int], Submission] = {}
        self.registered = 0
        self.heard = [0] * config.rings  # events looked at, of the ring's epoch
        self.epochs = [0] * config.rings  # as the scheduler follows them
        self.copies: list[dict[int, bytes]] = [{} for _ in self.rings]
        self.pool = TaggedPool(config)
        self.in_flight: list[Planned] = []
        self.log_read = int(self.state["header"]["log_tail"][0])
        self.hit: dict[tuple[int, int], int] = {}  # tokens of the newest PREFIX_HIT of a request
        self.now = self.clock = self.logged = 0
        self.leases = [(0, 0)] * config.rings  # lease word seen, clock of the last sign of life
        self.situations: set[str] = set()
        self.strays: set[tuple[int, int, int]] = set()  # (ring, slot, generation) that may be refused unsubmitted
        self.last = self.snapshot()  # after the newest call, where it is checked

        if "memory" in self.checks:
            invariants.check_fresh(config, self.state)

    # ---- what the engine does

    def count_from(self, counted: int) -> None:
        """As if so many events of each ring had been consumed, and so many requests had come: before any does."""
        self.state["header"]["arrivals"] = counted
        for front, views, rs in zip(self.fronts, self.rings, self.state["rings"], strict=True):
            rs["cq_tail"] = rs["cq_published"] = rs["cq_head"] = counted
            views["gpu"]["cq_tail"] = views["front_end"]["cq_head"] = front.cq_head = self.heard[front.index] = counted

    def attach(self) -> None:
        for front in self.fronts:
            front.attach()
        self.poll()
        assert all(front.acknowledged for front in self.fronts)

    def boundary(self) -> bool:
        before, earlier = self._before(), self.last
        launched = bool(self.scheduler.boundary(self.now))
        self._after(before, polled=False)
        if "ledger" in self.checks:
            self.check_status()
        self.in_flight = []
        if launched:
            resolve = scripted_model.check_plan if "plan" in self.checks else scripted_model.follow_plan
            self.in_flight = resolve(self.plan, self.state, self.config, self.find)
        if "progress" in self.checks and int(self.control["control"]["stop_request"][0]) == 0:
            planned = {int(r) for r in self.plan["rows"]["request"][: self.n_rows]} if launched else set()
            left = self.config.token_budget - (int(self.plan["header"]["n_tokens"][0]) if launched else 0)
            invariants.check_progress(self.last, earlier, launched, planned, left)
        return launched

    def poll(self) -> int:
        before, beats = self._before(), int(self.control["status"]["heartbeat"][0])
        taken = int(self.scheduler.poll(self.now))
        self._after(before, polled=True)
        if "ledger" in self.checks:
            self.check_taken(before[1], taken)
            self.check_beat(beats)
        return taken

    @property
    def n_rows(self) -> int:
        return int(self.plan["header"]["n_rows"][0])

    def run_model(self, faults: dict[int, str] | None = None, *, failed: bool = False) -> None:
        """Executes the step in flight; `faults` by row as `scripted_model.run` takes them."""
        check = "plan" in self.checks
        scripted_model.run(self.in_flight, self.plan, self.state, self.pool, self.config, faults or {}, check=check)
        if failed:
            for planned in self.in_flight:
                planned.submission.spoiled = True
            self.plan["header"]["status"] = StepStatus.FAILED
            self.failures += 1

    def tick(self) -> bool:
        """One plain step: leases renewed, masks posted, boundary, model, poll, events consumed."""
        for front in self.fronts:
            front.renew()
        self.post_masks()
        launched = self.boundary()
        if launched:
            self.run_model()
        self.poll()
        for front in self.fronts:
            front.consume()
        return launched

    def post_masks(self) -> None:
        """Every live request that needs a mask gets that of its next token."""
        for front in self.fronts:
            for x in front.live.values():
                if x.masked and x.refusal is None and not front.has_posted(x):
                    front.post_mask(x)

    def settle(self, limit: int = 2000) -> None:
        """Ticks until nothing lives; fails when that takes more than `limit`."""
        for _ in range(limit):
            self.tick()
            if not any(front.live for front in self.fronts):
                break
        else:
            raise AssertionError(f"{[len(f.live) for f in self.fronts]} requests live after {limit} steps")
        self.tick()
        self.finish()

    def settle_only(self, front: FrontEnd, limit: int = 500) -> None:
        """Ticks until this ring's requests have ended, whatever the others do."""
        for _ in range(limit):
            self.tick()
            if not front.live:
                return
        raise AssertionError(f"{len(front.live)} requests of ring {front.index} live after {limit} steps")

    def finish(self) -> None:
        """Everything free, every submission of a current epoch ended once and for a reason that it gave."""
        s = self.snapshot()
        if "memory" in self.checks or self.checks == ALWAYS:
            invariants.check_idle(s)
        if "ledger" in self.checks:
            self.check_ends(int(s.header["tokens"]))

    def check_ends(self, tokens: int) -> None:
        """Every token that the scheduler counts was heard, every submission of a current epoch has ended."""
        assert tokens == sum(len(x.tokens) for x in self.history), f"{tokens} tokens were made, not all were heard"
        for x in self.history:
            if x.epoch == self.fronts[x.ring].epoch:
                assert x.terminal is not None, f"no terminal event for {x}"

    # ---- what is checked after each call

    def snapshot(self) -> invariants.State:
        return invariants.read(self.config, self.state)

    def _before(self) -> tuple[list[bytes], log_inputs.Inputs]:
        self.now += 1
        return self._front_end_bytes(), log_inputs.take(self.state, self.config.slots)

    def _front_end_bytes(self) -> list[bytes]:
        sections = ("front_end", "sq", "slots", "arena", "mask_boxes", "mask_bits")
        return [views[name].tobytes() for views in self.rings for name in sections]

    def _after(self, before: tuple[list[bytes], log_inputs.Inputs], *, polled: bool) -> None:
        written, inputs = before
        clock = self.clock = max(self.clock, self.now)
        if "ledger" in self.checks:
            self.check_call(clock, written)
        made = self._follow_log()
        signs = self._signs_of_life(inputs) if polled else None
        for ring in range(self.config.rings):
            self._listen(ring)
        self._note_acceptance()
        if signs is not None:
            self._watch_leases(signs)
        if self.checks & {"memory", "progress", "cache"}:
            self.last = self.snapshot()
        if "memory" in self.checks:
            invariants.check_all(self.last)
        if "cache" in self.checks:
            cache_invariants.check_cache(self.last)
        if "log" in self.checks and made is not None and self.config.log_level == LogLevel.ALL:
            sq = [views["sq"] for views in self.rings]
            log_inputs.check(inputs, log_inputs.take(self.state, self.config.slots), made, clock, sq)
            self.logged = log_inputs.check_clock(made, clock, self.logged)

    def check_call(self, clock: int, written: list[bytes]) -> None:
        """The clock that was followed, and nothing of the front ends' memory changed."""
        assert int(self.state["header"]["clock"][0]) == clock, f"the clock is not {clock}"
        assert self._front_end_bytes() == written, "the scheduler wrote into memory of the front end"

    def check_status(self) -> None:
        """After a boundary: what everybody may read of steps that ended, and of those that failed."""
        status, committed = self.control["status"], int(self.state["header"]["committed"][0])
        steps, failures = int(status["steps"][0]), int(status["failures"][0])
        assert steps == committed, f"the status tells of {steps} steps, {committed} have ended"
        assert failures == self.failures, f"the status tells of {failures} failed steps, {self.failures} failed"

    def check_taken(self, before: log_inputs.Inputs, taken: int) -> None:
        """A poll returns how much it took: the loop naps only after one that took nothing."""
        after = log_inputs.take(self.state, self.config.slots)
        entries = changes = 0
        for ring in range(self.config.rings):
            changed = after.epochs[ring] != before.epochs[ring]
            changes += changed
            entries += 0 if changed else after.entries[ring] - before.entries[ring]
        masks = sum(before.masks.get(key) != index for key, index in after.masks.items())
        told = f"{entries} entries, {changes} epochs and {masks} masks"
        assert taken == entries + changes + masks, f"a poll that took {told} returned {taken}"

    def check_beat(self, before: int) -> None:
        """Every poll raises the heartbeat, for the host and for each ring."""
        beats = [int(self.control["status"]["heartbeat"][0]), *(int(r["gpu"]["heartbeat"][0]) for r in self.rings)]
        assert min(beats) > before, f"heartbeats {beats}, {before} before the poll"

    def _signs_of_life(self, before: log_inputs.Inputs) -> list[bool]:
        """Rings whose lease changed, whose epoch did, or who had entries taken, in a call that looked at them."""
        signs = []
        for ring, views in enumerate(self.rings):
            lease = int(views["front_end"]["lease"][0])
            rs = self.state["rings"][ring]
            taken = int(rs["sq_next"]) != before.entries[ring] or int(rs["epoch"]) != before.epochs[ring]
            signs.append(taken or lease != self.leases[ring][0])
        return signs

    def _watch_leases(self, signs: list[bool]) -> None:
        for ring, sign in enumerate(signs):
            lease = int(self.rings[ring]["front_end"]["lease"][0])
            self.leases[ring] = lease, self.clock if sign else self.leases[ring][1]
            silent = self.clock - self.leases[ring][1]
            if "ledger" in self.checks and self.config.lease_us and silent >= self.config.lease_us:
                live = int(self.state["rings"][ring]["live"])
                assert live == 0, f"ring {ring} was silent for {silent} us and has {live} requests alive"

    def _note_acceptance(self) -> None:
        for front in self.fronts:
            for x in front.live.values():
                if x.accepted_at is None and x.epoch == self.epochs[x.ring]:
                    q = self.state["requests"][x.ring * self.config.slots + x.slot]
                    if int(q["generation"]) == x.generation and q["state"] != RequestState.FREE:
                        x.accepted_at = self.clock

    def _listen(self, ring: int) -> None:
        """Looks at events as they are written, also unpublished ones, and at those that nobody has consumed yet."""
        rs, views, size = self.state["rings"][ring], self.rings[ring], self.config.cq_entries
        if int(rs["epoch"]) != self.epochs[ring]:
            self.epochs[ring], self.heard[ring], self.copies[ring] = int(rs["epoch"]), 0, {}
        tail = int(rs["cq_tail"])
        copies = self.copies[ring]
        for at in [at for at in copies if at < self.fronts[ring].cq_head]:
            del copies[at]
        if "ledger" in self.checks:
            self.check_queue(ring, tail)
        for at in range(max(self.heard[ring], tail - size), tail):
            event = views["cq"][at % size]
            copies[at] = event.tobytes()
            if "ledger" in self.checks:
                self.check_event(ring, event)
            self._event(ring, event)
        self.heard[ring] = tail

    def check_queue(self, ring: int, tail: int) -> None:
        """Events are numbered, come one behind the other, and none is overwritten before it is consumed."""
        cq, size, heard = self.rings[ring]["cq"], self.config.cq_entries, self.heard[ring]
        for at, copy in self.copies[ring].items():
            assert cq[at % size].tobytes() == copy, f"event {at} was overwritten before it was consumed"
        assert tail >= heard, f"the completion queue of ring {ring} goes back from {heard} to {tail}"
        assert len(self.copies[ring]) + tail - heard <= size, f"more events than the queue of ring {ring} holds"
        for at in range(heard, tail):
            assert int(cq[at % size]["seq"]) == at + 1, f"event {at} is numbered {int(cq[at % size]['seq'])}"

    def _register(self) -> None:
        for x in self.history[self.registered :]:
            self.by_key[x.ring, x.epoch, x.slot, x.generation] = x
        self.registered = len(self.history)

    def find(self, ring: int, slot: int, generation: int) -> Submission | None:
        self._register()
        return self.by_key.get((ring, self.epochs[ring], slot, generation))

    def _event(self, ring: int, event: Any) -> None:
        """Notes what an event says of its submission."""
        x = self.find(ring, int(event["slot"]), int(event["generation"]))
        if x is None:
            return
        kind = int(event["kind"])
        if kind == EventKind.LOGPROBS:
            e = np.frombuffer(event.tobytes(), LOGPROBS_EVENT)[0]
            count = int(e["count"])
            x.alternatives += zip(e["tokens"][:count].tolist(), e["logprobs"][:count].tolist(), strict=True)
            self.situations.add("logprobs")
        elif kind == EventKind.TOKEN:
            x.alternatives = []
            x.tokens.append(int(event["token"]))
        else:
            x.terminal = kind, int(event["reason"]), int(event["index"])

    def check_event(self, ring: int, event: Any) -> None:
        """An event is of a request that lives, comes in its order, and says what the request's own story gives."""
        x = self.find(ring, int(event["slot"]), int(event["generation"]))
        if x is None and (ring, int(event["slot"]), int(event["generation"])) in self.strays:
            assert (event["kind"], event["reason"]) == (EventKind.ERROR, ErrorReason.BAD_ENTRY)
            return
        assert x is not None, f"event {event} of a request that nobody submitted"
        assert x.terminal is None, f"event {event} after the terminal event of {x}"
        kind, reason, index = int(event["kind"]), int(event["reason"]), int(event["index"])
        if kind == EventKind.LOGPROBS:
            self.check_alternatives(x, event)
            return
        assert index == len(x.tokens), f"event {event} has index {index}, expected {len(x.tokens)}"
        if kind == EventKind.TOKEN:
            assert x.refusal is None, f"{x} should have been refused"
            words = self.config.mask_words
            expected = next_token(x.known, x.mask(index, words, self.config.vocab) if x.masked else None)
            assert int(event["token"]) == expected, f"token {event} of {x}"
            asked = scripted_model.alternatives(expected, int(x.descriptor["logprobs"]))
            assert x.alternatives == asked, f"{x.alternatives} before {event}, expected {asked}"
            return
        assert not x.alternatives, f"alternatives {x.alternatives} of no token of {x}"
        if self.config.log_level >= LogLevel.DECISIONS and "log overflow" not in self.situations:
            found = x.cached if kind == EventKind.FINISH else -1
            assert int(event["token"]) == found, f"{event} tells of another prefix hit than {found} tokens"
        self.check_end(x, kind, reason)

    def check_alternatives(self, x: Submission, event: Any) -> None:
        """One LOGPROBS event: full but for the last of its token, and nothing in its unused pairs."""
        e = np.frombuffer(event.tobytes(), LOGPROBS_EVENT)[0]
        count, asked = int(e["count"]), int(x.descriptor["logprobs"])
        left = asked - len(x.alternatives)
        assert count == min(2, left) > 0, f"{count} alternatives, {left} are still to come of {x}"
        assert e["tokens"][count:].tolist() == [-1] * (2 - count)

    def check_end(self, x: Submission, kind: int, reason: int) -> None:
        """The terminal reason is the one that the request's own story gives."""
        if kind == EventKind.FINISH:
            assert x.refusal is None, f"{x} finished, should have been refused with {x.refusal}"
            if reason == FinishReason.CANCELLED:
                assert x.cancelled, f"{x} was never cancelled"
                return
            assert reason == self.expected_finish(x), f"{x} ended with {FinishReason(reason).name}"
            return
        assert kind == EventKind.ERROR
        if reason == ErrorReason.DRAINING:
            assert self.control["control"]["drain_request"][0] or self.control["control"]["stop_request"][0]
            self.situations.add("draining")
        elif reason in (ErrorReason.NAN_LOGITS, ErrorReason.MODEL_ERROR, ErrorReason.NO_TOKEN):
            assert x.spoiled, f"{x} was no victim of a model fault"
        elif reason == ErrorReason.DEADLINE:
            assert x.accepted_at is not None
            due = x.accepted_at + int(x.descriptor["deadline_us"])
            assert x.descriptor["deadline_us"] > 0
            assert self.clock >= due, f"it is {self.clock}, {x} has until {due}"
            self.situations.add("deadline")
        elif reason == ErrorReason.LEASE_LOST:
            silent = self.clock - self.leases[x.ring][1]
            assert 0 < self.config.lease_us <= silent, f"ring {x.ring} was silent for {silent} us only"
        else:
            assert x.refusal == reason, f"{x} was refused with {ErrorReason(reason).name}, expected {x.refusal}"

    def expected_finish(self, x: Submission) -> FinishReason | None:
        """Why a request with these tokens ends here, or None if it should go on."""
        d = x.descriptor
        if not x.tokens:
            return None
        if len(x.tokens) > int(d["min_tokens"]):
            if x.tokens[-1] == EOS and not int(d["flags"]) & 1:
                return FinishReason.EOS
            if x.tokens[-1] in d["stop_ids"][: int(d["n_stop"])].tolist():
                return FinishReason.STOP_TOKEN
        if len(x.tokens) == int(d["max_tokens"]):
            return FinishReason.LENGTH
        return FinishReason.CONTEXT if len(x.known) == self.config.max_len else None

    def _follow_log(self) -> list[Entry] | None:
        """The call's log entries, or None if some were overwritten; situations that occurred are collected."""
        tail, size = int(self.state["header"]["log_tail"][0]), self.config.log_entries
        first, self.log_read = self.log_read, tail
        if tail - first > size:
            self.situations.add("log overflow")
            self.logged = int(self.state["header"]["logged_clock"][0])
            return None
        made = [Entry(*self.log[at % size].tolist()) for at in range(first, tail)]
        previous = None
        for e in made:
            kind, key = LogKind(e.kind), (e.ring, e.slot)
            self.situations.add(kind.name)
            if kind in (LogKind.RESERVATION, LogKind.LEASE):
                self.situations.add(f"{kind.name} {e.a}")
            elif kind == LogKind.PAGE_FREE and previous is not None and previous.kind == LogKind.PAGE_SHARE:
                self.situations.add("twin")
            elif kind == LogKind.PREFIX_HIT:
                self.hit[key] = e.b
            elif kind == LogKind.ADMIT:
                found = self.hit.pop(key, 0)
                x = self.find(*e.request)
                if x is not None and e.c == 0:
                    x.cached = found
                if found and e.c:
                    self.situations.add("resume hit")
            previous = e
        return made

    def entries(self, *kinds: LogKind) -> list[Any]:
        """Log entries of these kinds, oldest first (the log has not wrapped)."""
        tail = int(self.state["header"]["log_tail"][0])
        assert tail <= self.config.log_entries
        return [e for e in self.log[:tail] if int(e["kind"]) in kinds]


def order_of_acceptance(entries: Iterable[Any]) -> list[tuple[int, int]]:
    """(ring, SQ index) of ACCEPT entries."""
    return [(int(e["ring"]), int(e["c"])) for e in entries]
