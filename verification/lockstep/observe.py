"""Observables of the specification, in the order in which `blink_core/runtime/native/lockstep.hpp` records them."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache

from blink_core.abi.config import EngineConfig
from blink_core.abi.enums import EventKind, PageState, RequestState
from verification.spec import kv, plan
from verification.spec.machine import Machine
from verification.spec.state import Descriptor, Request

INIT, IDLE_BOUNDARY, LAUNCH, POLL = 0, 1, 2, 3  # which call a record follows
HEADER = (
    "step committed boundaries clock arrivals admissions preemptions tokens lookups hits evictions state live "
    "in_flight idle_cached committed_pages reserved_for reserved_since turn[0] turn[1] turn[2] turn[3]"
).split()
RING = (
    "gpu.epoch_ack gpu.sq_head gpu.cq_tail gpu.lapses epoch sq_next cq_tail cq_published cq_head lease lease_at "
    "deficit[0] deficit[1] deficit[2] deficit[3] waiting live torn duplicates stale_cancels "
    "bad_heads bad_masks planned lapsed"
).split()
REQUEST = (
    "arrival tag expires generation priority prompt_len max_tokens computed emitted published cached row preemptions "
    "paused mask_index admitted mask_box"
).split()
SAMPLING = (
    "seed temperature top_p min_p top_k repetition_penalty presence_penalty frequency_penalty min_tokens prompt_len "
    "n_bias logprobs flags choice n_stop"
).split() + [f"stop_ids[{i}]" for i in range(8)]
ROW = "request generation q_start q_len context_len sample emitted masked ring slot n_pages row".split()
LOG = "step kind ring slot generation a b c".split()


@lru_cache(4096)
def float_bits(value: float) -> int:
    """Bits of a value as a 32-bit float."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def signed(word: int) -> int:
    """A 64-bit word as the signed number that programs and records hold."""
    return word - (1 << 64) if word >> 63 else word


def observe(m: Machine, call: int) -> list[int]:
    """The record after one call; takes the events and log entries that it made."""
    c = m.config
    holder, slots = m.reserved, c.slots
    out = [
        call,
        m.step,
        m.committed,
        m.boundaries,
        m.clock,
        m.arrivals,
        m.admissions,
        m.preemptions,
        m.tokens,
        m.lookups,
    ]
    out += (
        m.hits,
        m.evictions,
        m.engine,
        m.live,
        int(m.plan is not None),
        len(m.idle),
        plan.committed_pages(m, m.running),
    )
    out += (-1, 0) if holder is None else (holder.ring.index * slots + holder.slot, m.reserved_since)
    out += m.turn
    for r in m.rings:
        g = r.memory
        out += (g.epoch_ack, g.sq_head, g.cq_tail, r.lapses, r.epoch, r.sq_next, r.cq_tail, r.cq_published, r.cq_head)
        out += (
            r.lease,
            r.lease_at,
            *r.deficit,
            sum(map(len, r.waiting)),
            r.live,
            r.torn,
            r.duplicates,
            r.stale_cancels,
        )
        out += (r.bad_heads, r.bad_masks, r.planned, r.lapsed)
        for waiting in r.waiting:
            for request in waiting:
                out.append(r.index * slots + request.slot)
            out.append(-1)
    for r in m.rings:
        for judged, live in zip(r.judged, r.requests, strict=True):
            if live is None:
                out += (judged, RequestState.FREE)
            else:
                out.append(judged)
                _request(out, live)
    _pages(out, m)
    out.append(len(m.running))
    out += [q.ring.index * slots + q.slot for q in m.running]
    _list(out, m.rows)
    if call == LAUNCH:
        _plan(out, m)
    _events(out, m)
    out.append(len(m.log))
    for entry in m.log:
        out += entry
    m.log.clear()
    return out


def _list(out: list[int], values: list[int] | tuple[int, ...]) -> None:
    out.append(len(values))
    out += values


def sampling_of(d: Descriptor) -> tuple[int, ...]:
    floats = (d.repetition_penalty, d.presence_penalty, d.frequency_penalty)
    first = (d.seed, float_bits(d.temperature), float_bits(d.top_p), float_bits(d.min_p), d.top_k)
    last = (d.min_tokens, d.prompt_len, d.n_bias, d.logprobs, d.flags, d.choice, d.n_stop)
    return (*first, *map(float_bits, floats), *last, *d.stop_ids)


def _request(out: list[int], q: Request) -> None:
    d = q.descriptor
    out += (
        q.state,
        q.arrival,
        d.tag,
        signed(q.expires),
        q.generation,
        d.priority,
        d.prompt_len,
        d.max_tokens,
        q.computed,
    )
    out += (q.emitted, q.published, q.cached, q.row, q.preemptions)
    out += (q.paused if q.row >= 0 else 0, q.mask_index, q.admitted, d.mask_box)
    out += sampling_of(d)
    for pair in q.bias:
        out += pair
    _list(out, q.tokens)
    if q.row >= 0:
        _list(out, q.pages)
        if q.mask_index == q.emitted + 1:
            _list(out, q.mask)


def _pages(out: list[int], m: Machine) -> None:
    slots = m.config.slots
    owners = {page: request for request in m.running for page in request.pages}
    children = Counter(parent for parent, _ in m.cache)
    for page, state in enumerate(m.page_state):
        out.append(state)
        if state == PageState.OWNED:
            owner = owners[page]
            out += (owner.ring.index * slots + owner.slot, owner.generation)
        elif state == PageState.CACHED:
            key = m.key[page]
            out += (m.holders[page], key[0], children[page])
            out += key[1]
    _list(out, m.free)
    _list(out, m.quarantine)
    out += m.idle
    out.append(-1)


def _plan(out: list[int], m: Machine) -> None:
    rows = m.plan or []
    size, slots = m.config.page_size, m.config.slots
    last = rows[-1]
    out += (m.step, len(rows), last.q_start + last.q_len, sum(row.sample for row in rows))
    for row in rows:
        q = row.request
        index, pages = q.ring.index * slots + q.slot, len(q.pages)
        out += (index, q.generation, row.q_start, row.q_len, row.context_len, row.sample, row.emitted)
        out += (int(q.masked and row.sample), q.ring.index, q.slot, pages, q.row)
    for row in rows:
        q = row.request
        for position in range(row.context_len - row.q_len, row.context_len):
            page = q.pages[position // size]
            out += (q.tokens[position], position, page * size + position % size)


def _events(out: list[int], m: Machine) -> None:
    for r in m.rings:
        made = [event for event in m.events if event[0] == r.index]
        out.append(len(made))
        for event in made:
            out.append(event[1] + 1)
            out += event[2:]
    m.events.clear()


class Reader:
    """Walks a record; yields (name, value) in order."""

    def __init__(self, config: EngineConfig, record: list[int]) -> None:
        self.c, self.record, self.at = config, record, 0

    def take(self, name: str) -> tuple[str, int]:
        value = self.record[self.at]
        self.at += 1
        return name, value

    def all(self, prefix: str, names: list[str]) -> Iterator[tuple[str, int]]:
        for name in names:
            yield self.take(f"{prefix}.{name}")

    def counted(self, name: str, parts: list[str] | None = None) -> Iterator[tuple[str, int]]:
        got = self.take(f"len({name})")
        yield got
        for i in range(got[1]):
            if parts is None:
                yield self.take(f"{name}[{i}]")
            else:
                yield from self.all(f"{name}[{i}]", parts)

    def chain(self, name: str) -> Iterator[tuple[str, int]]:
        while True:
            got = self.take(name)
            yield got
            if got[1] < 0:
                return

    def walk(self) -> Iterator[tuple[str, int]]:
        c = self.c
        call = self.take("call")
        yield call
        yield from self.all("header", HEADER)
        for r in range(c.rings):
            yield from self.all(f"ring {r}", RING)
            for level in range(4):
                yield from self.chain(f"ring {r}.waiting[{level}]")
        for index in range(c.rings * c.slots):
            yield from self.request(f"request {index // c.slots}:{index % c.slots}")
        for page in range(c.pages):
            state = self.take(f"page {page}.state")
            yield state
            if state[1] == PageState.OWNED:
                yield from self.all(f"page {page}", ["owner", "generation"])
            elif state[1] == PageState.CACHED:
                yield from self.all(f"page {page}", ["refs", "parent", "children"])
                yield from self.all(f"page {page}", [f"token[{i}]" for i in range(c.page_size)])
        yield from self.counted("free_list")
        yield from self.counted("quarantine")
        yield from self.chain("lru")
        yield from self.counted("running")
        yield from self.counted("row_stack")
        if call[1] == LAUNCH:
            yield from self.plan()
        for r in range(c.rings):
            yield from self.events(f"ring {r}")
        yield from self.counted("log", LOG)

    def request(self, name: str) -> Iterator[tuple[str, int]]:
        yield self.take(f"{name}.judged")
        state = self.take(f"{name}.state")
        yield state
        if state[1] == RequestState.FREE:
            return
        fields = dict(got := list(self.all(name, REQUEST)))
        yield from got
        sampling = list(self.all(f"{name}.sampling", SAMPLING))
        yield from sampling
        yield from self.all(f"{name}.bias", ["token", "bits"] * dict(sampling)[f"{name}.sampling.n_bias"])
        yield from self.counted(f"{name}.tokens")
        if fields[f"{name}.row"] >= 0:
            yield from self.counted(f"{name}.block_table")
            if fields[f"{name}.mask_index"] == fields[f"{name}.emitted"] + 1:
                yield from self.counted(f"{name}.mask")

    def plan(self) -> Iterator[tuple[str, int]]:
        header = list(self.all("plan", ["step", "n_rows", "n_tokens", "n_samples"]))
        yield from header
        for i in range(header[1][1]):
            yield from self.all(f"plan.row[{i}]", ROW)
        for i in range(header[2][1]):
            yield from self.all(f"plan.token[{i}]", ["id", "position", "kv_slot"])

    def events(self, name: str) -> Iterator[tuple[str, int]]:
        count = self.take(f"{name}.events")
        yield count
        for i in range(count[1]):
            at = f"{name}.event[{i}]"
            head = list(self.all(at, ["seq", "slot", "kind", "reason", "generation"]))
            yield from head
            if head[2][1] == EventKind.LOGPROBS:
                yield from self.all(at, ["token", "logprob"] * head[3][1])
            else:
                yield from self.all(at, ["index", "token", "logprob", "step"])


def describe(config: EngineConfig, record: list[int]) -> list[tuple[str, int]]:
    """A record with the name of each value; a record that breaks off ends the list."""
    out: list[tuple[str, int]] = []
    try:
        out.extend(Reader(config, record).walk())
    except IndexError:
        out.append(("end of record", len(record)))
    return out


__all__ = ["IDLE_BOUNDARY", "INIT", "LAUNCH", "POLL", "describe", "float_bits", "kv", "observe"]
