"""What presses on KV memory in a run, counted from the event log: a check of KV rows says nothing without it.

Here too are the programs that press by their make, whatever the engine's pace or the reader's. Where a look at the
running engine must meet a request, each of its tokens waits for a grammar mask, and that comes when the one before has
been read: the engine cannot run ahead of who looks.
"""

from __future__ import annotations

import random
from dataclasses import replace

from blink_core.abi.config import EngineConfig
from blink_core.abi.dtypes import Array
from blink_core.abi.enums import FinishReason, LogKind
from blink_core.abi.params import SamplingParams
from verification.fixtures import Subject
from verification.program import Program, RequestSpec
from verification.result import CheckResult, Measurement, Verdict

PACED = 16  # tokens of a paced request that is to be met: several looks, when there is one at every fifth event
CROWD, NEIGHBOURS = 4, 2  # mask mailboxes that a paced crowd and neighbours need at least


def _request(subject: Subject, rng: random.Random, prompt: int | tuple[int, ...], new: int, paced: bool) -> RequestSpec:
    """A greedy request of that prompt, or of so many drawn tokens."""
    if isinstance(prompt, int):
        prompt = tuple(rng.randrange(3, subject.shape.vocab) for _ in range(prompt))
    params = SamplingParams(max_tokens=new, ignore_eos=True, seed=rng.getrandbits(64))
    return RequestSpec(prompt, params, mask_seed=rng.getrandbits(32) if paced else None)


def can_pace(subject: Subject, wanted: int = 1) -> bool:
    """Whether the engine has so many mask mailboxes. On one that has not, what is drawn must do."""
    return int(subject.rig.descriptor.config.masks) >= wanted


def _mailboxes(subject: Subject, wanted: int) -> int:
    """Mask mailboxes of the engine, so many at least."""
    masks = int(subject.rig.descriptor.config.masks)
    if not can_pace(subject, wanted):
        raise ValueError(f"masks is {masks}, a paced program needs at least {wanted}")
    return masks


def crowd(subject: Subject, seed: int, *, paced: bool = False) -> Program:
    """Requests that are admitted at once and outgrow the pool: one must give way, whatever the engine's pace.

    Run it with `together`. paced: with masks, so that looks meet the one that gave way when it runs again: the first to
    give way has about half of its tokens left then. Each of them is a round trip: there are no more than that takes.
    """
    config, rng = subject.rig.descriptor.config, random.Random(seed)
    tokens = (config.pages - 2) * config.page_size
    rows = min(config.max_rows, _mailboxes(subject, CROWD) if paced else 8, 8)
    share = tokens // rows
    new = min(share, 2 * PACED) if paced else share
    prompt = share - new // 2  # the pool is full when each has half of its tokens
    return Program(tuple(_request(subject, rng, prompt, new, paced) for _ in range(rows)))


def neighbours(subject: Subject, seed: int) -> Program:
    """A cancelled neighbour, a hit in the prefix cache and an odd chunk, all paced, whatever the engine's pace.

    Run it with `together`. The first request is cancelled at its first token, the second had a row beside it and goes
    on. When both have ended a third, alone, begins with two whole pages of the second's, and then with a chunk of a
    whole step, which ends inside a page where `token_budget` is no multiple of the page size; another one follows.
    """
    config, rng = subject.rig.descriptor.config, random.Random(seed)
    _mailboxes(subject, NEIGHBOURS)
    gone = _request(subject, rng, 2, PACED, True)
    stays = _request(subject, rng, 2 * config.page_size + 1, PACED, True)
    fresh = _request(subject, rng, config.token_budget + 3, PACED, True)
    follows = replace(fresh, prompt=stays.prompt[: 2 * config.page_size] + fresh.prompt, after=10**6)
    return Program((replace(gone, cancel_after=1), stays, follows))


def room_beyond(subject: Subject, beyond: int) -> bool:
    """Whether several looks can meet a paced request that has more than `beyond` tokens."""
    return beyond + PACED <= subject.shape.longest


def long(subject: Subject, seed: int, beyond: int) -> Program:
    """One paced request, which soon has more than `beyond` tokens and is then met by several looks.

    ValueError where the longest sequence leaves no room for them.
    """
    _mailboxes(subject, 1)
    if not room_beyond(subject, beyond):
        longest = subject.shape.longest
        raise ValueError(f"a sequence has at most {longest} tokens, {beyond} and {PACED} to be met in are wanted")
    new = min(2 * PACED, subject.shape.longest - beyond)
    return Program((_request(subject, random.Random(seed), beyond, new, True),))


def chunks_inside_page(log: Array, page_size: int) -> int:
    """Chunks of several tokens that began inside a page, where an earlier one of several had ended."""
    ended: dict[tuple[int, int, int], int] = {}
    count = 0
    for e in log[(log["kind"] == LogKind.PLAN_ROW) & (log["a"] > 1)]:
        key = (int(e["ring"]), int(e["slot"]), int(e["generation"]))
        start = int(e["b"]) - int(e["a"])
        count += start % page_size != 0 and ended.get(key) == start
        ended[key] = int(e["b"])
    return count


class KvPressure:
    """What a schedule must have held so that it says something about KV memory: by the event log, over several runs."""

    def __init__(self, config: EngineConfig) -> None:
        """config: of the engine; what cannot happen with pages of one token or without a prefix cache is not asked."""
        self._page_size = config.page_size
        self.counts = dict.fromkeys(("preemption", "cancel", "page-reuse"), 0)
        if config.prefix_cache:
            self.counts["prefix-hit"] = 0
        if config.page_size > 1:
            self.counts["chunk-inside-page"] = 0
        self._owners: dict[int, tuple[int, int, int]] = {}

    @property
    def complete(self) -> bool:
        return all(self.counts.values())

    def add(self, log: Array) -> None:
        """Counts what happened in the entries of one run."""
        kinds, counts = log["kind"], self.counts
        counts["preemption"] += int((kinds == LogKind.PREEMPT).sum())
        if "prefix-hit" in counts:
            counts["prefix-hit"] += int((log["b"][kinds == LogKind.PREFIX_HIT] > 0).sum())
        counts["cancel"] += int((log["a"][kinds == LogKind.FINISH] == FinishReason.CANCELLED).sum())
        if self._page_size > 1:
            counts["chunk-inside-page"] += chunks_inside_page(log, self._page_size)
        for e in log[kinds == LogKind.PAGE_ALLOC]:
            owner = (int(e["ring"]), int(e["slot"]), int(e["generation"]))
            counts["page-reuse"] += self._owners.get(int(e["a"]), owner) != owner
            self._owners[int(e["a"])] = owner

    def check(self, property_name: str) -> CheckResult:
        """Unknown when one of them did not happen."""
        missing = [name for name, count in self.counts.items() if not count]
        measured = {
            f"pressure: {name}": Measurement(count, "times", 1, limit_is="min") for name, count in self.counts.items()
        }
        message = f"what pressed on the KV pages: {', '.join(f'{n} {c}' for n, c in self.counts.items())}"
        verdict = Verdict.UNKNOWN if missing else Verdict.VALID
        return CheckResult(verdict, property_name, "pressure", message, {}, measured)
