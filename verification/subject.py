"""A served model under test: the rig, the suite's own ring, and the oracles of the model (design section 9)."""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blink_core.frontend.ring_client import ProtocolError, RingClient
from blink_core.transport.interface import TransportError
from hil_rigs.engine_memory import EngineUnreachable, StateSnapshot
from hil_rigs.local import LocalRig
from verification.certificate.outcomes import PropertyViolation
from verification.drivers.ring import drain, run_program
from verification.history import History
from verification.program import Program, Shape, draw_program
from verification.result import CheckResult, Verdict
from verification.thresholds import Thresholds

if TYPE_CHECKING:
    from verification.oracles.hf import HFOracle

MOST_RECENT = 3  # histories that a failing test's bundle can choose from
RING = 1  # the suite's own; ring 0 is the HTTP front end's

PROMPTS = (
    "The capital of France is",
    "Write a short poem about a lighthouse in winter.",
    "def fibonacci(n):\n    ",
    "Ein Zug fährt um 8:15 Uhr in Köln ab. 漢字 and emoji 🙂 follow.",
    "1, 1, 2, 3, 5, 8, 13, 21,",
)


class EngineLost(PropertyViolation):
    """The engine died or could not be held while it served valid requests: the product's failure, not the rig's."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            CheckResult(Verdict.INVALID, "queue-ordering", "bounded-wait", f"the engine is gone: {reason}")
        )


Start = Callable[..., AbstractContextManager["Subject"]]


@dataclass
class Subject:
    """A served model under test: rig, ring client, and (loaded on first use) its oracles.

    asked_len: the length that the rig was started with. on_death: called once with the reason when the engine is
    found dead, wedged or out of reach. Then `dead` says so, and every later run's history too. starter: how `start`
    starts another engine. replayed: the program that runs in place of every other (`--replay`); on_replay: called
    whenever it has. on_ran: looks at the engine's log before it wraps around.
    """

    name: str
    rig: LocalRig
    client: RingClient
    shape: Shape
    thresholds: Thresholds
    asked_len: int
    on_death: Callable[[str], None] = lambda reason: None
    dead: str | None = None
    starter: Start | None = None
    replayed: Program | None = None
    on_replay: Callable[[], None] = lambda: None
    on_ran: Callable[[], object] = lambda: None  # called after each program
    recent: deque[History] = field(default_factory=lambda: deque(maxlen=MOST_RECENT))  # of this test, oldest first

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

    def start(self, model: Path | str | None = None, *, http: bool = False, **options: Any) -> Any:
        """Starts a further engine, beside this one, for as long as the `with` lasts; gives its `Subject`.

        model: file, folder or pinned name; by default this engine's own. http: with a front end, so that
        `.rig.base_url` is there. options: fields of `EngineConfig` (pages, max_rows, token_budget, max_len, slots ...)
        and of `LocalOptions` (batch_invariant, capture, verbosity, heartbeat_limit_s, threads).

        Raises RigBroken when it does not start, ValueError for an option of neither.
        """
        if self.starter is None:
            raise ValueError(f"{self.name} was not started by the plugin: it starts no other engine")
        return self.starter(model if model is not None else self.rig.model, http=http, **options)

    def run(
        self,
        program: Program,
        *,
        every: int = 0,
        observe: Callable[[], None] = lambda: None,
        deadline_s: float | None = None,
        together: bool = False,
    ) -> History:
        """Runs a program. An engine that dies, wedges or breaks the protocol is a finding and stands in the history.

        deadline_s: seconds for the program; None: as many as its tokens may take (`drivers.ring.deadline_of`).
        together: the engine is held at a boundary while the first requests are submitted, and sees all of them at once.
        """
        program = self.replayed or program
        if self.dead is not None:
            self.recent.append(History(program, RING, died=self.dead, subject=self.name))
            return self.recent[-1]

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
            first=self.rig.memory.hold if together else contextlib.nullcontext,
        )
        history.died = history.died or self.rig.wait(0.0)
        if history.died is None and not history.complete:
            history.died = self.reattach()
        history.capture = (start, self.capture_size())
        if history.died is not None:
            self.lost(history.died)
        history.subject = self.name
        self.recent.append(history)
        self.on_ran()
        if self.replayed is not None and history.submitted:
            self.on_replay()
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

    def revived(self, client: RingClient) -> str | None:
        """A fault that took the engine away is healed: another serves, with this client. Gives what `on_death` was
        told, None if it was not called."""
        reason = None if self.dead is None else f"{self.name}: {self.dead}"
        self.client, self.dead = client, None
        return reason

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

    @contextlib.contextmanager
    def held(self, log_from: int = 0) -> Iterator[StateSnapshot]:
        """Holds the engine at a step boundary while inside; gives its state there. Raises EngineLost like `snapshot`.

        A test acts inside, where nothing can end by itself between the look and the act.
        """
        if self.dead is not None:
            raise EngineLost(self.dead)
        memory = self.rig.memory
        with memory.hold():
            yield memory.snapshot(log_from)

    def capture_size(self) -> int:
        """Bytes that the logits capture has now."""
        path = self.rig.descriptor.capture
        return Path(path).stat().st_size if path and Path(path).exists() else 0
