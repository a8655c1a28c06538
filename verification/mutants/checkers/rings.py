"""The client's side of a ring: order of writes, what a watching engine sees between them, the ledger of a history, and
the numbers in its words; classes D, R, S, V. The engine is the shipped scheduler with a no-op model, stepped by hand.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np

from blink_core.abi.config import EngineConfig
from blink_core.abi.definition import GENERATION_BITS, SEQ_BITS
from blink_core.abi.dtypes import SLOT
from blink_core.abi.enums import ErrorReason, EventKind, Op
from blink_core.abi.params import SamplingParams
from verification.history import History
from verification.mutants.checkers.base import Checker
from verification.mutants.checkers.drawn import DrawnChecker, Wrong
from verification.mutants.engines import greedy, run, stepped
from verification.mutants.parts import Part, PartError, Parts
from verification.mutants.references import ENDLESS, model_path
from verification.program import RequestSpec
from verification.properties import queue_ordering
from verification.spec.ring import entry_word

NOOP_VOCAB = 251
MODEL = "mistral-full"
SIZES: dict[str, Any] = {
    "slots": 6,
    "sq_entries": 16,
    "cq_entries": 32,
    "max_len": 64,
    "arena_tokens": 96,
    "pages": 66,
    "page_size": 4,
    "max_rows": 4,
    "token_budget": 64,
    "log_entries": 1 << 10,
}


# ---- the order of writes

ORDER = {
    "payload and descriptor before the entry": frozenset("D"),
    "events copied before credits": frozenset("D"),
    "mask bits before the ready word": frozenset("D"),
    "a new epoch begins empty": frozenset("D"),
}


def check_order(parts: Parts, rng: random.Random, scratch: Path) -> Wrong:
    """Every write and read of the client, in the order in which they were posted."""
    with stepped(parts, scratch, None, **SIZES, masks=4) as engine:
        config: EngineConfig = engine.call("config")
        at = {name: (s.offset, s.offset + s.nbytes) for name, s in config.layouts()["Ring"].sections.items()}

        def posted() -> list[tuple[str, str]]:
            """(kind, section) of each, oldest first."""
            names = []
            for kind, offset, _ in engine.call("written"):
                section = next(name for name, (first, stop) in at.items() if first <= offset < stop)
                names.append(
                    (kind, f"{section}.{(offset - at[section][0]) // 8}" if section == "front_end" else section)
                )
            return names

        attached = [name for kind, name in posted() if kind == "write"]
        cleared = engine.call("ring.__getitem__", "sq")
        if not {"sq", "mask_boxes"} <= set(attached[: attached.index("front_end.0")]) or np.any(cleared):
            return "a new epoch begins empty", f"writes of an attach: {attached}"
        for number in range(12):
            prompt = [rng.randrange(NOOP_VOCAB) for _ in range(rng.randrange(1, 12))]
            masked = number % 3 == 0
            handle = engine.keep("client.submit", prompt, SamplingParams(2, ignore_eos=True), masked=masked)
            writes = [name for kind, name in posted() if kind == "write"]
            if not {"arena", "slots"} <= set(writes[: writes.index("sq")]):
                return "payload and descriptor before the entry", f"writes of a submission: {writes}"
            if masked:
                bits = np.full(config.mask_words, 0xFFFFFFFF, np.uint32)
                for index in range(2):
                    engine.call("client.post_mask", handle, index, bits)
                    writes = [name for kind, name in posted() if kind == "write"]
                    ready = max(i for i, name in enumerate(writes) if name == "mask_boxes")
                    if "mask_bits" not in writes[:1] or ready != len(writes) - 1:
                        return "mask bits before the ready word", f"writes of a mask: {writes}"
                    engine.call("tick")
            for _ in range(4):
                engine.call("tick")
                count = len(engine.call("client.poll", 0.0))
                steps = posted()
                reads = [i for i, step in enumerate(steps) if step == ("read", "cq")]
                credits = [i for i, step in enumerate(steps) if step == ("write", "front_end.2")]
                if count and (not reads or not credits or min(credits) < max(reads)):
                    return "events copied before credits", f"a poll of {count} events: {steps}"
    return None


# ---- what an engine that watches sees

WATCHED = {
    "nothing is torn": frozenset("D"),
    "no entry of an old epoch": frozenset("D"),
    "a request is served as it was asked": frozenset("DRS"),
    "one client a ring": frozenset("D"),
    "room for every cancel": frozenset("D"),
    "a failed step is told": frozenset("X"),
}


def check_watched(parts: Parts, rng: random.Random, scratch: Path) -> Wrong:
    """The scheduler looks at its queues after every single write; then clients follow each other on the ring."""

    def drawn(count: int) -> list[RequestSpec]:
        prompts = [[rng.randrange(NOOP_VOCAB) for _ in range(rng.randrange(1, 30))] for _ in range(count)]
        return [greedy(prompt, rng.randrange(1, 9), rng.choice((0, 5 * i))) for i, prompt in enumerate(prompts)]

    served, epochs = "a request is served as it was asked", "no entry of an old epoch"
    with stepped(parts, scratch, None, **SIZES, poll_between_writes=True) as engine:
        for _ in range(2):
            torn, wrong = _serve(engine, drawn(14))
            if torn:
                return "nothing is torn", f"the engine found {torn} entries torn between two writes"
            if wrong is not None:
                return served, wrong
    with stepped(parts, scratch, None, **SIZES) as engine:
        client = engine.keep("client")
        # An epoch that ends before its queue was once around: its entries could be those of the next.
        for count in (rng.randrange(4, 7), 1, 3):
            torn, wrong = _serve(engine, drawn(count))
            if wrong is not None:
                return epochs, wrong
            engine.call("client.submit", [1, 2, 3], SamplingParams(40, ignore_eos=True))
            engine.call("attach", client)
            for _ in range(6):
                engine.call("tick")
            try:
                stray = engine.call("client.poll", 0.0)
            except PartError as error:
                if error.kind != "ProtocolError":
                    raise
                return epochs, error.text
            if len(stray):
                return epochs, f"events of nobody's requests: {stray.tolist()[:3]}"
        # Submissions that the engine has not consumed must keep their prompts, however small the arena.
        for _ in range(4):
            torn, wrong = _serve(engine, drawn(9))
            if torn:
                return "nothing is torn", f"{torn} prompts were changed before the engine had read them"
            if wrong is not None:
                return served, wrong
    with stepped(parts, scratch, None, **SIZES) as engine:  # a second client takes the ring over
        client = engine.keep("client")
        transport = parts.keep("copy:copy", engine.keep("transport"))
        second = parts.keep("blink_core.frontend.ring_client:RingClient", transport, engine.keep("config"))
        engine.call("attach", second)
        before = engine.call("ring.__getitem__", "sq").copy()
        for method, arguments in (("submit", ([5], SamplingParams(1))), ("release_credits", ())):
            try:
                client.call(method, *arguments)
            except PartError as error:
                if error.kind == "Superseded":
                    continue
            return "one client a ring", f"{method} of a client that was superseded went through"
        if not np.array_equal(before, engine.call("ring.__getitem__", "sq")):
            return "one client a ring", "a client that was superseded wrote a submission"
    return _cancels(parts, rng, scratch) or _failed_step(parts, rng, scratch) or _failed_chunks(parts, rng, scratch)


def _failed_step(parts: Parts, rng: random.Random, scratch: Path) -> Wrong:
    """A model step raises: its requests end with MODEL_ERROR, all others are served."""
    with stepped(parts, scratch, None, **SIZES, failing_step=rng.randrange(3, 6)) as engine:
        prompts = [[rng.randrange(NOOP_VOCAB) for _ in range(5)] for _ in range(9)]
        _, history = run(engine, [greedy(prompt, 4, ENDLESS if i > 5 else 0) for i, prompt in enumerate(prompts)])
    reasons = {e["reason"] for e in history.events if e["kind"] == EventKind.ERROR}
    finished = sum(e["kind"] == EventKind.FINISH for e in history.events)
    if reasons != {ErrorReason.MODEL_ERROR} or not 3 <= finished < 9:
        return (
            "a failed step is told",
            f"one step raised: {finished} of 9 finished, errors {sorted(reasons)}",
        )
    return None


def _failed_chunks(parts: Parts, rng: random.Random, scratch: Path) -> Wrong:
    """A step of nothing but chunks of a prompt raises: no row of it samples, so only its status says that the KV is
    missing. Its request ends with MODEL_ERROR, without a token; the one behind it is served."""
    budget, chunks = rng.randrange(4, 9), rng.randrange(3, 6)
    length = budget * (chunks - 1) + rng.randrange(1, budget + 1)
    sizes = SIZES | {"token_budget": budget}
    with stepped(parts, scratch, None, **sizes, failing_step=rng.randrange(chunks - 1)) as engine:
        prompts = [[rng.randrange(NOOP_VOCAB) for _ in range(count)] for count in (length, 5)]
        _, history = run(engine, [greedy(prompts[0], 3), greedy(prompts[1], 3, ENDLESS)])
    kinds = [(e["kind"], e["reason"]) for e in history.events if e["kind"] != EventKind.FINISH]
    finished = sum(e["kind"] == EventKind.FINISH for e in history.events)
    tokens = [(EventKind.TOKEN, 0)] * 3
    if kinds != [(EventKind.ERROR, ErrorReason.MODEL_ERROR), *tokens] or finished != 1:
        return (
            "a failed step is told",
            f"one step of a prompt of {length} in chunks of {budget} raised: {finished} of 2 finished, events {kinds}",
        )
    return None


def _serve(engine: Part, requests: list[RequestSpec]) -> tuple[int, str | None]:
    """Entries that the engine found torn, and what is not as it was asked."""
    try:
        result, history = run(engine, requests)
    except PartError as error:
        if error.kind != "ProtocolError":
            raise
        return 0, f"the client lost the ring: {error.text}"
    return int(result["torn"]), _unserved(history)


def _cancels(parts: Parts, rng: random.Random, scratch: Path) -> Wrong:
    """Requests end while the client does not look; then it cancels them, and the engine stands still: what is taken
    from there on must leave room for its own cancels."""
    with stepped(parts, scratch, None, **SIZES) as engine:
        for _ in range(4):
            for tokens in (1, 30):
                handles = []
                for _ in range(SIZES["slots"]):
                    try:
                        params = SamplingParams(tokens, ignore_eos=True)
                        handles.append(engine.keep("client.submit", [rng.randrange(250)], params))
                    except PartError as error:
                        if error.kind not in ("RingFull", "ArenaFull"):
                            raise
                        break
                for _ in range(8 if tokens == 1 else 0):
                    engine.call("tick")
                for handle in handles:
                    try:
                        engine.call("client.cancel", handle)
                    except PartError as error:
                        return "room for every cancel", f"{len(handles)} requests: {error.text}"
                engine.call("client.poll", 0.0)
            for _ in range(40):
                engine.call("tick")
                engine.call("client.poll", 0.0)
            if engine.call("client.live"):
                return "a request is served as it was asked", "requests live though all were cancelled"
    return None


def _unserved(history: History) -> str | None:
    """What of a history is not as it was asked; all its requests are valid."""
    if not history.complete:
        return "a request never ended"
    for s in history.submitted:
        wanted = history.program.requests[s.request].params.max_tokens
        got = history.tokens_of(s)
        ends = [e for e in history.events_of(s) if e["kind"] in (EventKind.FINISH, EventKind.ERROR)]
        if len(got) != wanted or len(ends) != 1 or ends[0]["kind"] != EventKind.FINISH:
            return (
                f"request {s.request}: {len(got)} of {wanted} tokens, ends {[(e['kind'], e['reason']) for e in ends]}"
            )
    return None


# ---- the ledger

LEDGER = {"ledger": frozenset("RSQD"), "a client lost the ring": frozenset("RD")}


def check_ledger(parts: Parts, rng: random.Random, scratch: Path) -> Wrong:
    """Many requests through few slots and a small completion queue, some of them bad, some cancelled: one terminal
    event each, tokens counted from 0, nothing for a request that was not submitted."""
    requests = []
    for index in range(60):
        bad = rng.random() < 0.25
        prompt = tuple(NOOP_VOCAB + 7 if bad else rng.randrange(NOOP_VOCAB) for _ in range(rng.randrange(1, 12)))
        params = SamplingParams(rng.randrange(1, 12), ignore_eos=True)
        cancel = rng.randrange(0, 3) if rng.random() < 0.2 and not bad else None
        requests.append(RequestSpec(prompt, params, rng.choice((0, 2 * index)), cancel))
    with stepped(parts, scratch, None, **SIZES) as engine:
        try:
            result, history = run(engine, requests)
        except PartError as error:
            if error.kind == "ProtocolError":
                return "a client lost the ring", error.text
            raise
    for verdict in (
        queue_ordering.check_delivery(history),
        queue_ordering.check_terminals(history, eos_ids=(), max_len=64, explained=(ErrorReason.BAD_TOKEN,)),
    ):
        if not verdict.ok():
            return "ledger", str(verdict)
    ended = {(e["slot"], e["generation"]) for e in history.events if e["kind"] in (EventKind.FINISH, EventKind.ERROR)}
    missing = [s.request for s in history.submitted if (s.slot, s.generation) not in ended]
    if missing or len(history.submitted) < len(requests) or not result["done"]:
        count = len(history.submitted)
        return "ledger", f"{count} of {len(requests)} requests were submitted, {missing[:5]} have no terminal event"
    return _late_cancels(history)


def _late_cancels(history: History) -> Wrong:
    """A cancelled request ends before its last token, or had ended already."""
    for s in history.submitted:
        spec = history.program.requests[s.request]
        if s.request in history.cancels and spec.cancel_after is not None:
            extra = len(history.tokens_of(s)) - spec.cancel_after
            if extra > 4 and len(history.tokens_of(s)) == spec.params.max_tokens:
                return "ledger", f"request {s.request} ran on for {extra} tokens after its cancel"
    return None


# ---- the numbers in words and descriptors

WORDS = {
    "submission word": frozenset("VD"),
    "generation": frozenset("V"),
    "descriptor": frozenset("VB"),
    "prompt ids": frozenset("VB"),
    "pages at the end of a large pool": frozenset("V"),
}


def check_words(parts: Parts, rng: random.Random, scratch: Path) -> Wrong:
    """Values at both ends of every field, and numbers that wrap."""
    cycle = (1 << SEQ_BITS) - 1
    for index in [0, 1, cycle - 1, cycle, cycle + 1, 7 * cycle + 3, *(rng.randrange(1 << 40) for _ in range(8))]:
        slot, generation = rng.randrange(4096), rng.randrange(1, 1 << GENERATION_BITS)
        got = parts.call("blink_core.frontend.ring_client:sq_word", index, int(Op.SUBMIT), slot, generation)
        if got != entry_word(index, int(Op.SUBMIT), slot, generation):
            return "submission word", f"entry {index} of slot {slot}, generation {generation} is {got:#x}"
    widths = {
        "max_tokens": 32,
        "seed": 64,
        "choice": 32,
        "top_k": 32,
        "min_tokens": 32,
        "logprobs": 32,
        "deadline_us": 64,
    }
    for name, bits in widths.items():
        for value in (1, 2 ** (bits - 1), 2**bits - 1, rng.getrandbits(bits)):
            params = SamplingParams(**({"max_tokens": 1} | {name: value}))
            slot_record = parts.call("blink_core.frontend.request_slot:describe", params)[0]
            if slot_record.dtype != SLOT or int(slot_record[name][0]) != value:
                return "descriptor", f"{name} of {value} is described as {int(slot_record[name][0])}"
    with stepped(parts, scratch, None, **SIZES | {"slots": 1, "sq_entries": 4}) as engine:
        generations = engine.keep("client._generation")
        generations.call("__setitem__", 0, (1 << GENERATION_BITS) - 3)
        seen = []
        for _ in range(4):
            try:
                handle = engine.keep("client.submit", [1], SamplingParams(1, ignore_eos=True))
            except PartError as error:
                if error.kind != "RingFull":
                    raise
                break  # the engine took no request of the generation before
            seen.append(handle.call("generation"))
            for _ in range(6):
                engine.call("tick")
                engine.call("client.poll", 0.0)
        if 0 in seen or len(set(seen)) < 4:
            return "generation", f"generations of one slot: {seen}"
        for prompt in ([2**31], [-(2**31) - 1], [3, 2**63]):
            try:
                engine.call("client.submit", prompt, SamplingParams(1))
            except PartError as error:
                if error.kind == "ValueError":
                    continue
                return "prompt ids", f"{prompt}: {error.kind}"
            return "prompt ids", f"{prompt} was taken"
    return _large_pool(parts, rng, scratch)


def _large_pool(parts: Parts, rng: random.Random, scratch: Path) -> Wrong:
    """Slots beyond 16 bits: as many rows as reach them, each against the same request by itself."""
    prompts = [[rng.randrange(3, 512) for _ in range(9)] for _ in range(70)]
    sizes = {"page_size": 512, "pages": 76, "slots": 72, "sq_entries": 256, "max_rows": 72, "token_budget": 1024}
    with stepped(parts, scratch, model_path(MODEL), **sizes, prefix_cache=0, batch_invariant=True) as engine:
        together, _ = run(engine, [greedy(prompt, 4) for prompt in prompts])
        chosen = range(60, 70)
        alone, _ = run(engine, [greedy(prompts[i], 4, ENDLESS) for i in chosen])
    for one, index in zip(alone["requests"], chosen, strict=True):
        other = together["requests"][index]
        if one is None or other is None or one["tokens"] != other["tokens"]:
            return "pages at the end of a large pool", f"request {index}: {other and other['tokens']}, alone {one}"[
                :300
            ]
    return None


_HERE = "verification.mutants.checkers.rings."
_ORDERING = "verification.properties.queue_ordering."
CHECKERS: tuple[Checker, ...] = (
    DrawnChecker("ring-write-order", frozenset({_HERE + "check_order"}), ORDER, check_order),
    DrawnChecker("ring-watched", frozenset({_HERE + "_unserved", _HERE + "check_watched"}), WATCHED, check_watched),
    DrawnChecker(
        "ring-ledger",
        frozenset({_ORDERING + "check_delivery", _ORDERING + "check_terminals", _HERE + "check_ledger"}),
        LEDGER,
        check_ledger,
    ),
    DrawnChecker("ring-words", frozenset({_HERE + "check_words"}), WORDS, check_words),
)
