"""KV sanitizer of the host engine: an AddressSanitizer for KV memory (design section 5).

A tag beside every KV row says who wrote it, for which token and place, and when (`blink_core.ops.kv_tags`). It is
written with the row, from the arrays that the model was given: token ids, positions, slots. Before attention reads a
row, its tag is held against what the *reading* request's own tokens say must stand there. Neither side takes the other
one's word, so a block table, page, position, copy or reuse that is wrong shows at the first read. A row of another
request is right only as a part of the prefix cache: equal tokens up to it, in a full page that is CACHED and behind
which the reader's new tokens begin, written in an earlier step, by and for requests that use the cache.

A mismatch is reported once a request, with both owners (`KvReport`), and ends the reader with ERROR MODEL_ERROR at its
next sampled token, whatever it may be by then: what it read is wrong, and rows of other requests have been checked for
themselves. None of its pages is ever published, for only a good token publishes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from blink_core.abi.dtypes import Array
from blink_core.abi.enums import PageState, RequestState, SlotFlag, StepStatus
from blink_core.ops.attention import AttentionPlan, gather
from blink_core.ops.kv_tags import (
    CACHE_BIT,
    OWNER,
    PLACE,
    PREFIX,
    TAG_BYTES,
    TAG_WORDS,
    U64,
    WRITTEN,
    owner_word,
    places,
    prefixes,
    written_word,
)
from blink_core.runtime.descriptor import KV_COUNTERS
from blink_core.runtime.kv_report import MAX_REPORTS, REPORT_RECORD, KvReport, Mismatch, ReportFile
from blink_core.runtime.memory import OwnedMemory

if TYPE_CHECKING:
    from blink_core.models import KVPool
    from blink_core.ops.numpy_ops import I32
    from blink_core.runtime.cpu import CpuRuntime, Plan

_LOW = np.uint64(0xFFFFFFFF)
_CACHED = np.uint64(CACHE_BIT)


@dataclass(slots=True)
class _History:
    """The tokens of one request as it knows them: prefix and place word of each position, the first `known` count.

    arrival: tells two lives of one owner apart, as the next front end of a ring begins with the generations anew.
    """

    owner: int
    arrival: int
    prefix: U64
    place: U64
    known: int = 0


@dataclass(slots=True)
class _Row:
    """A row of the step's plan. None of its rows is checked when the request was `gone` before the step began."""

    request: int
    generation: int
    history: _History
    cached: bool
    gone: bool

    @property
    def life(self) -> tuple[int, int]:
        return self.history.owner, self.history.arrival


@dataclass(slots=True)
class _Run:
    """A forward pass: rows of the plan, where each one's new tokens begin, and what was found where the first layer's
    keys were read, by work list and group."""

    rows: I32
    row_starts: I32
    context_lens: I32
    starts: list[int]
    tags: U64
    seen: dict[tuple[int, int], U64] = field(default_factory=dict)


class KvSanitizer:
    """Tags of a KV pool; write side, check and reports. Used by the engine's one step thread.

    counter_memory holds `KV_COUNTERS`, for other processes too.
    """

    def __init__(self, kv: KVPool, *, prefix_cache: bool, reports: Path) -> None:
        """reports: file of one JSON object a line, each a `KvReport`."""
        layers, pages, size = kv.k.shape[:3]
        self._page_size, self._prefix_cache = size, prefix_cache
        self._memory = OwnedMemory("kv-tags", 2 * layers * pages * size * TAG_BYTES)
        tags = self._memory.array(np.uint64, (2, layers, pages, size, TAG_WORDS))
        self._planes: dict[int, tuple[str, int, U64]] = {
            _address(pool[layer]): (kind, layer, tags[i, layer])
            for i, (kind, pool) in enumerate((("k", kv.k), ("v", kv.v)))
            for layer in range(layers)
        }
        self.counter_memory = OwnedMemory("kv-sanitizer", 8 * len(KV_COUNTERS))
        self._counters = self.counter_memory.array(np.uint64, (len(KV_COUNTERS),))
        self.reports = reports
        self._file = ReportFile(reports)
        self._histories: dict[int, _History] = {}
        self._condemned: dict[int, tuple[int, int]] = {}  # request -> life
        self._plan: list[_Row] = []
        self._step = 0
        self._run: _Run | None = None
        self._slots = 1
        self._given_up: Callable[[], bool] = lambda: False
        self._requests: Array = np.zeros(0)
        self._pages: Array = np.zeros(0)

    def bind(self, runtime: CpuRuntime) -> None:
        """Gives the scheduler's records of requests and pages. Must come before the first step."""
        state = runtime.layouts["State"].views(runtime.state.buffer)
        self._slots, self._requests, self._pages = runtime.config.slots, state["requests"], state["pages"]
        self._given_up = lambda: runtime.step_given_up
        self.reports.touch()

    def count(self, name: str, more: int = 1) -> None:
        self._counters[KV_COUNTERS.index(name)] += np.uint64(more)

    # -- a step --------------------------------------------------------------------------------------------------------

    def begin_step(self, plan: Plan) -> None:
        """Takes in what each request of the plan knows its tokens to be."""
        self.count("steps")
        self._step, self._plan, self._run = plan.step & 0xFFFFFFFF, [], None
        for index, row in enumerate(plan.rows):
            request, generation, context = int(row["request"]), int(row["generation"]), int(row["context_len"])
            history = self._history(request, generation, plan.tokens[index], context)
            uses = not int(plan.sampling[index]["flags"]) & SlotFlag.NO_PREFIX_CACHE
            # Looked at after its tokens were: as long as it runs, nobody else's can have stood there.
            gone = (
                int(self._requests["state"][request]) != RequestState.RUNNING
                or int(self._requests["generation"][request]) != generation
            )
            if gone:
                self._histories.pop(request, None)
                self.count("gone")
            self._plan.append(_Row(request, generation, history, self._prefix_cache and uses, gone))

    def end_step(self, plan: Plan) -> None:
        """Lets no token of a request pass that read a wrong row."""
        for index, row in enumerate(self._plan):
            if self._condemned.get(row.request) == row.life:
                plan.results["status"][index] = StepStatus.FAILED

    def _history(self, request: int, generation: int, tokens: Array, context: int) -> _History:
        owner, arrival = owner_word(request, generation), int(self._requests["arrival"][request])
        history = self._histories.get(request)
        if history is None or (history.owner, history.arrival) != (owner, arrival):
            history = _History(owner, arrival, np.zeros(tokens.size, np.uint64), np.zeros(tokens.size, np.uint64))
            self._histories[request] = history
        if history.known < context:
            first, more = history.known, np.arange(history.known, context)
            before = int(history.prefix[first - 1]) if first else 0
            new = tokens[first:context].copy()
            history.prefix[first:context] = prefixes(new, more, before)
            history.place[first:context] = places(new, more)
            history.known = context
        return history

    # -- TagStore: the write side --------------------------------------------------------------------------------------

    def begin_run(self, token_ids: I32, positions: I32, row_starts: I32, context_lens: I32, origin: I32 | None) -> None:
        """Tags of the new tokens, from what the model was given."""
        rows = np.arange(context_lens.size, dtype=np.int32) if origin is None else origin
        tags = np.empty((token_ids.size, TAG_WORDS), np.uint64)
        tags[:, PLACE] = places(token_ids, positions)
        starts = []
        for r, index in enumerate(rows.tolist()):
            row, new = self._plan[index], slice(int(row_starts[r]), int(row_starts[r + 1]))
            start = int(context_lens[r]) - (new.stop - new.start)
            before = int(row.history.prefix[start - 1]) if start else 0
            tags[new, PREFIX] = prefixes(token_ids[new], positions[new], before)
            tags[new, OWNER] = row.history.owner
            tags[new, WRITTEN] = written_word(self._step, row.cached)
            starts.append(start)
        self._run = _Run(rows, row_starts, context_lens, starts, tags)

    def tags_of(self, pages: Array) -> U64:
        """Tags of the keys or values of one layer, uint64 [pages, page_size, TAG_WORDS]."""
        return self._planes[_address(pages)][2]

    def new_tags(self) -> U64:
        """Of the run's new tokens, uint64 [T, TAG_WORDS]."""
        return self._running.tags

    @property
    def _running(self) -> _Run:
        if self._run is None:
            raise RuntimeError("the model runs outside a step of the sanitized engine")
        return self._run

    # -- TagStore: the check -------------------------------------------------------------------------------------------

    def check(self, pages: Array, plan: AttentionPlan, batch_invariant: bool) -> None:
        """Holds every row that attention is about to read against what its reader must find there."""
        kind, layer, tags = self._planes[_address(pages)]
        run = self._running
        for number, group in enumerate((*plan.decode, *plan.prefill)):
            rows = group.pages.shape[0]
            found: U64 = gather(tags, group, batch_invariant).reshape(rows, -1, TAG_WORDS)
            first = run.seen.setdefault((id(plan), number), found)
            if first is not found and np.array_equal(first, found):
                continue
            tokens = group.tokens.reshape(rows, -1)[:, 0]
            members = np.searchsorted(run.row_starts, tokens, side="right") - 1
            for n, r in enumerate(members.tolist()):
                row = self._plan[int(run.rows[r])]
                if row.gone or self._condemned.get(row.request) == row.life:
                    continue
                length = int(group.lengths[n])
                at = int(run.context_lens[r]) - length  # position of the first row read
                mine = found[n, :length]
                wrong = self._first_wrong(mine, row, group.pages[n], at, run.starts[r], layer == 0 and kind == "k")
                if wrong is None and first is not found and not np.array_equal(first[n, :length], mine):
                    differs = np.any(first[n, :length] != mine, axis=1)
                    wrong = int(np.argmax(differs)), Mismatch.LAYERS
                if wrong is not None:
                    offset, what = wrong
                    self._report(what, layer, kind, row, mine[offset], group.pages[n], at, offset)

    def _first_wrong(
        self, tags: U64, row: _Row, pages: Array, at: int, start: int, count: bool
    ) -> tuple[int, Mismatch] | None:
        """Index in `tags` [n, TAG_WORDS], of positions from `at` on, of the first wrong one.

        start: first new position. count: these rows count.
        """
        history, size = row.history, self._page_size
        same = tags[:, PREFIX] == history.prefix[at : at + len(tags)]
        same &= tags[:, PLACE] == history.place[at : at + len(tags)]
        mine = tags[:, OWNER] == history.owner
        good = same & mine
        new = max(start - at, 0)
        good[new:] &= tags[new:, WRITTEN] & _LOW == self._step
        others = np.flatnonzero(~good)
        if others.size:
            written, state = tags[others, WRITTEN], self._pages["state"][pages[others // size]]
            full = ((at + others) // size + 1) * size <= start
            shared = same[others] & ~mine[others] & full & (state == PageState.CACHED) & row.cached
            shared &= (written & _CACHED != 0) & (written & _LOW != self._step)
            if count:
                self.count("shared", int(shared.sum()))
            if not shared.all():
                place = int(others[np.argmin(shared)])
                return place, self._kind(tags[place], bool(same[place]), bool(mine[place]), row, at + place)
        if count:
            self.count("rows", len(tags))
        return self._page_wrong(row, pages[: -(-len(tags) // size)])

    @staticmethod
    def _kind(tag: U64, same: bool, mine: bool, row: _Row, position: int) -> Mismatch:
        if not int(tag[OWNER]):
            return Mismatch.UNWRITTEN
        if not mine:
            return Mismatch.NOT_SHARED if same else Mismatch.FOREIGN
        if same:
            return Mismatch.NOT_NOW
        return Mismatch.POSITION if int(tag[PLACE] & _LOW) != position else Mismatch.TOKENS

    def _page_wrong(self, row: _Row, pages: Array) -> tuple[int, Mismatch] | None:
        """A page whose rows are right, but which the request does not hold any more. Those of a request that is being
        cancelled are QUARANTINED, or OWNED by -1 for the moment of its release, until the step has ended. Those of a
        step that the engine has given up, for it stops, are free while it reads them, and nobody takes them any more.
        """
        records = self._pages[pages]
        state, owner = records["state"], records["owner"]
        owned = state == PageState.OWNED
        taken = owned & (owner != -1) & ((owner != row.request) | (records["generation"] != row.generation))
        freed = ~owned & (state != PageState.CACHED) & (state != PageState.QUARANTINED)
        wrong = np.flatnonzero(taken | freed)
        if not wrong.size or self._given_up():  # asked after the records were read, which change after it is so
            return None
        return int(wrong[0]) * self._page_size, Mismatch.TAKEN if taken[wrong[0]] else Mismatch.FREED

    # -- reports -------------------------------------------------------------------------------------------------------

    def _report(
        self, what: Mismatch, layer: int, kind: str, row: _Row, tag: U64, pages: Array, at: int, offset: int
    ) -> None:
        self._condemned[row.request] = row.life
        size, position = self._page_size, at + offset
        page = int(pages[offset // size])
        record = self._pages[page]
        raw = np.zeros(1, REPORT_RECORD)
        raw["kind"], raw["layer"], raw["values"] = list(Mismatch).index(what), layer, kind == "v"
        raw["page"], raw["offset"], raw["table_index"] = page, offset % size, position // size
        raw["reader"], raw["reader_generation"], raw["reader_position"] = row.request, row.generation, position
        raw["step"], raw["same_tokens"] = self._step, tag[PREFIX] == row.history.prefix[position]
        raw["writer"], raw["writer_generation"] = tag[OWNER] & _LOW, tag[OWNER] >> np.uint64(32)
        raw["writer_position"], raw["writer_step"] = tag[PLACE] & _LOW, tag[WRITTEN] & _LOW
        raw["page_state"], raw["page_owner"], raw["page_generation"] = (
            record["state"],
            record["owner"],
            record["generation"],
        )
        made = int(self._counters[KV_COUNTERS.index("reports")])
        self._file.add(KvReport.from_record(raw[0], self._slots), made, MAX_REPORTS)
        self.count("reports")  # last: who reads the count finds the line


class SanitizedStep:
    """A model step under the sanitizer, whose operations must have it as their store."""

    def __init__(self, step: Callable[[Plan], None], sanitizer: KvSanitizer) -> None:
        self._step, self._sanitizer = step, sanitizer

    def __call__(self, plan: Plan) -> None:
        self._sanitizer.begin_step(plan)
        self._step(plan)
        self._sanitizer.end_step(plan)


def _address(pages: Array) -> int:
    """Where one layer's keys or values lie."""
    return int(pages.__array_interface__["data"][0])
