"""How the engine process is put together with and without the KV sanitizer, and that every KV pool starts poisoned."""

from __future__ import annotations

import ast
import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from blink_core.abi.config import EngineConfig
from blink_core.abi.enums import EngineState, ErrorReason
from blink_core.frontend.engine_client import RingEngineClient, kv_reports
from blink_core.ops.numpy_ops import NumpyOps
from blink_core.ops.sanitized_ops import SanitizedOps
from blink_core.runtime.descriptor import EngineDescriptor, Memory, ModelInfo, SanitizerInfo
from blink_core.runtime.engine_health import Health, Notice
from blink_core.runtime.engine_main import main, parse_arguments, serve_model
from blink_core.runtime.kv_sanitizer import SanitizedStep
from blink_core.runtime.memory import OwnedMemory
from blink_core.runtime.model_step import ModelStep
from hil_rigs.description import load_rig
from hil_rigs.engine_memory import EngineUnreachable
from hil_rigs.kv_reports import KvReports
from hil_rigs.local import LocalOptions, LocalRig
from tests.tiny_models import tiny_model

ROOT = Path(__file__).parents[3]
# Where pools are made to be refused, or are views of one that is poisoned already.
EXCEPTIONS = {"tests/unit/models/test_step_batch.py"}


def served(folder: Path, *more: str) -> Any:
    arguments = ["--run-dir", str(folder), "--segment", "unused", "--model", str(tiny_model("llama-gqa3").path)]
    return serve_model(parse_arguments([*arguments, "--pages", "8", *more]))[1]


@pytest.mark.parametrize("more", [(), ("--kv-sanitizer",)])
def test_pool_starts_poisoned(more: tuple[str, ...], tmp_path: Path) -> None:
    """Catches: a KV pool of zeros, in which a row that nobody wrote reads as a plausible one."""
    made = served(tmp_path, *more)
    pool = made.kv.array(np.float32, made.info.kv_shape)
    assert pool.size > 0
    assert np.isnan(pool).all()


def test_every_pool_of_the_project_is_poisoned() -> None:
    """Catches: a new place, test or rig that makes a KV pool and leaves it as the allocator gave it."""
    found = set()
    for folder in ("blink_core", "hil_rigs", "verification", "tests", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if "KVPool" not in text:
                continue
            calls = {ast.unparse(n.func) for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call)}
            if "KVPool" not in calls:
                continue
            name = path.relative_to(ROOT).as_posix()
            found.add(name)
            poisons = bool({"poison", "poisoned_pool"} & calls) or "np.nan" in text
            assert poisons or name in EXCEPTIONS, f"{name} makes a KVPool that it does not poison"
    assert {"blink_core/runtime/engine_main.py", "tests/kv_steps.py", *EXCEPTIONS} <= found


def test_sanitizer_is_out_of_the_path_unless_asked_for(tmp_path: Path) -> None:
    """Catches: a shipped engine that pays for the sanitizer, or a sanitized one whose operations have no tags."""
    plain, watched = served(tmp_path), served(tmp_path, "--kv-sanitizer")
    assert type(plain.step) is ModelStep
    assert plain.sanitizer is None
    assert type(plain.step._model.network._ops) is NumpyOps
    step: Any = watched.step
    assert type(step) is SanitizedStep
    inner: Any = step._step
    ops = inner._model.network._ops
    assert type(ops) is SanitizedOps
    assert ops.store is watched.sanitizer


def test_no_op_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches: a sanitizer that is asked for and quietly is not there."""
    assert main(["--run-dir", str(tmp_path), "--segment", "unused", "--kv-sanitizer"]) == 2
    assert "--kv-sanitizer needs a model" in capsys.readouterr().err


def test_rig_passes_it_on(tmp_path: Path) -> None:
    """Catches: a setting of the description or an option of the start that never reaches the engine."""
    rig = load_rig("local")
    on = rig.model_copy(update={"engine": rig.engine.model_copy(update={"kv_sanitizer": True})})

    def asked(description: Any, model: Path | None, **options: Any) -> bool:
        local = LocalRig(description, model, options=LocalOptions(**options))
        local.run_dir = tmp_path
        return "--kv-sanitizer" in local._engine_command()

    model = tmp_path / "model.gguf"
    assert not asked(rig, model)
    assert asked(rig, model, kv_sanitizer=True)
    assert asked(on, model)
    assert not asked(on, None)  # there is nothing to watch
    local = LocalRig(rig, model, options=LocalOptions(engine_command=("-m", "another")))
    local.run_dir = tmp_path
    assert local._engine_command()[:2] == ["-m", "another"]


def test_descriptor_says_where(tmp_path: Path) -> None:
    """Catches: reports that others cannot find; a descriptor from before the sanitizer that is refused."""
    info = ModelInfo("m", "", 9, 8, (), None)
    some = Memory(0, 64)
    made = EngineDescriptor(1, "s", EngineConfig(vocab=9), info, some, some, None, None)
    watched = replace(made, kv_sanitizer=SanitizerInfo("/run/x.jsonl", Memory(5, 64)))
    path = tmp_path / "engine.json"
    for descriptor in (made, watched):
        descriptor.write(path)
        assert EngineDescriptor.read(path) == descriptor
    made.write(path)
    raw = json.loads(path.read_text())
    del raw["kv_sanitizer"]
    path.write_text(json.dumps(raw))
    assert EngineDescriptor.read(path) == made
    with pytest.raises(EngineUnreachable, match="without the KV sanitizer"):
        KvReports(made)


def test_health_tells_of_reports() -> None:
    """Catches: reports that only the engine's log knows of; a front end that fails where there is no sanitizer; one
    report that hides the model's errors and what the engine's process says."""
    info, some, counters = ModelInfo("m", "", 9, 8, (), None), Memory(0, 64), OwnedMemory("counters", 64)
    made = EngineDescriptor(os.getpid(), "s", EngineConfig(vocab=9), info, some, some, None, None)
    assert kv_reports(made) is None
    where = SanitizerInfo("/run/x.jsonl", Memory(counters.fd, counters.nbytes))
    count = kv_reports(replace(made, kv_sanitizer=where))
    assert count is not None
    alive: dict[str, Any] = {
        "_failure": None,
        "_state": EngineState.READY,
        "_ended": Counter(),
        "engine_health": Health,
    }
    client: Any = SimpleNamespace(**alive, kv_reports=count)
    assert RingEngineClient.health(client).detail == ""
    counters.array(np.uint64, (5,))[3] = 2
    health = RingEngineClient.health(client)
    assert (health.alive, health.state) == (True, "ready")
    assert "2 reports" in health.detail
    notice = Notice("xid", "Xid 31 of GPU 0", 0.0)
    client.engine_health, client._ended[ErrorReason.NAN_LOGITS] = lambda: Health(None, (notice,), 1), 3
    detail = RingEngineClient.health(client).detail
    assert all(words in detail for words in ("2 reports", "3 requests ended with NAN_LOGITS", "Xid 31 of GPU 0"))
    assert kv_reports(replace(made, kv_sanitizer=replace(where, counters=Memory(9999, 64)))) is None
