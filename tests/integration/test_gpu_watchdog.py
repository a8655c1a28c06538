"""A GPU that is lost under a real front end, replayed from a recording: clients are told, and health says why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from blink_core.runtime.cuda_main import EXIT_LOST
from blink_core.runtime.engine_health import FILE
from blink_core.runtime.gpu_events import GpuEvent
from blink_core.runtime.watchdog import RECORDING
from hil_rigs.description import load_rig
from hil_rigs.local import LocalOptions, LocalRig
from tests.integration.test_engine_loss import (
    SIZES,
    await_health,
    complete,
    error_at_the_end,
    health,
    long_model,
    stream,
)
from tests.overflowing import overflowing
from tests.waiting import DEADLINE_S

__all__ = ["long_model"]
ENGINE = Path(__file__).parents[1] / "planted" / "watched.py"
GPU = "0000:01:00.0"


@contextmanager
def watched(model: Path, folder: Path) -> Iterator[tuple[LocalRig, Callable[[GpuEvent], object]]]:
    """A rig, and what makes a GPU event happen to it."""
    recording, written = folder / "recording.jsonl", folder / "written"

    def happens(event: GpuEvent) -> None:
        written.write_text(event.to_json() + "\n")
        written.rename(recording)

    options = LocalOptions(engine=SIZES, engine_command=(str(ENGINE), str(recording)))
    with LocalRig(load_rig("local"), model, options=options) as rig:
        yield rig, happens


def test_fatal_xid_ends_every_stream_and_health_says_why(long_model: Path, tmp_path: Path) -> None:
    """Catches: streams that hang or look whole when the GPU is lost; a health state that only says that the process is
    gone; requests that are taken afterwards."""
    with watched(long_model, tmp_path) as (rig, happens):
        with stream(rig) as lines:
            happens(GpuEvent(GPU, 79, 0.0))
            error = error_at_the_end(lines)
        assert error["code"] == "engine_dead"
        await_health(rig, 503, "Xid 79")
        assert "fallen off the bus" in health(rig).json()["reason"]
        assert complete(rig).status_code == 503
        exited = rig.wait(DEADLINE_S)
        assert exited is not None
        assert f"engine exited with status {EXIT_LOST}" in exited
        assert "Xid 79" in exited


def test_fatal_xid_ends_every_stream_on_a_full_disk(long_model: Path, tmp_path: Path) -> None:
    """Catches: a loss that nobody hears of because its recording and its health file cannot be written."""
    with watched(long_model, tmp_path) as (rig, happens):
        assert rig.run_dir is not None
        (rig.run_dir / RECORDING).mkdir()
        (rig.run_dir / FILE).with_suffix(".new").mkdir()
        with stream(rig) as lines:
            happens(GpuEvent(GPU, 79, 0.0))
            error = error_at_the_end(lines)
        assert error["code"] == "engine_dead"
        exited = rig.wait(DEADLINE_S)
        assert exited is not None
        assert f"engine exited with status {EXIT_LOST}" in exited
        assert "Xid 79" in exited


def test_xid_of_another_process_is_told_and_ends_nothing(long_model: Path, tmp_path: Path) -> None:
    """Catches: a page fault of some other program on the same GPU that ends this engine, or that nobody hears of."""
    with watched(long_model, tmp_path) as (rig, happens):
        happens(GpuEvent(GPU, 31, 0.0))
        await_health(rig, 200, "Xid 31")
        assert complete(rig).status_code == 200
        assert health(rig).json()["status"] == "ready"


def test_nan_logits_end_their_request_and_health_says_so(long_model: Path, tmp_path: Path) -> None:
    """Catches: NaN that is sampled from as if it were a number; requests that it ends while health says nothing."""
    model = overflowing(long_model, tmp_path / "broken")
    with LocalRig(load_rig("local"), model, options=LocalOptions(engine=SIZES)) as rig:
        answer = complete(rig)
        assert answer.status_code == 500, answer.text
        assert "NAN_LOGITS" in answer.text
        request = {"model": rig.model_name, "prompt": [5, 6, 7], "stream": True, "max_tokens": 4}
        with httpx.stream("POST", f"{rig.base_url}/v1/completions", json=request, timeout=DEADLINE_S) as response:
            told = response.read().decode()
        assert "NAN_LOGITS" in told
        assert "[DONE]" not in told
        seen = health(rig)
        assert seen.status_code == 200
        assert "2 requests ended with NAN_LOGITS" in seen.json()["reason"]
