"""Checks of the scheduler's raw memory, to be run after any call: each raises AssertionError with what it found."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from blink_core.abi.config import EngineConfig
from blink_core.abi.definition import PRIORITIES
from blink_core.abi.dtypes import Array
from blink_core.abi.enums import Admission, PageState, RequestState, SlotFlag

RESERVED = 2
FIELDS = ["generation", "state", "prompt_len", "total", "computed", "emitted", "n_pages", "next", "row", "preemptions"]
FIELDS += ["paused", "arrival", "max_tokens", "judged", "priority", "published", "cached", "admitted", "expires"]
FIELDS += ["mask_index", "mask_box", "chain"]


@dataclass
class Row:
    """The fields of one Request record as plain integers, and what its Sampling record says of credits and masks."""

    generation: int
    state: int
    prompt_len: int
    total: int
    computed: int
    emitted: int
    n_pages: int
    next: int
    row: int
    preemptions: int
    paused: int
    arrival: int
    max_tokens: int
    judged: int
    priority: int
    published: int
    cached: int
    admitted: int
    expires: int
    mask_index: int
    mask_box: int
    chain: int
    flags: int
    logprobs: int

    @property
    def events(self) -> int:
        """Events of one token, its terminal event aside."""
        return 1 + -(-self.logprobs // 2)

    @property
    def unmasked(self) -> bool:
        """True if no mask is missing for the next token."""
        return not self.flags & SlotFlag.MASKED or self.mask_index == self.emitted + 1

    @property
    def asleep(self) -> bool:
        """True of a waiting request that ran before, and that could only wait for its mask if it ran again."""
        return bool(self.state == RequestState.WAITING and self.admitted and not self.unmasked)


@dataclass
class Page:
    """One Page record as plain integers."""

    hash: int
    owner: int
    generation: int
    refs: int
    state: int
    parent: int
    children: int
    bucket_next: int
    lru_prev: int
    lru_next: int


@dataclass
class State:
    """One reading of the state region."""

    config: EngineConfig
    header: dict[str, Any]
    rings: list[dict[str, Any]]
    requests: list[Row]
    running: list[int]
    row_stack: list[int]
    tables: list[list[int]]
    pages: list[Page]
    free_list: list[int]
    quarantine: list[int]
    buckets: list[int]
    page_tokens: Array  # int32[pages, page_size]
    tokens: Array  # int32[rings * slots, max_len]

    def most_pages(self, q: Row) -> int:
        """Pages that a request may need at most."""
        return -(-(min(q.prompt_len + q.max_tokens, self.config.max_len) - 1) // self.config.page_size)

    def table(self, request: int) -> list[int]:
        q = self.requests[request]
        return self.tables[q.row][: q.n_pages]


def read(config: EngineConfig, v: dict[str, Array]) -> State:
    def record(array: Array, at: int) -> dict[str, Any]:
        values = [x.tolist() if isinstance(x, np.ndarray) else x for x in array[at].tolist()]
        return dict(zip(array.dtype.names or (), values, strict=True))

    header = record(v["header"], 0)
    sampling = v["sampling"][["flags", "logprobs"]].tolist()
    return State(
        config,
        header,
        [record(v["rings"], i) for i in range(config.rings)],
        [Row(*r, *s) for r, s in zip(v["requests"][FIELDS].tolist(), sampling, strict=True)],
        v["running"][: header["running"]].tolist(),
        v["row_stack"][: header["free_rows"]].tolist(),
        v["block_tables"].reshape(config.max_rows, config.max_pages).tolist(),
        [Page(*p) for p in v["pages"].tolist()],
        v["free_list"][: header["free_pages"]].tolist(),
        v["quarantine"][: header["quarantined"]].tolist(),
        v["buckets"].tolist(),
        v["page_tokens"].reshape(config.pages, config.page_size),
        v["tokens"].reshape(config.rings * config.slots, config.max_len),
    )


def check_pages(s: State) -> None:
    """Every page in exactly one place, metadata and block tables consistent with it."""
    places: Counter[int] = Counter(range(RESERVED))
    places.update(s.free_list)
    places.update(s.quarantine)
    places.update(page for page, p in enumerate(s.pages) if p.state == PageState.CACHED)
    refs: Counter[int] = Counter()
    for request in s.running:
        q, table = s.requests[request], s.table(request)
        refs.update(table)
        for index, page in enumerate(table):
            p = s.pages[page]
            if index < q.published:
                assert p.state == PageState.CACHED, f"page {page}, place {index} of request {request}, is not cached"
                continue
            places[page] += 1
            found = (p.owner, p.generation, p.refs, p.state)
            expected = (request, q.generation, 1, PageState.OWNED)
            assert found == expected, f"page {page}: {found}, expected {expected}"
    assert places == Counter(range(s.config.pages)), f"pages not in exactly one place: {places}"
    for state, members in ((PageState.FREE, s.free_list), (PageState.QUARANTINED, s.quarantine)):
        for page in members:
            p = s.pages[page]
            assert (p.owner, p.refs, p.state) == (-1, 0, state), f"page {page}: {p}, expected {state.name}"
    for page, p in enumerate(s.pages):
        assert p.refs == refs[page], f"page {page} has {p.refs} refs, {refs[page]} block tables hold it"
        assert page >= RESERVED or p.state == PageState.RESERVED, f"page {page} is no longer reserved"
    if not s.header["in_flight"]:
        assert not s.quarantine, "pages are quarantined and no step runs"


def check_lists(s: State) -> None:
    """Running list in order of service, waiting lists by age and well linked, rows each once, live counts."""
    running = [s.requests[r] for r in s.running]
    order = [(q.priority, q.arrival) for q in running]
    assert order == sorted(set(order)), f"running list is not in order of service: {order}"
    rows = sorted(s.row_stack + [q.row for q in running])
    assert rows == list(range(s.config.max_rows)), f"block-table rows are not each in one place: {rows}"
    waiting_total = 0
    for ring, rs in enumerate(s.rings):
        seen = 0
        for priority in range(PRIORITIES):
            at, last, arrival = rs["wait_head"][priority], -1, -1
            while at >= 0:
                q = s.requests[at]
                assert at // s.config.slots == ring, f"request {at} waits in ring {ring}"
                assert q.priority == priority, f"request {at} of class {q.priority} waits in class {priority}"
                assert q.state == RequestState.WAITING, f"request {at} waits in state {q.state}"
                assert q.arrival > arrival, f"ring {ring} waits out of order at request {at}"
                held = (q.n_pages, q.row, q.computed, q.published, q.chain)
                assert held == (0, -1, 0, 0, 0), f"waiting request {at} holds pages, row or results: {held}"
                arrival, last, seen, at = q.arrival, at, seen + 1, q.next
                assert seen <= s.config.slots, f"ring {ring}'s waiting list does not end"
            tail = rs["wait_tail"][priority]
            assert last == tail, f"ring {ring}: waiting list {priority} ends at {last}, tail is {tail}"
        assert seen == rs["waiting"], f"ring {ring}: {seen} wait, counted {rs['waiting']}"
        ours = [r for r in s.running if r // s.config.slots == ring]
        assert rs["live"] == seen + len(ours), f"ring {ring}: live {rs['live']}, found {seen + len(ours)}"
        waiting_total += seen
    assert s.header["live"] == waiting_total + len(running)
    states = Counter(q.state for q in s.requests)
    assert states[RequestState.RUNNING] == len(running), f"{states} with {len(running)} in the running list"
    assert states[RequestState.WAITING] == waiting_total


def check_requests(s: State) -> None:
    """Token counts of live requests, pages that cover them, nothing held by the dead; deadlines and reservation."""
    size, clock = s.config.page_size, s.header["clock"]
    earliest = [q.expires for q in s.requests if q.state != RequestState.FREE and q.expires]
    if earliest:
        assert 0 < s.header["next_expiry"] <= min(earliest), f"next look at deadlines is late: {earliest}"
        assert min(earliest) > clock, f"a deadline has passed at {min(earliest)}, it is {clock}"
    for index, q in enumerate(s.requests):
        if q.state == RequestState.FREE:
            assert (q.n_pages, q.row) == (0, -1), f"request {index} is over and holds {q.n_pages} pages, row {q.row}"
            continue
        assert q.total == q.prompt_len + q.emitted
        assert q.total < s.config.max_len, f"request {index} knows {q.total} tokens and goes on"
        assert q.emitted < q.max_tokens, f"request {index} has emitted {q.emitted} of {q.max_tokens} and goes on"
        assert q.cached % size == 0
        assert q.cached < q.prompt_len, f"request {index} found {q.cached} cached tokens"
        if q.state == RequestState.RUNNING:
            assert q.computed < q.total, f"request {index} has nothing left to compute and runs"
            assert -(-q.computed // size) <= q.n_pages <= -(-q.total // size), f"request {index}: {q}"
            assert q.published * size <= q.computed, f"request {index} has published what is not computed: {q}"
    held = s.header["reserved_for"]
    assert held == -1 or s.requests[held].state == RequestState.WAITING, f"request {held} holds a reservation: {held}"
    most = sum(s.most_pages(s.requests[r]) for r in s.running)
    assert s.header["committed_pages"] == most, f"{s.header['committed_pages']} pages committed, {most} counted"
    if s.config.admission == Admission.RESERVE:
        assert most <= s.config.pages - RESERVED, f"{most} pages promised of {s.config.pages - RESERVED}"


def check_fifo(s: State) -> None:
    """First admissions of a ring and class happen in order of acceptance."""
    for ring in range(s.config.rings):
        for priority in range(PRIORITIES):
            ours = s.requests[ring * s.config.slots : (ring + 1) * s.config.slots]
            live = [q for q in ours if q.state != RequestState.FREE and q.priority == priority]
            entered = [q.arrival for q in live if q.admitted]
            never = [q.arrival for q in live if not q.admitted]
            assert not entered or not never or max(entered) < min(never), f"ring {ring}: {entered} before {never}"
            assert all(q.admitted for q in live if q.state == RequestState.RUNNING or q.preemptions)


def check_credits(s: State) -> None:
    """Events not consumed, those of the plan in flight and terminal events owed fit into the completion queue."""
    for ring, rs in enumerate(s.rings):
        owed = rs["cq_tail"] - rs["cq_head"] + rs["planned"] + rs["live"]
        assert rs["cq_head"] <= rs["cq_published"] <= rs["cq_tail"]
        assert owed <= s.config.cq_entries, f"ring {ring} may need {owed} of {s.config.cq_entries} entries"
        if not s.header["in_flight"]:
            assert rs["planned"] == 0


def check_deficits(s: State) -> None:
    """No ring saves up more than its turn and its largest request."""
    for ring, rs in enumerate(s.rings):
        for priority, deficit in enumerate(rs["deficit"]):
            most = s.config.quantum + s.config.max_len
            assert 0 <= deficit <= most, f"ring {ring}, class {priority}: deficit {deficit}, at most {most}"


def token_credit(s: State, request: int) -> bool:
    rs = s.rings[request // s.config.slots]
    need = s.requests[request].events + s.config.slots
    return bool(rs["cq_tail"] - rs["cq_head"] + rs["planned"] + need <= s.config.cq_entries)


def heads(s: State, priority: int) -> list[int]:
    """Oldest waiting request of each ring in a class that is not asleep."""
    found = []
    for rs in s.rings:
        at = rs["wait_head"][priority]
        while at >= 0 and s.requests[at].asleep:
            at = s.requests[at].next
        found += [at] if at >= 0 else []
    return found


def fits(s: State, request: int) -> bool:
    """Rows and pages are there for it, whatever of its prompt may be cached besides."""
    q = s.requests[request]
    free = s.header["free_pages"] + s.header["idle_cached"]
    reserve = s.config.admission == Admission.RESERVE
    if reserve and s.header["committed_pages"] + s.most_pages(q) > s.config.pages - RESERVED:
        return False
    return bool(s.header["free_rows"] > 0 and -(-q.total // s.config.page_size) <= free)


def check_progress(s: State, before: State, launched: bool, planned: set[int], budget_left: int) -> None:
    """A decode with credits and mask is in every plan; nobody who could run is left out for nothing.

    Nor is anybody admitted again who could only wait.

    before: as it was before the boundary.
    """
    for request in s.running:
        q, earlier = s.requests[request], before.requests[request]
        same = q.generation == earlier.generation
        assert not (same and earlier.asleep), f"request {request} was admitted again without its mask"
        if q.total - q.computed == 1 and request not in planned:
            free = token_credit(s, request) and q.unmasked
            assert not free, f"request {request} was left out of the plan with credit and mask"
        if not launched and q.total - q.computed > 1:
            able = token_credit(s, request) and q.unmasked
            room = q.n_pages * s.config.page_size > q.computed or s.header["free_pages"] + s.header["idle_cached"]
            idle = not able and not room
            assert idle, f"request {request} could go on and no step was launched"
    holder = s.header["reserved_for"]
    for priority in range(PRIORITIES):
        if holder >= 0 and s.requests[holder].priority <= priority and token_credit(s, holder):
            break  # it keeps others waiting
        for request in heads(s, priority):
            if token_credit(s, request) and budget_left > 0:
                old = [r for r in s.running if s.requests[r].paused >= s.config.paused_limit]
                q, preemptions = s.requests[request], before.requests[request].preemptions
                if q.preemptions > preemptions and q.paused >= s.config.paused_limit:
                    continue  # paused for long, it gave way to a lower class just now
                assert not fits(s, request), f"head {request} of class {priority} fits and was left out"
                assert not old, f"rows paused for long {old} keep head {request} out"


def check_fresh(config: EngineConfig, state: dict[str, Array]) -> None:
    """Before the first call: requests, rings and pages hold nothing, and what nobody has used is zero."""
    least = {
        "requests": {"next": -1, "row": -1},
        "rings": {"wait_head": -1, "wait_tail": -1},
        "pages": {"owner": -1, "bucket_next": -1, "lru_prev": -1, "lru_next": -1, "state": PageState.FREE},
    }
    for section, fields in least.items():
        expected = np.zeros(len(state[section]), state[section].dtype)
        for name, value in fields.items():
            expected[name] = value
        if section == "pages":
            expected["state"][:RESERVED] = PageState.RESERVED
        same = np.array_equal(state[section].view(np.uint8), expected.view(np.uint8))
        assert same, f"{section} are not as new: {state[section]}"
    for section in ("sampling", "bias", "running", "block_tables", "quarantine", "page_tokens", "masks", "tokens"):
        assert not state[section].view(np.uint8).any(), f"{section} are not as new: {state[section]}"
    assert sorted(state["row_stack"].tolist()) == list(range(config.max_rows)), f"rows {state['row_stack']}"
    free = state["free_list"][: config.pages - RESERVED].tolist()
    assert sorted(free) == list(range(RESERVED, config.pages)), f"free pages {free}"
    assert (state["buckets"] == -1).all(), f"buckets {state['buckets']}"


def check_all(s: State) -> None:
    check_pages(s)
    check_lists(s)
    check_requests(s)
    check_fifo(s)
    check_credits(s)
    check_deficits(s)


def check_idle(s: State) -> None:
    """Nothing lives: every page is free or cached and nobody's."""
    config = s.config
    assert s.header["live"] == 0
    assert not s.running
    cached = [page for page, p in enumerate(s.pages) if p.state == PageState.CACHED]
    everything = sorted(s.free_list + cached)
    assert everything == list(range(RESERVED, config.pages)), "pages are missing from free list and cache"
    assert s.header["idle_cached"] == len(cached)
    assert sorted(s.row_stack) == list(range(config.max_rows))
    assert not s.quarantine
    assert s.header["reserved_for"] == -1
