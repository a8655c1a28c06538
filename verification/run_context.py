"""What a run is: options of the pytest plugin resolved to rig, profile, model, seed, run id and output folder.

Light on purpose: pytest loads this at every start, so the parts that need pydantic or NumPy are imported on use.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verification.failures.http_log import HttpLog

if TYPE_CHECKING:
    from verification.certificate.required import Profile, RequiredSet
    from verification.failures.evidence import EngineEvidence
    from verification.recording import Recording

# The root seed of every run that does not say otherwise: continuous integration is derandomised.
DEFAULT_SEED = 260407609
MAX_SEED = 2**63 - 1
PROFILES = ("smoke", "nightly", "full")


def parse_seed(text: str | int | None) -> tuple[int, str]:
    """The root seed and where it is from ("default", "given", "random"); `ValueError` for anything else.

    None gives the fixed default, "random" draws a fresh one, a number (also 0x...) is taken as it is.
    """
    if text is None:
        return DEFAULT_SEED, "default"
    if text == "random":
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
    http: HttpLog = field(default_factory=HttpLog)  # what the `client` fixture asked for, for a failure's bundle
    seen_last: dict[str, EngineEvidence] = field(default_factory=dict)  # engines that a test started and left failing
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
