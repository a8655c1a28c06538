"""Memory of the engine process on the real model (issue 3: weights in use and 512 MiB)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGUFReader

from blink_core.abi.enums import EventKind
from blink_core.abi.params import SamplingParams
from hil_rigs.description import load_rig
from hil_rigs.local import LocalRig
from tests.real_model import real_model

ALLOWANCE = 512 << 20
WAIT_S = 120.0


def test_memory_is_bounded_by_the_weights() -> None:
    """Catches: weights kept twice, a decoder's buffers that stay, a step whose scratch grows with the prompt."""
    model = real_model()
    weights = 4 * sum(int(np.prod(tensor.shape)) for tensor in GGUFReader(model).tensors)  # float32 in the engine
    with LocalRig(load_rig("local"), model, http=False) as rig:
        client = rig.ring(1)
        prompt = [i % 1000 + 100 for i in range(rig.descriptor.config.max_len - 1)]  # as long as the rig takes
        client.submit(prompt, SamplingParams(max_tokens=1))
        events = client.poll(WAIT_S)
        assert events[0]["kind"] == EventKind.TOKEN
        status = Path(f"/proc/{rig.pid('engine')}/status").read_text(encoding="ascii")
    peak = 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")))
    assert peak <= weights + ALLOWANCE, f"peak of {peak >> 20} MiB, weights {weights >> 20} MiB"
