"""Fixtures of the suite: the rig under test, its engine, its HTTP client, and the oracle (design section 9).

Loaded by the plugin when one of its options is used; documented in `pytest --fixtures`.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from blink_core.abi.enums import LogLevel
from blink_core.frontend.ring_client import ProtocolError, RingClient
from blink_core.transport.interface import TransportError
from hil_rigs.description import load_rig
from hil_rigs.engine_memory import EngineUnreachable, StateSnapshot
from hil_rigs.local import LocalOptions, LocalRig, RigFailure
from hil_rigs.locks import OwnedLock, clean_stale
from verification.certificate.outcomes import InfrastructureError, RigBroken
from verification.certificate.provenance import model_digest
from verification.drivers.ring import drain, run_program
from verification.history import History
from verification.program import Program, Shape, draw_program
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


@dataclass
class Subject:
    """A served model under test: rig, ring client, and (loaded on first use) its oracles."""

    name: str
    rig: LocalRig
    client: RingClient
    shape: Shape
    thresholds: Thresholds

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

    def draw(self, seed: int, count: int) -> list[Program]:
        """`count` programs of a seed."""
        rng = random.Random(seed)
        return [draw_program(rng, self.shape, self.texts) for _ in range(count)]

    def run(
        self, program: Program, *, every: int = 0, observe: Callable[[], None] = lambda: None, deadline_s: float = 120.0
    ) -> History:
        """Runs a program; a rig that died, rather than a wrong answer, raises RigBroken."""
        try:
            history = run_program(self.client, program, every=every, observe=observe, deadline_s=deadline_s)
        except (TransportError, EngineUnreachable, ProtocolError) as e:
            raise RigBroken(f"{self.name}: {e}") from e
        dead = self.rig.wait(0.0)
        if dead is not None:
            raise RigBroken(f"{self.name}: {dead}")
        if not history.complete:
            self._recover()
        return history

    def _recover(self) -> None:
        """After a broken program: a fresh epoch, so that the next test starts clean."""
        with contextlib.suppress(ProtocolError):
            drain(self.client, 2.0)
        self.client = self.rig.ring(1)

    def snapshot(self) -> StateSnapshot:
        """State at a step boundary."""
        memory = self.rig.memory
        with memory.hold():
            return memory.snapshot()


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
    clean_stale()
    with OwnedLock(f"rig-{run.rig.rpartition('/')[2]}-{run.run_id}-{run.worker}-{name}", owner=run.run_id):
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
def engine(rig: LocalRig, thresholds: Thresholds) -> Subject:
    """The engine that serves the model under test: `.run(program)`, `.snapshot()`, `.oracles`, `.client` (its ring)."""
    shape = _shape(rig, requests=(4, 8), most_new=24)
    return Subject("model", rig, rig.ring(1), shape, thresholds)


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
        yield Subject(request.param, rig, rig.ring(1), shape, thresholds)


@pytest.fixture
def subject(request: pytest.FixtureRequest) -> Subject:
    """Either the model under test or a tiny one, by indirect parameter "model" or "tiny"."""
    found: Subject = request.getfixturevalue("engine" if request.param == "model" else "tiny")
    return found
