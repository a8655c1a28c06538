"""What a machine must have, in bytes. Standard library only: the doctor shows these before anything is installed."""

from __future__ import annotations

MIB = 1 << 20
GIB = 1 << 30

SHM_MINIMUM_BYTES = 8 * MIB
"""Free in /dev/shm: half of it holds the `local` rig's rings at their full size; the engine shrinks them into less."""

SHM_SHARE = 0.5
"""Share of the free /dev/shm that one engine may take for its rings; the rest is for a second run."""

MEMORY_MINIMUM_BYTES = 3 * GIB
"""Available: SmolLM2 in float32, the oracle's copies of it in float32 and float64, and the KV pool."""
