"""The KV sanitizer of the GPU beside the host's, on the same steps of the real scheduler; skipped without a GPU."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blink_core.abi.enums import StepStatus
from blink_core.models import StepBatch
from blink_core.ops.kv_tags_abi import VIEW
from blink_core.runtime.cpu import Plan
from blink_core.runtime.descriptor import KV_COUNTERS
from blink_core.runtime.kv_report import REPORT_RECORD, KvReport
from blink_core.runtime.nvrtc import step_options
from tests.hil.gpu.missing import MISSING
from tests.kv_steps import LAYERS, KvSteps
from verification.faults.wrong_plans import FAULTS, FILE, Planter, seed_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]

if MISSING is None:
    import cupy as cp

    from blink_core.ops.cuda_kv_sanitizer import CudaKvSanitizer


class Twin:
    """Runs the GPU's kernels on copies of what the host's sanitizer was given in the same step, and compares."""

    def __init__(self, steps: KvSteps) -> None:
        self.steps, config = steps, steps.config
        self.state = cp.zeros(steps.runtime.state.nbytes, cp.uint8)
        self.plan = cp.zeros(steps.runtime.plan.nbytes, cp.uint8)
        sizes = {"row_starts": config.max_rows + 1, "context_lens": config.max_rows, "table_rows": config.max_rows}
        self.view = {
            name: cp.zeros(sizes.get(name, config.token_budget), cp.int64 if name == "kv_slots" else cp.int32)
            for name in VIEW
        }
        self.gpu = CudaKvSanitizer(
            config, LAYERS, state=int(self.state.data.ptr), plan=int(self.plan.data.ptr), view=self.view,
            options=step_options(),
        )  # fmt: skip
        self.window: int | None = None
        self.checked = 0

    def __call__(self, plan: Plan, batch: StepBatch) -> None:
        steps, layouts = self.steps, self.steps.config.layouts()
        rows = plan.rows["row"].astype(np.int32)
        state = bytearray(steps.runtime.state.buffer)
        tables = layouts["State"].view(state, "block_tables").reshape(steps.config.max_rows, -1)
        tables[rows, : batch.block_tables.shape[1]] = batch.block_tables
        scheduled = bytearray(steps.runtime.plan.buffer)
        layouts["Plan"].view(scheduled, "results")["status"] = StepStatus.OK
        self.state.set(np.frombuffer(state, np.uint8))
        self.plan.set(np.frombuffer(scheduled, np.uint8))
        arrays: dict[str, Any] = {
            "token_ids": batch.token_ids,
            "positions": batch.positions,
            "kv_slots": batch.kv_slots,
        }
        arrays |= {"row_starts": batch.row_starts, "context_lens": batch.context_lens, "table_rows": rows}
        for name, array in arrays.items():
            self.view[name][: array.size].set(array)
        self.gpu.begin()
        for layer in range(LAYERS):
            self.gpu.append(layer)
            self.gpu.check(layer, self.window)
        self.gpu.end()
        results = layouts["Plan"].view(self.plan.get().tobytes(), "results")
        assert results["status"][: len(rows)].tolist() == plan.results["status"].tolist()
        host = np.stack(
            [[steps.sanitizer.tags_of(pool[layer]) for layer in range(LAYERS)] for pool in (steps.kv.k, steps.kv.v)]
        )
        assert np.array_equal(self.gpu.tags.get(), host)
        self.checked += 1

    def counters(self) -> dict[str, int]:
        return dict(zip(KV_COUNTERS, self.gpu.counters.get().tolist(), strict=True))

    def reports(self) -> list[KvReport]:
        records = self.gpu.reports.get().view(REPORT_RECORD)[: self.counters()["reports"]]
        return [KvReport.from_record(raw, self.steps.config.slots) for raw in records]


def plain(reports: list[Any]) -> list[str]:
    """Reports in an order of their own: rows of a layer are checked at once on the GPU."""
    from dataclasses import asdict

    told = [asdict(r) if isinstance(r, KvReport) else r for r in reports]
    return sorted(json.dumps(t) for t in told)


def host_counters(steps: KvSteps) -> dict[str, int]:
    values = steps.sanitizer.counter_memory.array(np.uint64, (len(KV_COUNTERS),)).tolist()
    return dict(zip(KV_COUNTERS, values, strict=True))


@pytest.fixture(params=[(4, 11), (16, 300)], ids=["small", "blocks"])
def steps(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KvSteps]:
    """Small pages and chunks, and contexts and chunks longer than a block of threads."""
    size, budget = request.param
    more = {} if budget < 100 else {"max_len": 700, "pages": 2 + 130}
    made = KvSteps(tmp_path, page_size=size, token_budget=budget, arena_tokens=8192, **more)
    yield made
    made.close()


@pytest.mark.parametrize("window", [None, 5])
def test_quiet_under_pressure(window: int | None, steps: KvSteps) -> None:
    """Catches: tags or prefix words that differ from the host's, a false alarm at a resume, hit, cancel or reuse."""
    rng, twin = random.Random(3), Twin(steps)
    twin.window = window
    longest = steps.config.max_len * 5 // 8
    known = [steps.prompt(longest) for _ in range(3)]
    for _ in range(25):
        if steps.client.live < 6:
            prompt = rng.choice(known)[: rng.randint(1, longest)] + steps.prompt(rng.randint(0, 5))
            handle = steps.submit(prompt, rng.randint(1, 15), prefix_cache=rng.random() < 0.9)
            if rng.random() < 0.2:
                steps.client.cancel(handle)
        for _ in range(rng.randint(1, 4)):
            steps.step(beside=twin, window=window)
    assert twin.reports() == []
    assert steps.reports() == []
    assert twin.checked > 30
    if window is None:
        assert twin.counters() == host_counters(steps)
        assert twin.counters()["shared"] > 0


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_plan_is_named_as_on_the_host(fault: str, steps: KvSteps, tmp_path: Path) -> None:
    """Catches: a kind, an owner, a place or a step that the GPU tells otherwise; a bystander that it breaks off."""
    planter, twin, size = Planter(steps.runtime, tmp_path / FILE), Twin(steps), steps.config.page_size

    def beside(plan: Plan, batch: StepBatch) -> None:
        twin(plan, batch)
        while planter.undo:
            planter.undo.pop()()

    def run(limit: int) -> None:
        for _ in range(limit):
            steps.step(planter, beside=beside)
            if not steps.client.live:
                return

    length = 2 * size + 2
    steps.submit(steps.prompt(length), 2)
    run(20)
    for new in (2, 5 * size):
        steps.submit(steps.prompt(length), new, prefix_cache=new > 2)
    steps.submit(steps.prompt(length), 4 * size, seed=seed_of(fault))
    run(30 * size)
    assert len(twin.reports()) == 1
    assert plain(twin.reports()) == plain(steps.reports())


def test_append_that_one_layer_lost(steps: KvSteps) -> None:
    """Catches: layers, or keys and values, that share a tag."""
    twin, lost = Twin(steps), {"on": False}
    shipped = twin.gpu.append

    def append(layer: int) -> None:
        if not (lost["on"] and layer == 1):
            shipped(layer)

    twin.gpu.append = append  # type: ignore[method-assign]
    handle = steps.submit(steps.prompt(6), 4)
    steps.step(beside=twin)
    lost["on"] = True
    with pytest.raises(AssertionError):  # the host lost nothing
        steps.step(beside=twin)
    (report,) = twin.reports()
    assert (report.kind, report.layer, report.kv, report.writer) == ("unwritten", 1, "k", None)
    assert (report.reader.slot, report.reader.position) == (handle.slot, 6)


def test_context_beyond_what_the_request_knows(steps: KvSteps) -> None:
    """Catches: a view whose context is too long, which leads the check out of its tables or passes unseen."""
    twin = Twin(steps)
    handle = steps.submit(steps.prompt(6), 4)
    steps.step(beside=twin)
    for long in (steps.config.max_len + 1000, -1, 7):
        twin.gpu.condemned[:] = 0
        twin.view["context_lens"][0] = 6
        twin.gpu.begin()
        twin.view["context_lens"][0] = long
        twin.gpu.check(0, None)
        report = twin.reports()[-1]
        assert (report.kind, report.reader.slot, report.reader.position) == ("position", handle.slot, 6)
    assert len(twin.reports()) == 3
