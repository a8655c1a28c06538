"""Situations that no event log shows: how long the compared sequences were (design section 9)."""

from __future__ import annotations

from verification.certificate.recorder import Recorder
from verification.fixtures import Subject
from verification.models.sensitivity import windowed_layers
from verification.result import CheckResult, Measurement, Verdict


class Lengths:
    """Whether sequences went beyond the lengths at which a model changes what it does, by HuggingFace's configuration:
    its sliding window, and the length that its RoPE scaling starts from. Lengths that no program can have are left out.
    """

    def __init__(self, subject: Subject) -> None:
        config = subject.oracles[1].config
        window = int(config.sliding_window) if windowed_layers(config) else 0
        original = int((config.rope_parameters or {}).get("original_max_position_embeddings") or 0)
        limits = {"beyond-window": window, "beyond-rope-maximum": original}
        most = subject.shape.longest - 1 if subject.replayed is None else 0  # what is replayed is as long as it is
        self.limits = {name: limit for name, limit in limits.items() if 0 < limit < most}
        self.longest = 0

    @property
    def reached(self) -> bool:
        return all(self.longest > limit for limit in self.limits.values())

    def add(self, length: int) -> None:
        self.longest = max(self.longest, length)

    def check(self, record: Recorder, property_name: str) -> CheckResult:
        """Records the situations; unknown when one was not reached."""
        for name, limit in self.limits.items():
            record.situation(name, self.longest > limit)
        verdict = Verdict.VALID if self.reached else Verdict.UNKNOWN
        measured = {
            name: Measurement(self.longest, "tokens", limit + 1, limit_is="min") for name, limit in self.limits.items()
        }
        message = f"the longest sequence compared has {self.longest} tokens; {self.limits or 'no length'} to go beyond"
        return CheckResult(verdict, property_name, "lengths", message, {}, measured)
