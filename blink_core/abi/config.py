"""Engine configuration: validated sizes, packed into the `Config` record at the head of shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from blink_core.abi.definition import ABI_VERSION, MAGIC, MAX_EOS_IDS, MAX_LOGPROBS, MAX_SLOTS
from blink_core.abi.dtypes import CONFIG, Array, RegionLayout, layouts
from blink_core.abi.enums import Admission, LogLevel

RESERVED_PAGES = 2


class ConfigError(ValueError):
    """A configuration value outside its limits; the message names field, value and limit."""


def _power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


def next_power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes of one engine (design sections 3 to 5). Field meanings are those of `definition.CONFIG`."""

    vocab: int
    eos_ids: tuple[int, ...] = ()
    rings: int = 1
    slots: int = 1024
    sq_entries: int = 4096
    cq_entries: int = 8192
    arena_tokens: int = 1 << 18
    max_len: int = 2048
    page_size: int = 16
    pages: int = 514
    max_rows: int = 16
    token_budget: int = 256
    visibility_us: int = 200_000
    paused_limit: int = 64
    log_entries: int = 1 << 16
    log_level: int = LogLevel.DECISIONS
    admission: int = Admission.OPTIMISTIC
    prefix_cache: int = 1
    quantum: int = 2048
    reservation_steps: int = 64
    lease_us: int = 10_000_000
    max_bias: int = 300
    max_logprobs: int = MAX_LOGPROBS
    masks: int = 0

    def __post_init__(self) -> None:
        self._check()

    @property
    def max_pages(self) -> int:
        """Pages of one block table."""
        return -(-self.max_len // self.page_size)

    @property
    def mask_words(self) -> int:
        """32-bit words of one grammar mask."""
        return -(-self.vocab // 32) if self.masks else 0

    def _check(self) -> None:
        def within(name: str, low: int, high: int) -> None:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise ConfigError(f"{name} is {value!r}, must be an integer from {low} to {high}")

        within("vocab", 1, 2**31 - 1)
        within("rings", 1, 256)
        within("slots", 1, MAX_SLOTS)
        within("max_len", 2, 1 << 24)
        within("page_size", 1, 4096)
        within("pages", RESERVED_PAGES + 1, 2**31 - 1)
        within("max_rows", 1, 4096)
        within("token_budget", self.max_rows, 1 << 20)
        within("arena_tokens", self.max_len, 2**31 - 1)
        within("visibility_us", 1, 2**31 - 1)
        within("paused_limit", 1, 2**31 - 1)
        within("log_level", LogLevel.OFF, LogLevel.ALL)
        within("admission", Admission.OPTIMISTIC, Admission.RESERVE)
        within("prefix_cache", 0, 1)
        within("quantum", 1, 2**31 - 1)
        within("reservation_steps", 1, 2**31 - 1)
        within("lease_us", 0, 2**62)
        within("max_bias", 0, 1 << 16)
        within("max_logprobs", 0, MAX_LOGPROBS)
        within("masks", 0, self.slots)
        within("cq_entries", self.slots + self.max_rows, 1 << 22)
        within("sq_entries", 2 * self.slots, 1 << 16)
        within("log_entries", 1, 1 << 28)
        for name in ("cq_entries", "sq_entries", "log_entries"):
            if not _power_of_two(getattr(self, name)):
                raise ConfigError(f"{name} is {getattr(self, name)}, must be a power of two")
        if len(self.eos_ids) > MAX_EOS_IDS:
            raise ConfigError(f"{len(self.eos_ids)} end-of-sequence ids, at most {MAX_EOS_IDS}")
        for token in self.eos_ids:
            if not 0 <= token < self.vocab:
                raise ConfigError(f"end-of-sequence id {token} outside the vocabulary of {self.vocab}")

    def sizes(self) -> dict[str, int]:
        """The integer fields that region layouts depend on."""
        fields = asdict(self)
        del fields["eos_ids"]
        return fields | {"max_pages": self.max_pages, "mask_words": self.mask_words}

    def layouts(self) -> dict[str, RegionLayout]:
        return layouts(self.sizes())

    def shared_nbytes(self) -> int:
        """Bytes of shared memory: control region and all rings."""
        made = self.layouts()
        return made["Control"].nbytes + self.rings * made["Ring"].nbytes

    def pack(self) -> Array:
        """One `Config` record."""
        record = np.zeros(1, CONFIG)
        record["magic"], record["abi_version"] = MAGIC, ABI_VERSION
        for name, value in self.sizes().items():
            record[name] = value
        record["n_eos"] = len(self.eos_ids)
        record["eos_ids"][0, : len(self.eos_ids)] = self.eos_ids
        return record

    @classmethod
    def unpack(cls, raw: bytes) -> EngineConfig:
        """Reads a `Config` record. Raises ConfigError on a foreign magic number or ABI version."""
        if len(raw) < CONFIG.itemsize:
            raise ConfigError(f"config record has {len(raw)} bytes, needs {CONFIG.itemsize}")
        record = np.frombuffer(raw, CONFIG, 1)[0]
        if int(record["magic"]) != MAGIC:
            raise ConfigError(f"magic number {int(record['magic']):#x} is not {MAGIC:#x}: not a Blink engine")
        if int(record["abi_version"]) != ABI_VERSION:
            raise ConfigError(f"engine speaks ABI {int(record['abi_version'])}, this code speaks {ABI_VERSION}")
        names = [f for f in cls.__dataclass_fields__ if f != "eos_ids"]
        eos: Sequence[int] = record["eos_ids"][: int(record["n_eos"])].tolist()
        return cls(eos_ids=tuple(eos), **{name: int(record[name]) for name in names})


def fit_shared_memory(config: EngineConfig, available: int) -> EngineConfig:
    """Shrinks slots, queues and arena until control region and rings take at most `available` bytes.

    Raises ConfigError when even 16 slots a ring do not fit.
    """
    fitted = config
    while fitted.shared_nbytes() > available:
        slots = fitted.slots // 2
        if slots < 16:
            need = fitted.shared_nbytes()
            raise ConfigError(f"shared memory has {available} bytes free, the smallest rings need {need}")
        fitted = replace(
            fitted,
            slots=slots,
            sq_entries=next_power_of_two(4 * slots),
            cq_entries=next_power_of_two(max(4 * slots, slots + fitted.max_rows)),
            arena_tokens=max(fitted.max_len, fitted.arena_tokens // 2),
        )
    return fitted
