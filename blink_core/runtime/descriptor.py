"""The engine descriptor: what a ready engine process publishes, so that others find its rings and memory."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from blink_core.abi.config import EngineConfig
from blink_core.abi.definition import ABI_VERSION


class DescriptorError(ValueError):
    """The descriptor is missing, damaged, or written by another ABI version."""


@dataclass(frozen=True, slots=True)
class Memory:
    """An engine-owned region: file descriptor within the engine process, and size in bytes."""

    fd: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is served. kv_shape: float32 [2 (k, v), layers, pages, page_size, kv_heads, head_dim]; None for no-op."""

    name: str
    path: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    kv_shape: tuple[int, ...] | None


# Counters of the KV sanitizer, uint64 each: steps; rows checked (of the first layer's keys: all others must equal it);
# those of them that another request wrote; reports; rows of a plan whose request had gone before its step began.
KV_COUNTERS = ("steps", "rows", "shared", "reports", "gone")


@dataclass(frozen=True, slots=True)
class SanitizerInfo:
    """Where the KV sanitizer's reports (a file of JSON lines, `kv_report.KvReport`) and its KV_COUNTERS are."""

    reports: str
    counters: Memory


@dataclass(frozen=True, slots=True)
class EngineDescriptor:
    """Written to `<run dir>/engine.json` once the engine is ready."""

    pid: int
    segment: str
    config: EngineConfig
    model: ModelInfo
    state: Memory
    log: Memory
    kv: Memory | None
    capture: str | None
    kv_sanitizer: SanitizerInfo | None = None
    abi_version: int = ABI_VERSION

    def write(self, path: Path) -> None:
        """Writes whole or not at all."""
        scratch = path.with_name(f".{path.name}.{os.getpid()}")
        scratch.write_text(json.dumps(asdict(self), indent=1))
        scratch.replace(path)

    @classmethod
    def read(cls, path: Path) -> EngineDescriptor:
        """Raises DescriptorError with the reason when `path` is not a descriptor of this ABI version."""
        try:
            raw: dict[str, Any] = json.loads(path.read_text())
            version = raw["abi_version"]
            if version != ABI_VERSION:
                raise DescriptorError(f"{path}: engine speaks ABI {version}, this code speaks {ABI_VERSION}")
            config = raw["config"]
            model = raw["model"]
            return cls(
                pid=int(raw["pid"]),
                segment=str(raw["segment"]),
                config=EngineConfig(**(config | {"eos_ids": tuple(config["eos_ids"])})),
                model=ModelInfo(
                    **(
                        model
                        | {
                            "eos_token_ids": tuple(model["eos_token_ids"]),
                            "kv_shape": tuple(model["kv_shape"]) if model["kv_shape"] else None,
                        }
                    )
                ),
                state=Memory(**raw["state"]),
                log=Memory(**raw["log"]),
                kv=Memory(**raw["kv"]) if raw["kv"] else None,
                capture=raw["capture"],
                kv_sanitizer=_sanitizer(raw.get("kv_sanitizer")),
            )
        except OSError as e:
            raise DescriptorError(f"engine descriptor {path}: {e.strerror}") from e
        except (KeyError, TypeError, ValueError) as e:
            raise e if isinstance(e, DescriptorError) else DescriptorError(f"engine descriptor {path}: {e}") from e


def _sanitizer(raw: dict[str, Any] | None) -> SanitizerInfo | None:
    return SanitizerInfo(str(raw["reports"]), Memory(**raw["counters"])) if raw else None
