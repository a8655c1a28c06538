"""Rows of the fault corpus on a running engine: tokens beside others are those alone, bit for bit.

One engine in batch-invariant mode with a pool of a few pages; the table of all rows is `verification/scenarios`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from blink_core.abi.enums import ErrorReason, EventKind, FinishReason, LogKind
from blink_core.abi.params import SamplingParams
from blink_core.frontend.ring_client import RingClient
from verification.fixtures import RING, Judge, Subject
from verification.run_context import RunContext
from verification.suite.scenarios import NO_LOG, alone, condition, ended, hold, request, run, same

pytestmark = [pytest.mark.blink_property("scenarios"), pytest.mark.capability("cpu", "shared-memory", "oracle")]

SIZES: dict[str, Any] = {"max_rows": 16, "token_budget": 32, "max_len": 320, "batch_invariant": True}
POOL = 16  # pages that requests can have, of 16 tokens
ATTEMPTS = 12  # runs in which a condition that hangs on the engine's pace must occur once; what holds, holds in each


@pytest.fixture(scope="module")
def exact(tiny: Subject) -> Iterator[Subject]:
    """The tiny model in batch-invariant mode: a request's tokens depend on itself alone."""
    with tiny.start(**SIZES) as engine:
        yield engine


def test_q01_larger_than_the_pool(exact: Subject, judge: Judge, seed: int) -> None:
    """Q01. Catches: a request that needs more pages than there are, retried for ever, with everybody behind it.

    Condition: it needs one page more than the pool has, and is refused for that.
    """
    rng = random.Random(seed)
    large = request(rng, exact, POOL * 16 - 1, 3)
    small = [request(rng, exact, 5, 4) for _ in range(5)]
    ran = run(exact, judge, large, *small, explained=(ErrorReason.NEVER_FITS,))
    refused = ran.entries(LogKind.REJECT)
    condition(judge, "Q01", [int(e["a"]) for e in refused] == [ErrorReason.NEVER_FITS], "refused for want of a page")
    same(judge, "Q01", ran, [[], *(alone(exact, judge, spec) for spec in small)])


def test_q13_l12_l13_l15_unlike_parameters_in_one_step(exact: Subject, judge: Judge, seed: int) -> None:
    """Q13, L12, L13, L15. Catches: a batch in which some rows have penalties, seeds or temperature 0 and some have not,
    that ends the engine, or in which a row is treated as its neighbour is.

    Condition: one step computes rows with penalties, sampled rows and plain greedy rows of unlike lengths.
    """
    rng = random.Random(seed)
    kinds: list[dict[str, object]] = [
        {},
        {"frequency_penalty": -50.0},  # what came once comes again
        {"temperature": 0.9},
        {"repetition_penalty": 1.3, "temperature": 0.7},
        {"presence_penalty": -1.0, "top_p": 0.8, "temperature": 1.1},
        {},
    ]
    for _ in range(ATTEMPTS):  # a model that repeats itself anyway says nothing of a penalty: another prompt
        specs = [request(rng, exact, 3 + 5 * at, 14, **kind) for at, kind in enumerate(kinds)]
        penalised = alone(exact, judge, specs[1])
        plain = alone(exact, judge, replace(specs[1], params=replace(specs[1].params, frequency_penalty=0.0)))
        if plain != penalised:
            break
    condition(judge, "L12", plain != penalised, "the penalty changes the tokens")
    expected = [alone(exact, judge, spec) for spec in specs]
    most = 0
    for _ in range(ATTEMPTS):
        ran = run(exact, judge, *specs, together=True)
        same(judge, "Q13", ran, expected)
        most = max(most, ran.most_rows)
        if most == len(specs):
            break
    condition(judge, "Q13", most == len(specs), "all in one step", rows=most)


def test_l13_slot_of_a_penalised_request(exact: Subject, judge: Judge, seed: int) -> None:
    """L13. Catches: penalties, counts or bias of a slot's former owner applied to the next one.

    Condition: a plain request comes into the slot that a penalised and biased one has just left.
    """
    rng = random.Random(seed)
    heavy = request(rng, exact, 9, 6, frequency_penalty=2.0, repetition_penalty=1.8, logit_bias=((7, 50.0),))
    plain = request(rng, exact, 9, 10, prompt=heavy.prompt)
    expected = alone(exact, judge, plain)
    first = run(exact, judge, heavy).history.submitted[0]
    for _ in range(2 * exact.rig.descriptor.config.slots):
        ran = run(exact, judge, plain, pages=False)
        same(judge, "L13", ran, [expected])
        reused = ran.history.submitted[0].slot == first.slot
        if reused:
            break
    condition(judge, "L13", reused, "the same slot")


def test_l06_l07_one_seed_in_every_slot(exact: Subject, judge: Judge, seed: int) -> None:
    """L06, L07. Catches: random numbers that depend on slot, row or neighbours, or a seed that an unseeded neighbour
    takes away.

    Condition: the same seeded request in eight slots, together in one step, beside requests with other seeds.
    """
    rng = random.Random(seed)
    mine = request(rng, exact, 6, 10, temperature=1.2)
    others = [request(rng, exact, 4 + at, 10, temperature=0.9) for at in range(4)]
    expected = alone(exact, judge, mine)
    company = [alone(exact, judge, spec) for spec in others]
    other = alone(exact, judge, replace(mine, params=replace(mine.params, seed=rng.getrandbits(64))))
    condition(judge, "L06", other != expected, "another seed gives other tokens")
    most, slots = 0, set()
    for _ in range(ATTEMPTS):
        ran = run(exact, judge, *([mine] * 8), *others, together=True)
        same(judge, "L07", ran, [expected] * 8 + company)
        most = max(most, ran.most_rows)
        slots |= {s.slot for s in ran.history.submitted if s.request < 8}
        if most >= 12 and len(slots) >= 8:
            break
    condition(judge, "L07", most >= 12 and len(slots) >= 8, "a dozen rows in one step, eight slots", rows=most)


def test_l10_two_engines_draw_alike(exact: Subject, tiny: Subject, judge: Judge, seed: int) -> None:
    """L10. Catches: a sampler whose state is not set at start, so that two processes draw differently.

    Condition: two engine processes of one model; sampled requests, whose tokens change with the seed.
    """
    rng = random.Random(seed)
    specs = [request(rng, exact, 7, 12, temperature=1.0, top_p=0.95) for _ in range(4)]
    first = run(exact, judge, *specs)
    with tiny.start(**SIZES) as second:
        condition(judge, "L10", second.rig.pid("engine") != exact.rig.pid("engine"), "two processes")
        again = run(second, judge, *specs)
    same(judge, "L10", again, first.outputs)


@pytest.mark.parametrize("rows", [12, 16])
def test_s06_nobody_answers_with_another_s_prompt(exact: Subject, judge: Judge, seed: int, rows: int) -> None:
    """S06. Catches: an answer made of another user's prompt once a dozen run together.

    Condition: a step computes twelve and more requests, each with a secret of its own; some are shorter and leave.
    """
    rng = random.Random(seed + rows)
    specs = [request(rng, exact, 6 + at % 3, 4 + at % 6) for at in range(rows)]
    expected, most = [alone(exact, judge, spec) for spec in specs], 0
    for _ in range(ATTEMPTS):
        ran = run(exact, judge, *specs, together=True)
        same(judge, "S06", ran, expected)
        most = max(most, ran.most_rows)
        if most >= 12:
            break
    condition(judge, "S06", most >= 12, "a dozen in one step", rows=most)


def test_s03_r12_resume_after_twenty_tokens(exact: Subject, judge: Judge, seed: int) -> None:
    """S03, R08, R12. Catches: a resume that computes the prompt alone, feeds a stale token, or repeats or drops one.

    Condition: a request that was preempted is admitted again with more than 20 tokens of its own.
    """
    rng = random.Random(seed)
    specs = [request(rng, exact, 10, 70, prefix_cache=at % 2 == 0) for at in range(5)]
    expected, most = [alone(exact, judge, spec) for spec in specs], 0
    for _ in range(ATTEMPTS):
        ran = run(exact, judge, *specs)
        same(judge, "S03", ran, expected)
        for s in ran.history.submitted:
            again = ran.entries(LogKind.ADMIT, s)
            most = max([most, *(int(e["b"]) - 10 for e in again if int(e["c"]) > 0)])
        if most > 20:
            break
    condition(judge, "S03", most > 20, "resumed after more than 20 tokens", tokens=most)


@pytest.mark.parametrize("length", [31, 32, 33])
def test_p08_p09_repeats_about_a_page_boundary(exact: Subject, judge: Judge, seed: int, length: int) -> None:
    """P08, P09, P05. Catches: a prompt of whole pages cached and never found, or found whole with nothing left to
    compute; a prefill that counts from 0 although it starts behind a hit.

    Condition: lengths at, before and after a multiple of the page of 16, four times; the last three hit.
    """
    rng = random.Random(seed + length)
    spec = request(rng, exact, length, 6)
    expected = alone(exact, judge, spec)
    hit = (length - 1) // 16 * 16
    ran = [run(exact, judge, spec) for _ in range(4)]
    condition(judge, "P09", ran[0].found == [0], "the first time nothing is there")
    found = [one.found[0] for one in ran[1:]]
    hold(judge, "P09", found == [hit] * 3, f"{length} tokens: {found} found, expected {hit}", ran[1].history)
    for one in ran:
        same(judge, "P08", one, [expected])


def test_k14_a_page_that_went_to_another_is_not_found(exact: Subject, judge: Judge, seed: int) -> None:
    """K14, K18. Catches: content found under what its page held before it was evicted.

    Condition: pages of A are evicted, others own them, and A comes again.
    """
    rng = random.Random(seed)
    a = request(rng, exact, 100, 6)
    others = [request(rng, exact, 110, 4, after=10**6) for _ in range(4)]
    first = run(exact, judge, a)
    between = run(exact, judge, *others)
    own = set(first.entries(LogKind.PAGE_PUBLISH)["a"].tolist())
    gone = own & set(between.entries(LogKind.PAGE_EVICT)["a"].tolist())
    taken = gone & set(between.entries(LogKind.PAGE_ALLOC)["a"].tolist())
    condition(judge, "K14", bool(taken), "pages of A evicted and used by others", pages=len(taken))
    again = run(exact, judge, a)
    most = 16 * (6 - len(gone & own))
    hold(judge, "K14", again.found[0] <= most, f"{again.found[0]} tokens found, at most {most} left", again.history)
    same(judge, "K14", again, first.outputs)


@pytest.mark.parametrize("pair", [(100, 40), (90, 90), (110, 33)], ids=["100-40", "90-90", "110-33"])
def test_k08_pairs_of_lengths(exact: Subject, judge: Judge, seed: int, pair: tuple[int, int]) -> None:
    """K08. Catches: an offset or a length of a row taken from its neighbour's, which only unlike ones show.

    Condition: two prompts of unlike (and, as the control, equal) lengths are computed in one step, in either order.
    """
    rng = random.Random(seed)
    specs = [request(rng, exact, length, 8, prefix_cache=False) for length in pair]
    expected = [alone(exact, judge, spec) for spec in specs]
    together = 0
    for turn in (1, -1):
        order = specs[::turn]
        ran = run(exact, judge, *order, together=True)
        same(judge, "K08", ran, expected[::turn])
        steps: list[set[int]] = []  # in which each prompt was computed, or a part of it
        for s in ran.history.submitted:
            rows = ran.entries(LogKind.PLAN_ROW, s)
            steps.append(set(rows["step"][rows["b"] <= len(order[s.request].prompt)].tolist()))
        together += bool(set.intersection(*steps))
    condition(judge, "K08", together == 2, "both computed in one step, in either order", runs=together)


def test_k06_neighbours_under_pressure(exact: Subject, judge: Judge, seed: int, blink_run: RunContext) -> None:
    """K06. Catches: a foreign or zeroed page under eviction with cancels.

    Condition: twelve requests with common beginnings in a tiny pool; preemption, eviction, hits, pages that were freed
    while a step ran, and cancels all occur.
    """
    rounds = 2 if blink_run.profile_name == "smoke" else 25
    wanted = {"PREEMPT", "PAGE_EVICT", "PREFIX_HIT", "PAGE_UNQUARANTINE", "CANCELLED"}
    rng = random.Random(seed)
    seen: set[str] = set()
    for turn in range(rounds + ATTEMPTS):
        if turn >= rounds and wanted <= seen:
            break
        bases = [[rng.randrange(3, exact.shape.vocab) for _ in range(64)] for _ in range(3)]
        specs = []
        for at in range(12):
            shared = bases[at % 3][: rng.choice((16, 31, 32, 48, 64))]
            prompt = [*shared, *(rng.randrange(3, exact.shape.vocab) for _ in range(rng.randint(1, 9)))]
            cancel = rng.randint(0, 9) if rng.random() < 0.3 else None
            specs.append(request(rng, exact, 0, rng.randint(4, 20), prompt=prompt, cancel_after=cancel, after=at))
        ran = run(exact, judge, *specs)
        for kind in (LogKind.PREEMPT, LogKind.PAGE_EVICT, LogKind.PREFIX_HIT, LogKind.PAGE_UNQUARANTINE):
            seen |= {kind.name} if len(ran.entries(kind)) else set()
        seen |= {"CANCELLED"} if ended(ran, FinishReason.CANCELLED) else set()
        same(judge, "K06", ran, [alone(exact, judge, spec) for spec in specs])
    condition(judge, "K06", wanted <= seen, f"{sorted(wanted - seen) or 'nothing'} is lacking")


def test_q14_pages_come_back(exact: Subject, judge: Judge, seed: int) -> None:
    """Q14, K02. Catches: pages of requests that ended by their length kept as used.

    Condition: sequential requests, idle after each, that together take the pool many times; all end by LENGTH.
    """
    rng = random.Random(seed)
    start = exact.snapshot(log_from=NO_LOG).header
    total = int(start["free_pages"]) + int(start["idle_cached"])
    ran = [run(exact, judge, request(rng, exact, rng.randint(1, 90), 1 + at % 3)) for at in range(30)]
    taken = sum(len(one.entries(LogKind.PAGE_ALLOC)) for one in ran)
    by_length = sum(ended(one, FinishReason.LENGTH) for one in ran)
    condition(judge, "Q14", taken > 4 * POOL and by_length == 30, "the pool many times over", pages=taken)
    end = exact.snapshot(log_from=NO_LOG).header
    left = int(end["free_pages"]) + int(end["idle_cached"])
    hold(judge, "Q14", left == total, f"{left} of {total} pages are free or can be evicted when nobody lives")


@pytest.mark.parametrize("interval", [1, 2, 7])
def test_r02_r03_r05_a_reader_that_comes_late(exact: Subject, judge: Judge, seed: int, interval: int) -> None:
    """R02, R03, R05. Catches: of several tokens that lie ready only the last handed on, some dropped, or all repeated.

    Condition: one look finds as many tokens of a request as the reader let pass.
    """
    spec = request(random.Random(seed), exact, 5, 21)
    expected = alone(exact, judge, spec)
    client, views = exact.client, exact.rig.memory.ring_views(RING)
    seen = int(views["gpu"]["cq_tail"][0])
    client.submit(spec.prompt, spec.params)
    tokens: list[int] = []
    most, over, deadline = 0, False, time.monotonic() + 30
    while not over and time.monotonic() < deadline:
        tail = int(views["gpu"]["cq_tail"][0])
        if tail - seen < interval and exact.snapshot(log_from=NO_LOG).header["live"]:
            continue  # the snapshot has waited for a step boundary
        events = client.poll(1.0)
        seen += len(events)
        ready = events["token"][events["kind"] == EventKind.TOKEN].tolist()
        most, over = max(most, len(ready)), bool((events["kind"] >= EventKind.FINISH).any())
        tokens += ready
    condition(judge, "R02", most >= interval, "as many tokens at once as steps were let pass", tokens=most)
    hold(judge, "R02", tokens == expected, "a late reader got other tokens", found=tokens, alone=expected)
    judge.record.cases()


def test_r06_cancel_and_submit_again(exact: Subject, judge: Judge, seed: int) -> None:
    """R06. Catches: a cancel under way that ends the next request of the slot, or of the same prompt.

    Condition: the request is cancelled and its like submitted before the engine has taken either entry: it is held at a
    step boundary meanwhile, so that one look at the queue finds both.
    """
    rng = random.Random(seed)
    spec = request(rng, exact, 12, 20)
    expected = alone(exact, judge, spec)
    client, lived = exact.client, 0
    for _ in range(ATTEMPTS):
        old = client.submit(spec.prompt, SamplingParams(200, ignore_eos=True))
        deadline = time.monotonic() + 30
        while not (client.poll(1.0)["kind"] == EventKind.TOKEN).any() and time.monotonic() < deadline:
            pass
        with exact.held(log_from=NO_LOG) as state:
            live = int(state.header["live"])
            if live:
                client.cancel(old)
            new = client.submit(spec.prompt, spec.params)
        tokens, ends = _until_over(client, {old.slot, new.slot} if live else {new.slot})
        hold(judge, "R06", ends.get(new.slot) == FinishReason.LENGTH, f"the new request ended by {ends}")
        hold(judge, "R06", tokens[new.slot] == expected, "other tokens", found=tokens[new.slot], alone=expected)
        if live:
            hold(judge, "R06", ends.get(old.slot) == FinishReason.CANCELLED, f"the old request ended by {ends}")
            lived += 1
        if lived == 3:
            break
    condition(judge, "R06", lived == 3, "the old request lived when its cancel and the new one were published")
    judge.record.cases()


def _until_over(client: RingClient, slots: set[int]) -> tuple[dict[int, list[int]], dict[int, int]]:
    """Tokens and the reason of the end by slot, once each has ended or 30 s have passed."""
    tokens: dict[int, list[int]] = {slot: [] for slot in slots}
    ends: dict[int, int] = {}
    deadline = time.monotonic() + 30
    while not slots <= set(ends) and time.monotonic() < deadline:
        for e in client.poll(1.0):
            slot = int(e["slot"])
            if e["kind"] == EventKind.TOKEN:
                tokens.setdefault(slot, []).append(int(e["token"]))
            elif e["kind"] >= EventKind.FINISH:
                ends[slot] = int(e["reason"])
    return tokens, ends


def test_t08_each_end_of_sequence(exact: Subject, judge: Judge, seed: int) -> None:
    """T05, T08 (by id). Catches: a list of ids that end a request of which only the first does.

    Condition: three stop ids; requests are run that reach each of them first.
    """
    rng = random.Random(seed)
    places: dict[int, int] = {}
    for _ in range(ATTEMPTS):  # until an answer has three different tokens
        spec = request(rng, exact, 8, 24)
        tokens = alone(exact, judge, spec)
        places = {token: tokens.index(token) for token in tokens}
        if len(places) >= 3:
            break
    stops = sorted(places, key=lambda token: places[token])[:3]
    for last in stops:
        others = [token for token in stops if places[token] > places[last]]
        chosen = (*others, last)
        ran = run(exact, judge, replace(spec, params=replace(spec.params, stop_token_ids=chosen)))
        hold(judge, "T08", ran.outputs[0] == tokens[: places[last] + 1], f"stop ids {chosen}", ran.history)
        hold(judge, "T08", ended(ran, FinishReason.STOP_TOKEN) == 1, f"stop ids {chosen}", ran.history)
    condition(judge, "T08", len(stops) == 3, "three ids, each the first one reached", ids=len(stops))


def _window(subject: Subject) -> int:
    return int(subject.oracles[1].config.sliding_window)


def _windowed(family: Subject, judge: Judge, seed: int, row: str) -> None:
    window = _window(family)
    rng = random.Random(seed)
    with family.start(batch_invariant=True) as engine:
        length = 2 * window + 21
        spec = request(rng, engine, length, 12)
        expected = alone(engine, judge, spec)
        other = replace(spec, prompt=(*spec.prompt[: 2 * window], 5, 6, 7))
        wanted = alone(engine, judge, other)
        most, least = 0, 0
        for turn in range(4 + ATTEMPTS):
            ran = run(engine, judge, spec, other)
            same(judge, row, ran, [expected, wanted])
            most, least = max(most, ran.most_rows), min(ran.found)
            if turn >= 3 and most == 2:
                break
        condition(judge, row, least > window, "both found more than a window of tokens", tokens=least)
        condition(judge, row, most == 2, "both in one step", rows=most)


@pytest.mark.parametrize("family", ["mistral-window"], indirect=True)
def test_p06_reuse_beyond_a_window(family: Subject, judge: Judge, seed: int) -> None:
    """P06. Catches: pages freed behind a window although they are cached, or found and read as if they were whole.

    Condition: a prompt of more than two windows, four times; from the second on more than a window is found.
    """
    _windowed(family, judge, seed, "P06")


@pytest.mark.blink_profile("nightly", "full")
@pytest.mark.parametrize("family", ["qwen2-window"], indirect=True)
def test_p14_windows_of_some_layers(family: Subject, judge: Judge, seed: int) -> None:
    """P14. Catches: reuse that goes by one layer's window where others see everything.

    Condition: a model whose first layer has no window and whose others have; reuse, two requests in one step.
    """
    config = family.oracles[1].config
    kinds = set(config.layer_types)
    condition(judge, "P14", kinds == {"full_attention", "sliding_attention"}, "layers with and without a window")
    _windowed(family, judge, seed, "P14")
