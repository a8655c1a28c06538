"""Fixtures of the suite: the rig under test, its engine, its HTTP client, and the oracle (design section 9).

Loaded by the plugin when one of its options is used; documented in `pytest --fixtures`.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from blink_core.abi.enums import LogLevel
from blink_core.frontend.ring_client import ProtocolError, RingClient
from blink_core.transport.interface import TransportError
from hil_rigs.description import load_rig
from hil_rigs.engine_memory import EngineUnreachable, StateSnapshot
from hil_rigs.local import LocalOptions, LocalRig, RigFailure
from hil_rigs.locks import rig_lock
from verification.certificate.identity import own_id
from verification.certificate.outcomes import InfrastructureError, PropertyViolation, RigBroken
from verification.certificate.provenance import model_digest
from verification.certificate.recorder import Recorder
from verification.drivers.ring import drain, run_program
from verification.history import History
from verification.program import Program, Shape, draw_program
from verification.result import CheckResult, Verdict, plain
from verification.run_context import RunContext
from verification.thresholds import Thresholds, load_thresholds

if TYPE_CHECKING:
    import openai

    from verification.models.tiny import Ratio
    from verification.oracles.hf import HFOracle

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
TINY_RATIOS: dict[str, Ratio] = {"tiny-gqa3": "3:1", "tiny-gqa7": "7:1"}

# Small on purpose: the pool is a fraction of what the drawn programs ask for, so that preemption and reuse must occur.
MODEL_SIZES = {"pages": 66, "max_rows": 8, "token_budget": 64, "max_len": 512, "slots": 64, "sq_entries": 256}
TINY_SIZES = {"pages": 18, "max_rows": 6, "token_budget": 24, "max_len": 160, "slots": 16, "sq_entries": 64}
COMMON_SIZES = {"cq_entries": 1024, "arena_tokens": 1 << 14, "log_entries": 1 << 18, "log_level": int(LogLevel.ALL)}


RING = 1  # the suite's own; ring 0 is the HTTP front end's
MAX_EVIDENCE = 5  # failing programs kept for one test


class EngineLost(PropertyViolation):
    """The engine died or could not be held while it served valid requests: the product's failure, not the rig's."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            CheckResult(Verdict.INVALID, "queue-ordering", "bounded-wait", f"the engine is gone: {reason}")
        )


@dataclass
class Judge:
    """Records and enforces results for one test, and keeps the program and history of one that fails.

    folder: where its evidence goes, None when no output was asked for.
    """

    record: Recorder
    folder: Callable[[], Path | None]
    _seen: set[Program] = field(default_factory=set)
    _kept: int = 0

    def __call__(self, result: CheckResult, *histories: History) -> CheckResult:
        """Raises PropertyViolation or PropertyUnknown for a result that is not valid. histories: what it is about."""
        if not result.ok():
            for history in histories:
                self.keep(result, history)
        return self.record.check(result)

    def case(self, program: Program) -> None:
        """Counts a program that is run, once however often it is drawn."""
        if program not in self._seen:
            self._seen.add(program)
            self.record.cases()

    def keep(self, result: CheckResult, history: History) -> None:
        """Writes `failure-N.json`: the result, and the history with its program, which replays from it."""
        folder = self.folder() if self._kept < MAX_EVIDENCE else None
        if folder is not None:
            content = {"result": result.to_json(), "history": plain(history.to_json())}
            (folder / f"failure-{self._kept}.json").write_text(json.dumps(content), encoding="utf-8")
            self._kept += 1


@dataclass
class Subject:
    """A served model under test: rig, ring client, and (loaded on first use) its oracles.

    asked_len: the length that the rig was started with. on_death: called once with the reason when the engine is
    found dead, wedged or out of reach. Then `dead` says so, and every later run's history too.
    """

    name: str
    rig: LocalRig
    client: RingClient
    shape: Shape
    thresholds: Thresholds
    asked_len: int
    on_death: Callable[[str], None] = lambda reason: None
    dead: str | None = None

    @cached_property
    def oracles(self) -> tuple[HFOracle, HFOracle]:
        """HuggingFace in float64 (reference) and float32 (yardstick)."""
        from verification.oracles.hf import HFOracle

        assert self.rig.model is not None
        return HFOracle.load_pair(self.rig.model)

    @cached_property
    def texts(self) -> list[list[int]]:
        """Token ids of a few real prompts."""
        oracle = self.oracles[1]
        return [oracle.encode(text) for text in PROMPTS]

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """End-of-sequence ids as HuggingFace knows them; never the engine's own."""
        return self.oracles[1].eos_token_ids

    @property
    def max_len(self) -> int:
        """Longest sequence: what the rig was started with, or the model's own limit where that is shorter."""
        return min(self.asked_len, int(self.oracles[1].config.max_position_embeddings))

    def draw(self, seed: int, count: int, *, sampled: float | None = None) -> list[Program]:
        """`count` programs of a seed; together they have a greedy and a sampled request that nobody cancels.

        sampled: share of requests with a temperature, above 0 and below 1, instead of the shape's own.
        """
        rng = random.Random(seed)
        shape = self.shape if sampled is None else replace(self.shape, sampled=sampled)
        while True:
            programs = [draw_program(rng, shape, self.texts) for _ in range(count)]
            kept = [r.params.temperature > 0 for p in programs for r in p.requests if r.cancel_after is None]
            if {True, False} <= set(kept):
                return programs

    def run(
        self, program: Program, *, every: int = 0, observe: Callable[[], None] = lambda: None, deadline_s: float = 120.0
    ) -> History:
        """Runs a program. An engine that dies, wedges or breaks the protocol is a finding and stands in the history."""
        if self.dead is not None:
            return History(program, RING, died=self.dead)

        def observed() -> None:
            try:
                observe()
            except EngineLost as e:  # the driver notes it in the history
                raise EngineUnreachable(str(e)) from e

        start = self.capture_size()
        history = run_program(
            self.client,
            program,
            ring=RING,
            every=every,
            observe=observed,
            deadline_s=deadline_s,
            died=lambda: self.rig.wait(0.0),
        )
        history.died = history.died or self.rig.wait(0.0)
        if history.died is None and not history.complete:
            history.died = self.reattach()
        history.capture = (start, self.capture_size())
        if history.died is not None:
            self.lost(history.died)
        return history

    def reattach(self) -> str | None:
        """After a broken program: a fresh epoch, so that the next one starts clean. Returns why that failed, if so."""
        try:
            with contextlib.suppress(ProtocolError):
                drain(self.client, 2.0)
            self.client = self.rig.ring(RING)
        except (TransportError, OSError) as e:
            return f"the engine takes no new front end: {e}"
        return None

    def lost(self, reason: str) -> None:
        """The engine is not to be used again."""
        if self.dead is None:
            self.dead = reason
            self.on_death(f"{self.name}: {reason}")

    def snapshot(self, log_from: int = 0) -> StateSnapshot:
        """State at a step boundary, with the log from an index on. Raises EngineLost when there is no boundary."""
        if self.dead is not None:
            raise EngineLost(self.dead)
        try:
            memory = self.rig.memory
            with memory.hold():
                return memory.snapshot(log_from)
        except EngineUnreachable as e:
            reason = self.rig.wait(0.0) or str(e)
            self.lost(reason)
            raise EngineLost(reason) from e

    def capture_size(self) -> int:
        """Bytes that the logits capture has now."""
        path = self.rig.descriptor.capture
        return Path(path).stat().st_size if path and Path(path).exists() else 0


PROMPTS = (
    "The capital of France is",
    "Write a short poem about a lighthouse in winter.",
    "def fibonacci(n):\n    ",
    "Ein Zug fährt um 8:15 Uhr in Köln ab. 漢字 and emoji 🙂 follow.",
    "1, 1, 2, 3, 5, 8, 13, 21,",
)


def _start(run: RunContext, name: str, model: Path, sizes: dict[str, int], *, http: bool) -> LocalRig:
    rig = LocalRig(
        load_rig(run.rig),
        model,
        http=http,
        name=f"{run.run_id}-{run.worker}-{name}",
        options=LocalOptions(capture=True, engine=COMMON_SIZES | sizes),
    )
    try:
        rig.start()
    except RigFailure as e:
        raise RigBroken(f"{name}: {e}") from e
    return rig


@contextlib.contextmanager
def _serving(run: RunContext, name: str, model: Path, sizes: dict[str, int], *, http: bool) -> Iterator[LocalRig]:
    with rig_lock(load_rig(run.rig), run.run_id):
        rig = _start(run, name, model, sizes, http=http)
        try:
            yield rig
        finally:
            rig.stop()


def _shape(rig: LocalRig, requests: tuple[int, int], most_new: int) -> Shape:
    config = rig.descriptor.config
    usable = (config.pages - 2) * config.page_size
    longest = min(config.max_len, usable)
    return Shape(vocab=config.vocab, page_size=config.page_size, longest=longest, requests=requests, most_new=most_new)


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
    """The rig, serving the model under test: `.base_url`, `.ring(i)`, `.memory`, `.pid(process)`."""
    with _serving(blink_run, "model", blink_model, MODEL_SIZES, http=True) as rig:
        model = {"name": rig.model_name, "path": str(blink_model), "sha256": model_digest(blink_model)}
        command = list(rig.description.engine_command)
        blink_run.fact("model", model)
        blink_run.fact("options", {"engine": rig.options.engine, "engine_command": command})
        yield rig


@pytest.fixture(scope="session")
def engine(blink_run: RunContext, rig: LocalRig, thresholds: Thresholds) -> Subject:
    """The engine that serves the model under test: `.run(program)`, `.snapshot()`, `.oracles`, `.client` (its ring)."""
    shape = _shape(rig, requests=(4, 8), most_new=24)
    return Subject("model", rig, rig.ring(RING), shape, thresholds, MODEL_SIZES["max_len"], blink_run.break_rig)


@pytest.fixture(scope="session")
def client(rig: LocalRig) -> Iterator[openai.OpenAI]:
    """An OpenAI client of the served model, without retries."""
    import openai

    with openai.OpenAI(base_url=f"{rig.base_url}/v1", api_key="none", max_retries=0, timeout=120.0) as api:
        yield api


@pytest.fixture(scope="session", params=sorted(TINY_RATIOS))
def tiny(
    request: pytest.FixtureRequest,
    blink_run: RunContext,
    thresholds: Thresholds,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Subject]:
    """An engine that serves a tiny random Llama (3:1 or 7:1 heads), whose greedy tokens any KV fault changes."""
    from verification.models.tiny import build_tiny

    folder = tmp_path_factory.mktemp(request.param)
    seed = blink_run.derive_seed(request.param, bits=31)
    build_tiny(folder, ratio=TINY_RATIOS[request.param], seed=seed, thresholds=thresholds.tiny_models)
    with _serving(blink_run, request.param, folder, TINY_SIZES, http=False) as rig:
        shape = _shape(rig, requests=(3, 10), most_new=40)
        on_death = partial(blink_run.break_rig, fixture="tiny")
        yield Subject(request.param, rig, rig.ring(RING), shape, thresholds, TINY_SIZES["max_len"], on_death)


@pytest.fixture
def judge(request: pytest.FixtureRequest, blink_run: RunContext, record: Recorder) -> Judge:
    """`judge(result, history)`: record, enforce, and keep the failing program as evidence."""
    return Judge(record, lambda: blink_run.evidence(own_id(request.node)))
