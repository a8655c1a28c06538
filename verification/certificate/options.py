"""What `certify` was asked for, and the limits of time that follow from it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from verification.certificate import corpus as corpora
from verification.certificate.required import Profile
from verification.certificate.shards import Shard

PACKAGE = Path(__file__).resolve().parents[1]
REPLAY_SHARE = 0.5  # of a run's or shard's time, for all replays of earlier failures together


@dataclass(frozen=True, slots=True)
class Options:
    """What `certify` was asked for. `suite` is a folder of tests, by default the package's own."""

    rig: str
    model: str | None
    profile: str
    out: Path
    seed: str | int | None = None
    key: Path | None = None
    suite: Path = PACKAGE / "suite"
    deadline_s: float | None = None
    pytest_arguments: tuple[str, ...] = ()
    shard: Shard | None = None
    corpus: Path | None = None
    agree_with: Path | None = None

    @property
    def keeps(self) -> bool:
        """Whether failures go into the corpus and cases into its ledger: of every shard, not only the first."""
        return self.profile in corpora.REPLAYING

    @property
    def replays(self) -> bool:
        """Whether the failure corpus runs first: in whole runs of its profiles, and in the first shard."""
        return self.keeps and (self.shard is None or self.shard.index == 1)

    def limit_s(self, limits: Profile) -> float:
        """Seconds that this run, or this session of a shard, may take, replays included."""
        return self.deadline_s or (limits.deadline_s if self.shard is None else limits.shard_deadline_s)


@dataclass(frozen=True, slots=True)
class Deadline:
    """When something ends (`time.monotonic`), and what is said then."""

    end: float
    passed: str

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.end


def deadlines(options: Options, limits: Profile) -> tuple[Deadline, Deadline]:
    """(of all replays together, of everything) for a run that starts now. What replays leave is the suite's."""
    now, limit = time.monotonic(), options.limit_s(limits)
    share = limit * REPLAY_SHARE
    replays = f"the deadline of {share:g} s for all replays of earlier failures passed"
    on = "the whole run passed"
    if options.shard is not None:
        replays += "; the same command goes on with them"
        on = "a shard passed; the same command goes on with what is left"
    return Deadline(now + share, replays), Deadline(now + limit, f"the deadline of {limit:g} s for {on}")
