"""What a run is: options of the pytest plugin resolved to rig, profile, model, seed, run id and output folder.

Light on purpose: pytest loads this at every start, so the parts that need pydantic or NumPy are imported on use.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verification.failures.http_log import HttpLog

if TYPE_CHECKING:
    from hil_rigs.local import LocalRig
    from verification.certificate.required import Profile, RequiredSet
    from verification.certificate.shards import Shard
    from verification.failures.evidence import EngineEvidence
    from verification.recording import Recording
    from verification.situations.watch import EngineWatch
    from verification.trace.live import LiveTrace

# The root seed of every run that does not say otherwise: continuous integration is derandomised.
DEFAULT_SEED = 260407609
MAX_SEED = 2**63 - 1
PROFILES = ("smoke", "nightly", "full")


def parse_seed(text: str | int | None, profile: str = "smoke") -> tuple[int, str]:
    """The root seed and where it is from ("default", "given", "random"); `ValueError` for anything else.

    None gives the fixed default in profile smoke and a fresh seed in the others (design section 9), "random" draws a
    fresh one, a number (also 0x...) is taken as it is.
    """
    if text is None and profile == "smoke":
        return DEFAULT_SEED, "default"
    if text is None or text == "random":
        return secrets.randbelow(2**48), "random"
    try:
        seed = text if isinstance(text, int) else int(text, 0)
    except ValueError as error:
        raise ValueError(f"seed {text!r} is neither a number nor 'random'") from error
    if not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed {seed} is outside 0..{MAX_SEED}")
    return seed, "given"


def new_run_id() -> str:
    """A fresh id, unique on the machine, short enough for the names of shared memory: time and 24 random bits."""
    return f"{time.strftime('%y%m%d%H%M%S', time.gmtime())}{secrets.token_hex(3)}"


@dataclass(slots=True)
class RunContext:
    """One run of the suite, as fixtures and tests see it (fixture `blink_run`).

    `model` is a path or a name, as given. `worker` is the pytest-xdist worker's name, "main" without xdist. `facts` go
    into the report: the rig's fixtures put "model" (name, path, sha256) and "options" there. `rig` is a name, or the
    path of a description. `replay` is what `--replay` gave. `judges_required` says whether the rig's whole required set
    decides the verdict, or only the tests that were selected.
    """

    run_id: str
    rig: str
    profile_name: str
    model: str | None
    seed: int
    seed_source: str
    out: Path | None
    worker: str = "main"
    key: Path | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)  # why, by rig: "rig" serves the model under test
    capabilities: frozenset[str] = frozenset()
    replay: Recording | None = None
    replayed: bool = False  # whether the recording ran in the test that it is of
    test: str = ""  # own id of the test that runs
    judges_required: bool = False
    shard: Shard | None = None
    done: Path | None = None  # state file of a shard that goes on: tests that it says are done do not run again
    agree_with: Path | None = None  # another run's output folder, with whose recorded answers this one's are compared
    http: HttpLog = field(default_factory=HttpLog)  # what the `client` fixture asked for, for a failure's bundle
    seen_last: dict[str, EngineEvidence] = field(default_factory=dict)  # engines that a test started and left failing
    unread: dict[str, str] = field(default_factory=dict)  # engines whose log could not be read in whole, and why
    watches: list[EngineWatch] = field(default_factory=list)  # of every engine that the run has started
    traces: dict[str, LiveTrace] = field(default_factory=dict)  # of the engines that run, by their names
    _seen: Counter[str] = field(default_factory=Counter)
    _required: RequiredSet | None = None

    @property
    def required(self) -> RequiredSet:
        """The rig's required set."""
        if self._required is None:
            from verification.certificate.required import load

            self._required = load(self.rig)
        return self._required

    @property
    def profile(self) -> Profile:
        """The profile's limits and requirements."""
        return self.required.profile(self.profile_name)

    def describe(self) -> dict[str, Any]:
        """The run as a recording names it."""
        return {
            "id": self.run_id,
            "rig": self.rig,
            "rig_kind": self.rig_kind,
            "profile": self.profile_name,
            "seed": self.seed,
            "model": self.model,
        }

    @property
    def rig_kind(self) -> str:
        """The kind of the rig, which has the required set; a rig's own name is its kind."""
        from verification.certificate.required import required_name

        return required_name(self.rig)

    def replay_ran(self) -> None:
        """The recording that `--replay` gave has run."""
        self.replayed = True

    def derive_seed(self, *names: object, bits: int = 63) -> int:
        """A seed for the thing with these names: a hash of them and the root seed, the same on every machine."""
        text = "\0".join([str(self.seed), *map(str, names)])
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> (64 - bits)

    def resource_name(self, what: str) -> str:
        """Name of a shared resource (memory, lock, folder) that no other run and no other worker uses."""
        return f"blink-{self.run_id}-{self.worker}-{what}"

    def fact(self, name: str, value: Any) -> None:
        """Put a JSON value about the run into the report."""
        self.facts[name] = value

    def break_rig(self, reason: str, *, fixture: str = "rig") -> None:
        """Declare a rig unusable: every later test that uses it is `blocked`. The first reason stays.

        fixture: the fixture that started it, "rig" or, for each of its parameters, "family[qwen2]"; tests of the
        others go on.
        """
        self.broken.setdefault(fixture, reason)

    def mend_rig(self, reason: str) -> None:
        """Takes back what `break_rig` declared for this reason: the rig was brought back. Other reasons stay."""
        self.broken = {fixture: why for fixture, why in self.broken.items() if why != reason}

    def watch(self, name: str, rig: LocalRig) -> EngineWatch:
        """Follows the engine of a rig from now on; what its log shows goes into the record of the test that runs."""
        from verification.situations.watch import EngineWatch

        self.watches.append(EngineWatch(name, rig))
        return self.watches[-1]

    def log_verdict(self, name: str) -> dict[str, Any] | None:
        """What the specification says of an engine's log so far; None where nobody follows it."""
        trace = self.traces.get(name)
        return None if trace is None else trace.facts()

    def look(self) -> None:
        """Reads what engines' logs have had, before they wrap around."""
        self._seen += self._collect()

    def observed(self) -> Counter[str]:
        """Situations that engines' logs have shown since the last call. What cannot be read is told in the report."""
        from verification.situations.registry import reachable

        counts, self._seen = self._seen + self._collect(), Counter()
        return Counter({name: n for name, n in counts.items() if reachable(name, self.capabilities)})

    def _collect(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for watch in self.watches:
            try:
                watch.collect()
            except Exception as error:  # a rig that died may show anything; the test's own outcome stands
                self.unread[watch.name] = f"{type(error).__name__}: {error}"
            if watch.unread:
                self.unread[watch.name] = f"{watch.unread} log entries were overwritten before they were read"
            counts += watch.take()
        return counts

    def evidence(self, test_id: str) -> Path | None:
        """A folder for files of a test that are signed with the report; None when no output was asked for."""
        if self.out is None:
            return None
        folder = self.out / "evidence" / self.file_name(test_id)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @staticmethod
    def file_name(test_id: str) -> str:
        """A test's id as the name of a folder, unique and short."""
        name = "".join(c if c.isalnum() or c in "._-" else "_" for c in test_id)
        return f"{name[:80]}-{hashlib.sha256(test_id.encode()).hexdigest()[:8]}"
