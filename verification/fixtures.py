"""Fixtures of the suite: the rig under test, its engine, its HTTP client, histories and faults (design section 9).

Loaded by the plugin when one of its options is used; documented in `pytest --fixtures`. The types that the fixtures
give may be imported from here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hil_rigs.local import LocalRig
from verification.certificate.identity import own_id, property_of
from verification.certificate.outcomes import InfrastructureError
from verification.certificate.provenance import model_digest
from verification.certificate.recorder import Recorder
from verification.drivers.history import HistoryRunner
from verification.judge import Judge
from verification.plugin import context_of
from verification.plugin_selection import TINY, parametrize_family
from verification.plugin_session import failed_in_call
from verification.run_context import RunContext
from verification.serving import FAULT_SIZES, MODEL_SIZES, TINY_SIZES, Starter, replayed, serving, shape_of
from verification.subject import PROMPTS, RING, EngineLost, Subject
from verification.thresholds import Thresholds, load_thresholds

if TYPE_CHECKING:
    import openai

    from verification.faults.bench import FaultBench
    from verification.faults.model import Fault
    from verification.faults.scenario import Scenario
    from verification.program import Shape

__all__ = ["PROMPTS", "RING", "EngineLost", "HistoryRunner", "Judge", "Subject"]

DEFAULT_MODEL = "SmolLM2-135M-Instruct"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The models behind `family`."""
    context = context_of(metafunc.config)
    assert context is not None  # this module is loaded only where there is one
    parametrize_family(metafunc, context.profile_name)


@pytest.fixture(scope="session")
def thresholds() -> Thresholds:
    """The registered limits of the run."""
    return load_thresholds()


@pytest.fixture(scope="session")
def blink_model(blink_run: RunContext) -> Path:
    """Path of the model under test: --model, or the default model if it has been fetched."""
    from blink_core.model_store import ModelStoreError, resolve

    try:
        return resolve(blink_run.model or DEFAULT_MODEL)
    except ModelStoreError as e:
        raise InfrastructureError(str(e)) from e


@pytest.fixture(scope="session")
def rig(blink_run: RunContext, blink_model: Path) -> Iterator[LocalRig]:
    """The machine and its processes, serving the model under test, for the whole session.

    `.base_url` of the HTTP front end (without /v1), `.model_name`, `.pid("engine")` and `.pid("frontend")`,
    `.send(process, signal)`, `.restart("frontend")`, `.log_tail(process)`, `.ring(1)` for a ring client of your own,
    `.memory` for the raw memory of the engine, `.descriptor.config` for its sizes.
    """
    with serving(blink_run, "model", blink_model, MODEL_SIZES, http=True) as rig:
        model = {"name": rig.model_name, "path": str(blink_model), "sha256": model_digest(blink_model)}
        command = list(rig.description.engine_command)
        blink_run.fact("model", model)
        blink_run.fact("options", {"engine": rig.options.engine, "engine_command": command})
        yield rig


@pytest.fixture(scope="session")
def engine(blink_run: RunContext, rig: LocalRig, thresholds: Thresholds) -> Subject:
    """The engine that serves the model under test, as a `Subject`; `with engine.start(...)` starts another beside it.

    `.start(model=None, http=False, pages=18, max_rows=6, ...)` takes every field of `EngineConfig` and `LocalOptions`.
    `.draw(seed, count)` draws programs, `.run(program)` gives a history, `.snapshot()` the state and event log at a
    step boundary, `.oracles` HuggingFace in float64 and float32, `.client` the ring client.
    """
    return Subject(
        "model",
        rig,
        rig.ring(RING),
        shape_of(rig, requests=(4, 8), most_new=24),
        thresholds,
        MODEL_SIZES["max_len"],
        blink_run.break_rig,
        starter=Starter(blink_run, thresholds, MODEL_SIZES),
        replayed=replayed(blink_run, "model"),
        on_replay=blink_run.replay_ran,
        on_ran=blink_run.look,
    )


@pytest.fixture(scope="session")
def client(rig: LocalRig, blink_run: RunContext) -> Iterator[openai.OpenAI]:
    """An `openai.OpenAI` client of the served model, without retries; the model's name is `rig.model_name`."""
    import openai

    http = openai.DefaultHttpxClient(event_hooks={"response": [blink_run.http.response]})  # ids join a failure's logs
    url = f"{rig.base_url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120.0, http_client=http) as api:
        yield api


@pytest.fixture(scope="session")
def tiny_folder(
    blink_run: RunContext, thresholds: Thresholds, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """`tiny_folder("qwen2")` gives the folder of a tiny model, built by the run's seed on first use."""
    built: dict[str, Path] = {}

    def folder(name: str) -> Path:
        from verification.models.tiny import build_named

        if name not in built:
            path, seed = tmp_path_factory.mktemp(name), blink_run.derive_seed(name, bits=31)
            build_named(name, path, seed=seed, thresholds=thresholds.tiny_models)
            built[name] = path
        return built[name]

    return folder


@contextmanager
def _tiny(run: RunContext, thresholds: Thresholds, name: str, folder: Path, fixture: str) -> Iterator[Subject]:
    with serving(run, name, folder, TINY_SIZES, http=False) as rig:
        yield Subject(
            name,
            rig,
            rig.ring(RING),
            shape_of(rig, requests=(3, 10), most_new=40),
            thresholds,
            TINY_SIZES["max_len"],
            partial(run.break_rig, fixture=fixture),
            starter=Starter(run, thresholds, TINY_SIZES),
            replayed=replayed(run, name),
            on_replay=run.replay_ran,
            on_ran=run.look,
        )


@pytest.fixture(scope="session")
def tiny(blink_run: RunContext, thresholds: Thresholds, tiny_folder: Callable[[str], Path]) -> Iterator[Subject]:
    """An engine that serves a tiny random Llama, whose greedy tokens any KV fault changes; for what every model shares.

    `family` gives a test each model family in turn.
    """
    with _tiny(blink_run, thresholds, TINY, tiny_folder(TINY), "tiny") as subject:
        yield subject


@pytest.fixture(scope="session")
def family(
    request: pytest.FixtureRequest, blink_run: RunContext, thresholds: Thresholds, tiny_folder: Callable[[str], Path]
) -> Iterator[Subject]:
    """As `tiny`, once for each tiny model of `verification.models.variants`; in profile smoke for five of them.

    `@pytest.mark.parametrize("family", ["qwen2", "phi3"], indirect=True)` takes others.
    """
    name = str(request.param)
    if name == TINY:
        yield request.getfixturevalue("tiny")
        return
    with _tiny(blink_run, thresholds, name, tiny_folder(name), f"family[{name}]") as subject:
        yield subject


def _about(request: pytest.FixtureRequest, run: RunContext) -> dict[str, Any]:
    item = request.node
    test = {"id": own_id(item), "nodeid": item.nodeid, "property": property_of(item)}
    return {"run": run.describe(), "test": test}


@pytest.fixture
def judge(request: pytest.FixtureRequest, blink_run: RunContext, record: Recorder) -> Judge:
    """`judge(result, history)`: record a `CheckResult`, enforce it, and keep the failing program for `--replay`."""
    prompts = bool(request.config.getoption("blink_bundle_prompts"))
    return Judge(record, lambda: blink_run.evidence(own_id(request.node)), _about(request, blink_run), prompts)


@pytest.fixture
def history(request: pytest.FixtureRequest, engine: Subject, judge: Judge, seed: int) -> Iterator[HistoryRunner]:
    """`history(program)` runs a `Program` on the rig and gives the recorded `History`.

    `history.draw(count=1)` draws programs by the test's seed. `history(program, on=other)` runs on an engine that
    `engine.start` gave. With `--out`, a failing test leaves its histories as `evidence/.../failure-N.json`, and
    `--replay FILE` runs the recorded program in place of those that the test gives. An engine that dies is no
    exception: it stands in `History.died`, and `history.check(h)` judges delivery, order and terminal events.
    """
    runner = HistoryRunner(engine, judge, seed)
    yield runner
    if failed_in_call(request.node) and not judge.kept:
        for one in runner.ran:
            judge.keep(None, one)


@contextmanager
def _faults(run: RunContext, name: str, model: Path, **options: Any) -> Iterator[tuple[Scenario, Shape]]:
    from verification.faults.scenario import Scenario

    with serving(run, name, model, FAULT_SIZES, http=True, capture=False, batch_invariant=True, **options) as rig:
        yield Scenario(rig), shape_of(rig, requests=(3, 3), most_new=24)


@pytest.fixture(scope="session")
def fault_engine(blink_run: RunContext, tiny_folder: Callable[[str], Path]) -> Iterator[tuple[Scenario, Shape]]:
    """An engine and a front end for fault scenarios, which kill and stop them: a tiny model, batch-invariant."""
    with _faults(blink_run, "faults", tiny_folder(TINY)) as made:
        yield made


@pytest.fixture(scope="session")
def lease_engine(blink_run: RunContext, tiny_folder: Callable[[str], Path]) -> Iterator[tuple[Scenario, Shape]]:
    """The same with leases so short that scenarios can let them lapse."""
    from verification.faults.leases import LEASE_US

    with _faults(blink_run, "leases", tiny_folder(TINY), lease_us=LEASE_US) as made:
        yield made


@pytest.fixture
def fault(request: pytest.FixtureRequest, blink_run: RunContext, judge: Judge) -> FaultBench:
    """Faults by name for a live rig; `fault.names` lists them, `fault.about(name)` says what one does.

    `with fault("frontend-stop") as hit:` injects one under your own load and heals it. It must hit a live request,
    which `hit.requests` names, or the test ends undecided; `on=` takes an engine that `engine.start` gave.
    `fault.check(fault.scenario("frontend-kill"))` runs a whole drawn scenario (control run, victims, bystanders,
    injection, recovery) on an engine of its own, and judges it.
    """
    from verification.faults.bench import FaultBench

    def value(name: str) -> Callable[[], Any]:
        return lambda: request.getfixturevalue(name)

    def scenarios(fault: Fault) -> tuple[Scenario, Shape]:
        made: tuple[Scenario, Shape] = request.getfixturevalue("lease_engine" if fault.lease_us else "fault_engine")
        return made

    return FaultBench(blink_run, judge, judge.about["test"]["id"], value("engine"), scenarios)
