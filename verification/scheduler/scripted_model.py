"""The scripted model: its next token is a function of the whole context, read back through a tagged KV pool.

Every KV slot carries (position, chain), the chain being made from the token and the KV of the position before, as read
through the block table. So a wrong page, position or token shows in the step that uses it, and pages with one beginning
are equal whoever computed them, as they are in batch-invariant mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from blink_core.abi.config import EngineConfig
from blink_core.abi.dtypes import Array
from blink_core.abi.enums import StepStatus
from verification.scheduler import invariants
from verification.scheduler.front_end import Submission

VOCAB = 37
EOS = 0
START = 0x5EED
POISON = -1  # chain of a KV row that holds NaN

Tag = tuple[int, int]  # position, chain


def next_token(context: Sequence[int], allowed: Sequence[int] | None = None) -> int:
    """Any change of a token, its position or the length changes the outcome. allowed: words of a grammar mask."""
    h = len(context)
    for token in context:
        h = (h * 1103515245 + token + 12345) & 0x7FFFFFFF
    token = (h >> 8) % VOCAB
    if allowed is None:
        return token
    order = (*range(token, VOCAB), *range(token))
    return next((t for t in order if allowed[t // 32] >> (t % 32) & 1), token)  # one that allows nothing: as it is


def alternatives(token: int, count: int) -> list[tuple[int, float]]:
    """The pairs that the scripted model reports beside `token`."""
    return [((token + i) % VOCAB, -0.125 * (i + 1)) for i in range(count)]


def extend(chain: int, token: int) -> int:
    return POISON if chain == POISON else (chain * 0x5851F42D + token + 0x14057B7E) & 0x7FFFFFFFFFFF


@dataclass
class Planned:
    """One row of the step in flight, resolved to its submission when it was planned."""

    submission: Submission
    sample: bool
    masked: bool
    emitted: int
    context: list[int]  # tokens whose KV this step leaves in the pages


class TaggedPool:
    """The KV pool of tags; a slot that nobody wrote holds None."""

    def __init__(self, config: EngineConfig) -> None:
        self.size = config.page_size
        self.rows: list[Tag | None] = [None] * (config.pages * config.page_size)
        self.tokens = [-1] * len(self.rows)  # what each slot was computed from

    def at(self, table: Sequence[int], position: int) -> Tag | None:
        return self.rows[table[position // self.size] * self.size + position % self.size]

    def write(self, slot: int, position: int, token: int, table: Sequence[int], *, poison: bool) -> None:
        before = self.at(table, position - 1) if position else (-1, START)
        chain = POISON if before is None or before[0] != position - 1 else before[1]
        self.rows[slot] = position, POISON if poison else extend(chain, token)
        self.tokens[slot] = token

    def read(self, table: Sequence[int], length: int) -> list[int] | None:
        """The tokens whose KV the table leads to, whatever request they are of; None if a NaN is among them.

        A slot that holds another position's KV reads as a token that is none.
        """
        out = []
        for position in range(length):
            slot = table[position // self.size] * self.size + position % self.size
            tag = self.rows[slot]
            if tag == (position, POISON):
                return None
            out.append(self.tokens[slot] if tag is not None and tag[0] == position else -2 - position)
        return out

    def check(self, table: Sequence[int], context: Sequence[int], who: Submission) -> bool:
        """Asserts that the table leads to the KV of `context`. True if it holds NaN of the request's own making."""
        chain = START
        for position, token in enumerate(context):
            chain = extend(chain, token)
            found = self.at(table, position)
            if found == (position, POISON) and who.spoiled:
                return True
            assert found == (position, chain), f"KV of position {position} holds {found}, not token {token} of {who}"
        return False


def run(
    planned: Sequence[Planned],
    plan: dict[str, Array],
    state: dict[str, Array],
    pool: TaggedPool,
    config: EngineConfig,
    faults: dict[int, str],
    *,
    check: bool = True,
) -> None:
    """Executes a step.

    faults: by row, nan, range (id outside the vocabulary), unwritten, no_token, or poison (NaN enters its KV, and shows
    in its logits from then on). check: asserts that the plan leads to the right KV; else its tokens are those of the KV
    that it leads to, right or wrong.
    """
    rows, results = plan["rows"], plan["results"]
    tables = state["block_tables"].reshape(config.max_rows, config.max_pages)
    listed = [tables[int(rows[i]["row"])].tolist() for i in range(len(planned))]
    for i, p in enumerate(planned):
        if faults.get(i) in ("nan", "poison"):
            p.submission.spoiled = True
        start, count = int(rows[i]["q_start"]), int(rows[i]["q_len"])
        for j in range(start, start + count):
            position, token = int(plan["positions"][j]), int(plan["token_ids"][j])
            poison = faults.get(i) in ("nan", "poison") and j == start
            if check:
                page = int(plan["kv_slots"][j]) // pool.size
                assert page >= invariants.RESERVED, f"KV is written into reserved page {page}"
            pool.write(int(plan["kv_slots"][j]), position, token, listed[i], poison=poison)
    for i, p in enumerate(planned):
        if check:
            poisoned = pool.check(listed[i], p.context, p.submission)
        else:
            found = pool.read(listed[i], len(p.context))
            poisoned, p.context = found is None, found or []
        if not p.sample:
            results[i] = (VOCAB + 5, np.nan, StepStatus.NAN_LOGITS, 0)  # must not matter
            continue
        fault = "nan" if poisoned else faults.get(i)
        if fault:
            p.submission.spoiled = True
        if fault != "unwritten":
            results[i] = sample(p, i, plan, state, config, fault, check=check)


def sample(
    p: Planned,
    place: int,
    plan: dict[str, Array],
    state: dict[str, Array],
    config: EngineConfig,
    fault: str | None,
    *,
    check: bool,
) -> tuple[int, float, int, int]:
    """The row's result; its alternatives are written beside."""
    allowed = None
    over = p.submission.terminal is not None  # its memory may be its successor's; the result is dropped
    if p.masked and not over:
        words = config.mask_words
        row = int(plan["rows"][place]["row"])
        allowed = state["masks"][row * words : (row + 1) * words].tolist()
        mine = p.submission.mask(p.emitted, words, config.vocab)
        assert not check or allowed == mine, f"row {place} has another row's mask"
    token = next_token(p.context, allowed)
    count, most = int(p.submission.descriptor["logprobs"]), config.max_logprobs
    for i, (other, logprob) in enumerate(alternatives(token, count)):
        plan["top_tokens"][place * most + i] = other
        plan["top_logprobs"][place * most + i] = logprob
    if fault == "range":
        token = config.vocab
    status = {"nan": StepStatus.NAN_LOGITS, "no_token": StepStatus.NO_TOKEN}.get(str(fault), StepStatus.OK)
    return token, -0.5, int(status), 0


def check_plan(plan: dict[str, Array], state: dict[str, Array], config: EngineConfig, find: Any) -> list[Planned]:
    """Checks the plan against what is known of each request, and resolves its rows. find: submission of a row."""
    header = plan["header"][0]
    n_rows, n_tokens = int(header["n_rows"]), int(header["n_tokens"])
    rows = plan["rows"][:n_rows]
    assert n_rows <= config.max_rows
    assert n_tokens <= config.token_budget, f"{n_tokens} tokens, budget {config.token_budget}"
    assert len(set(rows["request"].tolist())) == n_rows, "a request has two rows"
    assert n_tokens == int(rows["q_len"].sum())
    assert int(header["n_samples"]) == int(rows["sample"].sum())
    tables = state["block_tables"].reshape(config.max_rows, config.max_pages)
    at, size, made = 0, config.page_size, []
    for row in rows:
        x = find(int(row["ring"]), int(row["slot"]), int(row["generation"]))
        assert x is not None
        assert x.terminal is None, f"planned after its end: {x}"
        count = int(row["q_len"])
        q = state["requests"][int(row["request"])]
        assert int(row["request"]) == x.ring * config.slots + x.slot
        first, known = int(q["computed"]), x.known
        assert int(row["context_len"]) == first + count
        assert bool(row["sample"]) == (first + count == len(known))
        assert (int(row["q_start"]), count > 0) == (at, True)
        assert int(row["row"]) == int(q["row"]) >= 0
        assert int(row["n_pages"]) == int(q["n_pages"]) >= -(-(first + count) // size)
        assert bool(row["masked"]) == (bool(row["sample"]) and x.masked)
        table = tables[int(row["row"])].tolist()
        for j in range(count):
            position = first + j
            assert int(plan["positions"][at + j]) == position
            assert int(plan["token_ids"][at + j]) == known[position], f"wrong token at {position} of {x}"
            assert int(plan["kv_slots"][at + j]) == table[position // size] * size + position % size
        at += count
        if row["sample"]:
            check_sampling(int(row["request"]), int(row["emitted"]), x, state, config)
        made.append(Planned(x, bool(row["sample"]), bool(row["masked"]), len(x.tokens), known[: first + count]))
    return made


def follow_plan(plan: dict[str, Array], state: dict[str, Array], config: EngineConfig, find: Any) -> list[Planned]:
    """The rows of a plan as it says, with their submissions. Raises LookupError for a row of no submission."""
    made = []
    for row in plan["rows"][: int(plan["header"]["n_rows"][0])]:
        x = find(int(row["ring"]), int(row["slot"]), int(row["generation"]))
        if x is None:
            raise LookupError(f"a row is planned for {row['ring']}:{row['slot']}, which nobody submitted")
        length = int(row["context_len"])
        made.append(Planned(x, bool(row["sample"]), bool(row["masked"]), len(x.tokens), [0] * length))
    return made


def check_sampling(request: int, emitted: int, x: Submission, state: dict[str, Array], config: EngineConfig) -> None:
    """What the sampler reads of a request is what its descriptor said."""
    record = state["sampling"][request]
    for name in record.dtype.names or ():
        found, expected = record[name].tolist(), x.descriptor[name].tolist()
        assert found == expected, f"{name} of {x} is {found} for the sampler"
    assert emitted == len(x.tokens)
    pairs = state["bias"].reshape(-1, config.max_bias)[request][: len(x.bias)] if config.max_bias else []
    assert [(int(p["token"]), float(p["bias"])) for p in pairs] == x.bias
    tokens = state["tokens"].reshape(-1, config.max_len)[request]
    assert tokens[: len(x.known)].tolist() == x.known, f"token pool of {x}"
