"""The KV sanitizer of the host over the real scheduler: quiet when all is right, and naming what is not."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from blink_core.abi.enums import ErrorReason, EventKind, PageState, StepStatus
from blink_core.ops.kv_tags import OWNER, places, prefixes
from blink_core.runtime import kv_sanitizer
from blink_core.runtime.cpu import CpuRuntime, Plan
from blink_core.runtime.descriptor import KV_COUNTERS
from blink_core.runtime.model_step import step_batch
from blink_core.transport.checksum import words_checksum
from tests.kv_steps import LAYERS, KvSteps
from verification.faults import wrong_plans
from verification.faults.wrong_plans import FAULTS, FILE, Planter, seed_of
from verification.properties.kv_sanitizer import fault_found


@pytest.fixture
def steps(tmp_path: Path) -> Iterator[KvSteps]:
    made = KvSteps(tmp_path)
    yield made
    made.close()


def counters(steps: KvSteps) -> dict[str, int]:
    memory = steps.sanitizer.counter_memory
    return dict(zip(KV_COUNTERS, memory.array(np.uint64, (len(KV_COUNTERS),)).tolist(), strict=True))


def ends(steps: KvSteps, slot: int) -> list[tuple[int, int]]:
    """Kind and reason of the terminal events of a slot."""
    terminal = (EventKind.FINISH, EventKind.ERROR)
    return [(e["kind"], e["reason"]) for e in steps.events if e["slot"] == slot and e["kind"] in terminal]


@pytest.mark.parametrize("page_size", [1, 2, 4, 8])
@pytest.mark.parametrize("prefix_cache", [0, 1])
def test_quiet_under_pressure(page_size: int, prefix_cache: int, tmp_path: Path) -> None:
    """Catches: a false alarm at a resume, a prefix hit, a cancel, a reused slot or page, a window; no check at all."""
    rng = random.Random(page_size)
    steps = KvSteps(tmp_path, page_size=page_size, pages=2 + 96 // page_size, prefix_cache=prefix_cache)
    try:
        known = [steps.prompt(40) for _ in range(3)]
        for _ in range(40):
            if steps.client.live < 6:
                prompt = rng.choice(known)[: rng.randint(1, 40)] + steps.prompt(rng.randint(0, 5))
                handle = steps.submit(prompt, rng.randint(1, 15), prefix_cache=rng.random() < 0.9)
                if rng.random() < 0.2:
                    steps.client.cancel(handle)
            for _ in range(rng.randint(1, 4)):
                steps.step(window=rng.choice((None, 5)))
        steps.run()
        state = steps.runtime.layouts["State"].views(steps.runtime.state.buffer)["header"][0]
        assert state["preemptions"] > 0
        assert (state["hits"] > 0) == bool(prefix_cache)
        seen = counters(steps)
        assert steps.reports() == []
        assert seen["reports"] == 0
        assert seen["rows"] > 1000
        assert (seen["shared"] > 0) == bool(prefix_cache)
    finally:
        steps.close()


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_plan_is_named(fault: str, tmp_path: Path) -> None:
    """Catches: a kind of fault that goes unseen, a wrong owner, a victim that goes on, a bystander that does not."""
    steps = KvSteps(tmp_path)
    try:
        planter = Planter(steps.runtime, tmp_path / FILE)
        steps.submit(steps.prompt(10), 2)
        steps.run(planter)
        others = [steps.submit(steps.prompt(10), new, prefix_cache=new > 9) for new in (2, 30)]  # one frees its pages
        victim = steps.submit(steps.prompt(10), 25, seed=seed_of(fault))

        def undone(plan: Plan, _: Any) -> None:
            while planter.undo:
                planter.undo.pop()()

        for _ in range(60):
            steps.step(planter, beside=undone)
            if not steps.client.live:
                break
        planted = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
        assert [p["fault"] for p in planted] == [fault]
        assert fault_found(planted[0], steps.reports()) is None
        assert len(steps.reports()) == counters(steps)["reports"] == 1
        assert ends(steps, victim.slot)[-1] == (EventKind.ERROR, ErrorReason.MODEL_ERROR)
        assert all(ends(steps, other.slot)[-1][0] == EventKind.FINISH for other in others)
    finally:
        steps.close()


@pytest.mark.parametrize("kind", ["k", "v"])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_append_that_one_layer_lost(layer: int, kind: str, steps: KvSteps, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: one tag for all layers, or for keys and values together, which hides an append that one of them lost."""
    lost = (steps.kv.k if kind == "k" else steps.kv.v)[layer].__array_interface__["data"][0]
    shipped = type(steps.ops).append_kv

    def append(self: Any, pages: Any, kv_slots: Any, values: Any) -> None:
        if pages.__array_interface__["data"][0] == lost and len(kv_slots) == 1:
            kv_slots = np.array([steps.config.page_size], np.int64)  # the page of padding
        shipped(self, pages, kv_slots, values)

    monkeypatch.setattr(type(steps.ops), "append_kv", append)
    handle = steps.submit(steps.prompt(6), 8)
    steps.run()
    (report,) = steps.reports()
    assert (report["kind"], report["layer"], report["kv"]) == ("unwritten", layer, kind)
    assert report["writer"] is None
    assert (report["reader"]["slot"], report["reader"]["position"]) == (handle.slot, 6)


def test_stale_row_of_one_layer_differs(steps: KvSteps) -> None:
    """Catches: layers that are not compared, where the rules alone find nothing wrong with any of them."""
    steps.submit(steps.prompt(6), 8)
    steps.step()

    def stale(batch: Any) -> Any:
        page = int(batch.block_tables[0, 0])
        steps.sanitizer.tags_of(steps.kv.v[1])[page, 2, 3] += 5  # as if another step had written it
        return batch

    steps.step(batch_change=stale)
    (report,) = steps.reports()
    assert (report["kind"], report["layer"], report["kv"], report["offset"]) == ("layers", 1, "v", 2)


def test_row_that_stood_there_already(steps: KvSteps) -> None:
    """Catches: a lost append taken for one because an earlier step had left the very same row there."""
    steps.submit(steps.prompt(6), 8)
    steps.step()
    plan = steps.step()
    assert plan is not None
    later, batch = replace(plan, step=plan.step + 1), step_batch(plan)
    steps.sanitizer.begin_step(later)
    steps.ops.begin_run(batch.token_ids, batch.positions, batch.row_starts, batch.context_lens, batch.origin)
    work = steps.ops.plan_attention(batch.row_starts, batch.context_lens, batch.block_tables, steps.config.page_size)
    steps.sanitizer.check(steps.kv.k[0], work, False)
    (report,) = steps.reports()
    assert (report["kind"], report["reader"]["position"], report["writer"]["step"]) == ("not-now", 6, plan.step)


def test_equal_beginning_is_no_excuse(steps: KvSteps) -> None:
    """Catches: another request's page accepted for its equal tokens although it never was in the prefix cache."""
    prompt = steps.prompt(9)
    first = steps.submit(prompt, 30, prefix_cache=False)
    second = steps.submit([*prompt, 1], 30, prefix_cache=False)
    for _ in range(4):
        steps.step()

    def swap(plan: Plan) -> Plan:
        rows = {int(row["slot"]): at for at, row in enumerate(plan.rows)}
        plan.block_tables[rows[second.slot]][0] = plan.block_tables[rows[first.slot]][0]
        return plan

    steps.step(swap)
    (report,) = steps.reports()
    assert (report["kind"], report["same_tokens"]) == ("not-shared", True)
    assert (report["reader"]["slot"], report["writer"]["slot"]) == (second.slot, first.slot)


def test_request_that_went_meanwhile_is_left_alone(steps: KvSteps) -> None:
    """Catches: tokens of the next owner of a slot held against the rows of the one that was cancelled."""
    handle = steps.submit(steps.prompt(6), 20)
    bystander = steps.submit(steps.prompt(6), 20)
    for _ in range(3):
        steps.step()

    def replaced(plan: Plan) -> Plan:
        steps.client.cancel(handle)
        steps.runtime.scheduler.poll(steps.now)  # while the step runs
        return plan

    steps.step(replaced)
    steps.run()
    assert counters(steps)["gone"] == 1
    assert steps.reports() == []
    assert ends(steps, bystander.slot)[-1][0] == EventKind.FINISH


def test_cancel_in_the_middle_of_a_step(steps: KvSteps) -> None:
    """Catches: pages in quarantine, which the step may still read, called freed."""
    handle = steps.submit(steps.prompt(6), 20)
    for _ in range(3):
        steps.step()

    def cancelled(batch: Any) -> Any:
        steps.client.cancel(handle)
        steps.runtime.scheduler.poll(steps.now)
        pages = steps.runtime.layouts["State"].views(steps.runtime.state.buffer)["pages"]
        assert PageState.QUARANTINED in pages["state"][batch.block_tables[0]].tolist()
        return batch

    steps.step(batch_change=cancelled)
    steps.run()
    assert steps.reports() == []


@pytest.mark.parametrize("stops", [True, False])
def test_step_that_a_stop_gave_up(stops: bool, steps: KvSteps) -> None:
    """Catches: pages that a stop freed under a step which it no longer waits for, called freed too early; the same
    without a stop, or ahead of the boundary that follows it, forgiven."""
    steps.submit(steps.prompt(6), 20)
    for _ in range(3):
        steps.step()
    state = steps.runtime.layouts["State"].views(steps.runtime.state.buffer)

    def given_up(batch: Any) -> Any:
        steps.runtime.request_stop()
        assert not steps.runtime.step_given_up
        if stops:
            steps.runtime.scheduler.boundary(steps.now)  # the loop's, when the stop's time of grace is over
            assert steps.runtime.step_given_up
        else:
            state["pages"]["state"][batch.block_tables[0]] = PageState.FREE
        assert PageState.FREE in state["pages"]["state"][batch.block_tables[0]].tolist()
        return batch

    steps.step(batch_change=given_up)
    assert [report["kind"] for report in steps.reports()] == ([] if stops else ["freed"])


def test_report_of_a_page_whose_record_is_broken(steps: KvSteps) -> None:
    """Catches: a corrupt record of a page that makes the report itself fail."""
    handle = steps.submit(steps.prompt(6), 20)
    steps.step()
    pages = steps.runtime.layouts["State"].views(steps.runtime.state.buffer)["pages"]

    def broken(batch: Any) -> Any:
        pages["state"][batch.block_tables[0, 0]] = 77
        return batch

    steps.step(batch_change=broken)
    (report,) = steps.reports()
    assert (report["kind"], report["page_state"]) == ("freed", "77")
    assert report["reader"]["slot"] == handle.slot


def test_wrong_plans_hide_no_error(
    steps: KvSteps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches: an engine whose first plan cannot be made and that ends by another error than the one to see."""

    def broken(*_: object) -> Planter:
        raise OSError("no plan")

    for name in ("current_plan", "_run", "serve"):
        monkeypatch.setattr(CpuRuntime, name, getattr(CpuRuntime, name))  # put back at the end
    monkeypatch.setattr(wrong_plans, "Planter", broken)
    wrong_plans.install(tmp_path)
    assert steps.runtime._run(lambda plan: None) is StepStatus.FAILED
    assert "no plan" in caplog.text


class _Graphs(CpuRuntime):
    """An engine that launches graphs, as far as a planter sees it: what they would read is kept."""

    def _run(self, step: Any) -> StepStatus:
        plan = self.layouts["Plan"].views(self.plan.buffer)
        rows = plan["rows"][: int(plan["header"][0]["n_rows"])]
        self.seen = {name: plan[name].copy() for name in ("token_ids", "positions", "kv_slots")}
        self.seen["tables"] = self._tables[rows["row"]].copy()
        return StepStatus.OK


def test_wrong_plans_reach_an_engine_of_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: faults that are planted in a plan which the GPU's graphs never read, or stay there for the scheduler."""
    made = KvSteps(tmp_path)
    try:
        for name in ("current_plan", "_run", "serve"):
            monkeypatch.setattr(CpuRuntime, name, getattr(CpuRuntime, name))
        made.submit(made.prompt(9), 4)
        made.runtime.scheduler.poll(1000)
        assert made.runtime.scheduler.boundary(1001)

        def wrong(plan: Plan) -> Plan:
            changed = replace(plan, kv_slots=plan.kv_slots + 1, token_ids=plan.token_ids + 2)
            changed.block_tables[:, 0] += 3
            return changed

        planter = SimpleNamespace(undo=[])
        monkeypatch.setattr(wrong_plans, "Planter", lambda *_: _Called(planter, wrong))
        right = made.runtime.current_plan()
        before = {n: getattr(right, n).copy() for n in ("token_ids", "positions", "kv_slots", "block_tables")}
        made.runtime.__class__ = _Graphs
        monkeypatch.setattr(CpuRuntime, "serve", lambda self, step: self._run(step))
        wrong_plans.install(tmp_path)
        made.runtime.serve(lambda plan: None)
        seen, tokens = made.runtime.seen, len(right.token_ids)  # type: ignore[attr-defined]
        assert np.array_equal(seen["kv_slots"][:tokens], before["kv_slots"] + 1)
        assert np.array_equal(seen["token_ids"][:tokens], before["token_ids"] + 2)
        assert np.array_equal(seen["positions"][:tokens], before["positions"])
        assert seen["tables"][0, 0] == before["block_tables"][0, 0] + 3
        assert all(np.array_equal(getattr(right, name), before[name]) for name in ("token_ids", "kv_slots"))
        assert made.runtime._tables[right.rows["row"][0], 0] == before["block_tables"][0, 0]
    finally:
        made.runtime.__class__ = CpuRuntime
        made.close()


class _Called(SimpleNamespace):
    """A planter whose strike is given."""

    def __init__(self, kept: SimpleNamespace, strike: Any) -> None:
        super().__init__(undo=kept.undo, strike=strike)

    def __call__(self, plan: Plan) -> Plan:
        return cast(Plan, self.strike(plan))


def _swap_all(plan: Plan) -> Plan:
    tables = plan.block_tables.copy()
    tables[:, :2] = tables[:, 1::-1]
    return replace(plan, block_tables=tables)


@pytest.mark.parametrize("writable", [True, False])
def test_reports_have_an_end(
    writable: bool, steps: KvSteps, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches: a faulty engine that fills its log and its disk; a full disk that ends all requests of the step."""
    monkeypatch.setattr(kv_sanitizer, "MAX_REPORTS", 1)
    if not writable:
        steps.file.unlink()
        steps.file.mkdir()
    handles = [steps.submit(steps.prompt(9), 12) for _ in range(3)]
    for _ in range(4):
        steps.step()
    with caplog.at_level("ERROR", "blink.kv_sanitizer"):
        for _ in range(4):
            steps.step(_swap_all)
    assert counters(steps)["reports"] == 3
    assert [ends(steps, h.slot) for h in handles] == [[(EventKind.ERROR, ErrorReason.MODEL_ERROR)]] * 3
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2 + (not writable)
    assert told[-1] == "KV sanitizer: 1 reports; those to come are only counted"
    assert any("no report can be written" in line for line in told) != writable
    if writable:
        assert len(steps.reports()) == 1


def test_next_epoch_begins_with_the_same_generations(steps: KvSteps) -> None:
    """Catches: the tokens of a former front end's request taken for those of the next one's of the same name."""
    first = steps.submit(steps.prompt(12), 20)
    for _ in range(4):
        steps.step()
    steps.attach()
    again = [steps.submit(steps.prompt(12), 5) for _ in range(steps.config.slots)]
    assert any((h.slot, h.generation) == (first.slot, first.generation) for h in again)
    steps.run()
    assert steps.reports() == []


def test_tags_move_with_rows(steps: KvSteps) -> None:
    """Catches: tags that are written elsewhere than keys and values, or beyond what was written."""
    steps.submit(steps.prompt(7), 3)
    steps.step()
    for pool in (steps.kv.k, steps.kv.v):
        for layer in range(LAYERS):
            written = ~np.isnan(pool[layer]).any(axis=(2, 3))
            tagged = steps.sanitizer.tags_of(pool[layer])[:, :, OWNER] != 0
            assert np.array_equal(written, tagged)
            assert written.sum() == 7


def test_prefix_word_is_the_checksum() -> None:
    """Catches: a mixing of tokens that is not the one of host and GPU, or forgets the place or the tokens before."""
    tokens = np.array([7, 0, 2**31 - 1, 49151, 7], np.int32)
    words = prefixes(tokens, np.arange(5))
    assert [int(w) for w in words] == [words_checksum(tokens[: n + 1]) for n in range(5)]
    assert np.array_equal(words[2:], prefixes(tokens[2:], np.arange(2, 5), int(words[1])))
    assert [hex(int(w)) for w in places(tokens[2:4], np.array([5, 6]))] == ["0x7fffffff00000005", "0xbfff00000006"]


def test_model_outside_a_step_is_refused(steps: KvSteps) -> None:
    """Catches: rows that are read unchecked because no step of the sanitizer is on."""
    with pytest.raises(RuntimeError, match="outside a step"):
        steps.ops.append_kv(steps.kv.k[0], np.zeros(1, np.int64), np.zeros((1, 1, 4), np.float32))


def test_recomputed_rows_keep_their_owner(steps: KvSteps) -> None:
    """Catches: rows that LongRoPE computes anew tagged as those of another row of the step."""
    steps.submit(steps.prompt(5), 20)
    second = steps.submit(steps.prompt(6), 20)
    for _ in range(3):
        steps.step()

    def anew(batch: Any) -> Any:
        row = batch.context_lens.size - 1
        page_size = steps.config.page_size
        table = batch.block_tables[row]
        slots = table[np.arange(4) // page_size].astype(np.int64) * page_size + np.arange(4) % page_size
        ids = steps.runtime.current_plan().tokens[row][:4].astype(np.int32)
        part = replace(
            batch,
            token_ids=ids,
            positions=np.arange(4, dtype=np.int32),
            kv_slots=slots,
            row_starts=np.array([0, 4], np.int32),
            context_lens=np.array([4], np.int32),
            block_tables=table[None],
            sample_rows=np.empty(0, np.int32),
            origin=np.array([row], np.int32),
        )
        steps.forward(part)
        owner = steps.sanitizer.tags_of(steps.kv.k[0])[slots // page_size, slots % page_size, OWNER]
        assert {int(o) & 0xFFFFFFFF for o in owner} == {second.slot + 1}
        return batch

    steps.step(batch_change=anew)
    steps.run()
    assert steps.reports() == []
