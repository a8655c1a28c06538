"""Names of what a rig can have, and which of them each property needs.

A test's marker says what it needs; a rig's description says what the rig is meant to have; `probe` says what is there.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

CAPABILITIES: Final = MappingProxyType(
    {
        "cpu": "the engine compiled for the host CPU, with the NumPy float32 model and memory for its weights",
        "gpu": "an NVIDIA GPU with its driver, CuPy and nvmath-python",
        "kv-sanitizer": "an engine that checks the owner of every KV row it reads",
        "shared-memory": "POSIX shared memory for the rings and the KV pages",
        "http": "the OpenAI-style HTTP server on a loopback port",
        "oracle": "HuggingFace transformers and torch on the CPU, in float32 and float64",
    }
)
"""Capability -> what it is."""

_ENGINE = ("cpu", "shared-memory")

PROPERTY_NEEDS: Final = MappingProxyType(
    {
        "queue-ordering": _ENGINE,
        "kv-conservation": _ENGINE,
        "kv-content": (*_ENGINE, "oracle"),
        "kv-sanitizer": (*_ENGINE, "oracle", "kv-sanitizer"),
        "token-equivalence": (*_ENGINE, "oracle"),
        "streaming": (*_ENGINE, "http"),
        "fault-tolerance": (*_ENGINE, "http"),
        "scenarios": (*_ENGINE, "oracle", "http"),
        "cross-rig-agreement": _ENGINE,
        "tester-determinism": _ENGINE,
        "small-scopes": ("cpu",),
        "specification": ("cpu",),
        "conformance": _ENGINE,
        "ring-model": ("cpu",),
        "mutants": ("cpu",),
    }
)
"""Property of `blink certify` -> capabilities it needs; where a rig does not have them, the property is `filtered`."""
