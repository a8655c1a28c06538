"""Checks of the scheduler's raw memory, to be run after any call: each raises AssertionError with what it found."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from blink_core.abi.config import EngineConfig
from blink_core.abi.dtypes import Array
from blink_core.abi.enums import PageState, RequestState

RESERVED = 2
FIELDS = ["generation", "state", "prompt_len", "total", "computed", "emitted", "n_pages", "next", "row", "preemptions"]
FIELDS += ["paused", "arrival", "max_tokens", "judged"]


@dataclass
class Row:
    """The fields of one Request record as plain integers."""

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


@dataclass
class State:
    """One reading of the state region."""

    config: EngineConfig
    header: dict[str, int]
    rings: list[dict[str, int]]
    requests: list[Row]
    running: list[int]
    row_stack: list[int]
    tables: list[list[int]]
    pages: list[tuple[int, int, int, int]]  # owner, generation, refs, state
    free_list: list[int]
    quarantine: list[int]


def read(config: EngineConfig, v: dict[str, Array]) -> State:
    def record(array: Array, at: int) -> dict[str, int]:
        return dict(zip(array.dtype.names or (), array[at].tolist(), strict=True))

    header = record(v["header"], 0)
    return State(
        config,
        header,
        [record(v["rings"], i) for i in range(config.rings)],
        [Row(*r) for r in v["requests"][FIELDS].tolist()],
        v["running"][: header["running"]].tolist(),
        v["row_stack"][: header["free_rows"]].tolist(),
        v["block_tables"].reshape(config.max_rows, config.max_pages).tolist(),
        v["pages"].tolist(),
        v["free_list"][: header["free_pages"]].tolist(),
        v["quarantine"][: header["quarantined"]].tolist(),
    )


def check_pages(s: State) -> None:
    """Every page in exactly one place, metadata and block tables consistent with it."""
    places: Counter[int] = Counter(range(RESERVED))
    places.update(s.free_list)
    places.update(s.quarantine)
    expected: dict[int, tuple[int, int, int, int]] = {}
    for request in s.running:
        q = s.requests[request]
        table = s.tables[q.row][: q.n_pages]
        places.update(table)
        for page in table:
            expected[page] = (request, q.generation, 1, PageState.OWNED)
    assert places == Counter(range(s.config.pages)), f"pages not in exactly one place: {places}"
    for state, members in ((PageState.FREE, s.free_list), (PageState.QUARANTINED, s.quarantine)):
        for page in members:
            owner, _, refs, found = s.pages[page]
            assert (owner, refs, found) == (-1, 0, state), f"page {page}: {s.pages[page]}, expected {state.name}"
    for page, metadata in expected.items():
        assert s.pages[page] == metadata, f"page {page}: {s.pages[page]}, expected {metadata}"
    for page in range(RESERVED):
        assert s.pages[page][3] == PageState.RESERVED, f"page {page} is no longer reserved"
    if not s.header["in_flight"]:
        assert not s.quarantine, "pages are quarantined and no step runs"


def check_lists(s: State) -> None:
    """Running list by age, waiting lists by age and well linked, block-table rows each once, live counts."""
    running = [s.requests[r] for r in s.running]
    ages = [q.arrival for q in running]
    assert ages == sorted(set(ages)), f"running list is not in order of age: {ages}"
    rows = sorted(s.row_stack + [q.row for q in running])
    assert rows == list(range(s.config.max_rows)), f"block-table rows are not each in one place: {rows}"
    waiting_total = 0
    for ring, rs in enumerate(s.rings):
        at, seen, last = rs["wait_head"], 0, -1
        arrival = -1
        while at >= 0:
            q = s.requests[at]
            assert at // s.config.slots == ring, f"request {at} waits in ring {ring}"
            assert q.state == RequestState.WAITING, f"request {at} waits in state {q.state}"
            assert q.arrival > arrival, f"ring {ring} waits out of order at request {at}"
            assert q.n_pages == 0, f"waiting request {at} owns {q.n_pages} pages"
            assert q.row == -1, f"waiting request {at} has row {q.row}"
            assert q.computed == 0, f"waiting request {at} has {q.computed} computed tokens without pages"
            arrival, last, seen, at = q.arrival, at, seen + 1, q.next
            assert seen <= s.config.slots, f"ring {ring}'s waiting list does not end"
        assert last == rs["wait_tail"], f"ring {ring}: waiting list ends at {last}, tail is {rs['wait_tail']}"
        assert seen == rs["waiting"], f"ring {ring}: {seen} wait, counted {rs['waiting']}"
        ours = [r for r in s.running if r // s.config.slots == ring]
        assert rs["live"] == seen + len(ours), f"ring {ring}: live {rs['live']}, found {seen + len(ours)}"
        waiting_total += seen
    assert s.header["live"] == waiting_total + len(running)
    states = Counter(q.state for q in s.requests)
    assert states[RequestState.RUNNING] == len(running), f"{states} with {len(running)} in the running list"
    assert states[RequestState.WAITING] == waiting_total


def check_requests(s: State) -> None:
    """Token counts of live requests, pages that cover them, nothing held by the dead."""
    size = s.config.page_size
    for index, q in enumerate(s.requests):
        if q.state == RequestState.FREE:
            assert (q.n_pages, q.row) == (0, -1), f"request {index} is over and holds {q.n_pages} pages, row {q.row}"
            continue
        assert q.total == q.prompt_len + q.emitted
        assert q.total < s.config.max_len, f"request {index} knows {q.total} tokens and goes on"
        assert q.emitted < q.max_tokens, f"request {index} has emitted {q.emitted} of {q.max_tokens} and goes on"
        if q.state == RequestState.RUNNING:
            assert q.computed < q.total, f"request {index} has nothing left to compute and runs"
            assert -(-q.computed // size) <= q.n_pages <= -(-q.total // size), f"request {index}: {q}"


def check_fifo(s: State) -> None:
    """First admissions of a ring happen in order of acceptance."""
    for ring in range(s.config.rings):
        ours = s.requests[ring * s.config.slots : (ring + 1) * s.config.slots]
        live = [q for q in ours if q.state != RequestState.FREE]
        entered = [q.arrival for q in live if q.state == RequestState.RUNNING or q.preemptions]
        never = [q.arrival for q in live if q.state == RequestState.WAITING and not q.preemptions]
        assert not entered or not never or max(entered) < min(never), f"ring {ring}: {entered} before {never}"


def check_credits(s: State) -> None:
    """Events not consumed, tokens in flight and terminal events owed fit into the completion queue together."""
    for ring, rs in enumerate(s.rings):
        owed = rs["cq_tail"] - rs["cq_head"] + rs["planned"] + rs["live"]
        assert rs["cq_head"] <= rs["cq_published"] <= rs["cq_tail"]
        assert owed <= s.config.cq_entries, f"ring {ring} may need {owed} of {s.config.cq_entries} entries"
        if not s.header["in_flight"]:
            assert rs["planned"] == 0


def has_token_credit(s: State, ring: int) -> bool:
    rs = s.rings[ring]
    return rs["cq_tail"] - rs["cq_head"] + rs["planned"] + 1 + s.config.slots <= s.config.cq_entries


def check_progress(s: State, launched: bool, planned: set[int]) -> None:
    """A decode with a credit is in every plan; nothing is launched only if nothing could be."""
    for request in s.running:
        q = s.requests[request]
        if q.total - q.computed == 1 and request not in planned:
            assert q.paused > 0, f"request {request} needs one token, was not planned and not paused"
            assert not has_token_credit(s, request // s.config.slots), f"request {request} paused with a credit"
    if launched:
        return
    assert all(s.requests[r].paused for r in s.running), "a row could run and no step was launched"
    for ring, rs in enumerate(s.rings):
        if rs["wait_head"] >= 0 and has_token_credit(s, ring):
            q = s.requests[rs["wait_head"]]
            room = s.header["free_rows"] > 0 and -(-q.total // s.config.page_size) <= s.header["free_pages"]
            old = [r for r in s.running if s.requests[r].paused >= s.config.paused_limit]
            assert not room, f"ring {ring}'s head fits and no step was launched"
            assert not old, f"rows paused for long {old} keep ring {ring}'s head out"


def check_all(s: State) -> None:
    check_pages(s)
    check_lists(s)
    check_requests(s)
    check_fifo(s)
    check_credits(s)


def check_idle(s: State) -> None:
    """Nothing lives: everything is back where it started."""
    config: Any = s.config
    assert s.header["live"] == 0
    assert not s.running
    assert sorted(s.free_list) == list(range(RESERVED, config.pages)), "pages are missing from the free list"
    assert sorted(s.row_stack) == list(range(config.max_rows))
    assert not s.quarantine
