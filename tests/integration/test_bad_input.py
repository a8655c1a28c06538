"""Bad input and rude clients against real processes: nobody else suffers, nothing is lost, nothing hangs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.numpy import load_file, save_file

from blink_core.abi.enums import FinishReason, LogKind
from hil_rigs.description import load_rig
from hil_rigs.engine_memory import StateSnapshot
from hil_rigs.local import LocalOptions, LocalRig, RigFailure
from tests.real_model import real_model
from tests.waiting import until
from verification.models.tiny import build_named
from verification.properties.kv_conservation import check_snapshot


def settled(rig: LocalRig) -> StateSnapshot:
    """State once no request lives; fails after a deadline."""

    def idle() -> StateSnapshot | None:
        with rig.memory.hold():
            snapshot = rig.memory.snapshot()
        return None if int(snapshot.header["live"]) else snapshot

    found = until(idle, "requests still live")
    assert found is not None
    return found


def completion(rig: LocalRig, **body: Any) -> httpx.Response:
    return httpx.post(f"{rig.base_url}/v1/completions", json={"model": rig.model_name, **body}, timeout=60.0)


def test_client_vanishes_mid_stream(tmp_path: Path) -> None:
    """Catches: KV of a client that went away kept until its request would have ended."""
    # Long enough that its own end is far when the first token has come, and no end-of-sequence may come before.
    longest = 8192
    model = build_named("llama-gqa3", tmp_path / "long", max_positions=longest).path
    sizes = {"pages": 2 + longest // 16, "max_len": longest, "slots": 16, "sq_entries": 64}
    body = {"prompt": [5, 6, 7], "max_tokens": longest - 3, "stream": True, "temperature": 1.0, "ignore_eos": True}
    with LocalRig(load_rig("local"), model, options=LocalOptions(engine=sizes)) as rig:
        before = settled(rig)
        logged = int(before.header["log_tail"])
        url, body = f"{rig.base_url}/v1/completions", body | {"model": rig.model_name}
        with httpx.stream("POST", url, json=body, timeout=60.0) as response:
            assert response.status_code == 200
            next(response.iter_lines())
        snapshot = settled(rig)
    free, cached = len(before.free_list), int(before.header["idle_cached"])
    assert len(snapshot.free_list) + int(snapshot.header["idle_cached"]) == free + cached
    new = snapshot.log[logged - snapshot.log_lost :]
    (ended,) = new[new["kind"] == LogKind.FINISH]
    assert ended["a"] == FinishReason.CANCELLED
    assert ended["b"] < longest - 3, "the request ran to its own end before it was cancelled"
    assert check_snapshot(snapshot).ok()


@pytest.mark.parametrize(
    ("length", "status"), [(0, 400), (1, 200), (254, 200), (255, 200), (256, 400), (257, 400), (2560, 400)]
)
def test_prompt_lengths(tiny_rig: LocalRig, length: int, status: int) -> None:
    """max_len is 256: a prompt of 255 leaves room for one token.

    Catches: an engine that dies or hangs on a prompt at or beyond its limit (B01), and an off-by-one refusal.
    """
    response = completion(tiny_rig, prompt=[9] * length, max_tokens=1)
    assert response.status_code == status, response.text
    if status != 200:
        assert response.json()["error"]["message"]
    assert completion(tiny_rig, prompt=[9, 9], max_tokens=1).status_code == 200


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_max_tokens(tiny_rig: LocalRig, max_tokens: int) -> None:
    """Catches: a request that asks for nothing and waits for ever."""
    assert completion(tiny_rig, prompt=[1], max_tokens=max_tokens).status_code == 400


def refused_start(model: Path) -> str:
    with pytest.raises(RigFailure) as failure, LocalRig(load_rig("local"), model, options=LocalOptions()):
        pass
    return str(failure.value)


def test_truncated_safetensors(tiny_model: Path, tmp_path: Path) -> None:
    """Catches: garbage weights served, or a start that hangs, on a file that was cut off."""
    model = tmp_path / "cut"
    model.mkdir()
    for file in tiny_model.iterdir():
        data = file.read_bytes()
        (model / file.name).write_bytes(data[: len(data) // 2] if file.suffix == ".safetensors" else data)
    assert "status 2" in refused_start(model)


def test_truncated_gguf(tmp_path: Path) -> None:
    """Catches: the same for the other format, cut within the header and within the weights."""
    whole = real_model()
    for size in (1 << 16, 20 << 20):
        model = tmp_path / f"cut-{size}.gguf"
        with whole.open("rb") as source:
            model.write_bytes(source.read(size))
        assert "status 2" in refused_start(model)


def test_missing_tensor(tiny_model: Path, tmp_path: Path) -> None:
    """Catches: a tensor that is not there and silently left at random."""
    model = tmp_path / "missing"
    model.mkdir()
    for file in tiny_model.iterdir():
        if file.suffix != ".safetensors":
            (model / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tiny_model / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    del tensors[name]
    save_file(tensors, model / "model.safetensors")
    assert name in refused_start(model)


def test_unsupported_architecture(tiny_model: Path, tmp_path: Path) -> None:
    """Catches: another family served as if it were a Llama."""
    model = tmp_path / "other"
    model.mkdir()
    for file in tiny_model.iterdir():
        text = file.read_bytes()
        if file.name == "config.json":
            text = text.replace(b"LlamaForCausalLM", b"MambaForCausalLM").replace(b'"llama"', b'"mamba"')
        (model / file.name).write_bytes(text)
    assert "mamba" in refused_start(model).lower()


def test_two_engines_at_once(tiny_rig: LocalRig, tiny_model: Path) -> None:
    """Catches: names of shared memory, ports or folders that two runs share."""
    with LocalRig(load_rig("local"), tiny_model, options=LocalOptions()) as other:
        assert other.base_url != tiny_rig.base_url
        answers = [completion(r, prompt=[7, 8, 9], max_tokens=8, temperature=0).json() for r in (tiny_rig, other)]
    assert answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"]


def test_memory_is_given_back(tiny_model: Path) -> None:
    """Catches: an orderly stop that leaves the shared memory behind."""
    rig = LocalRig(load_rig("local"), tiny_model, options=LocalOptions())
    rig.start()
    segment = Path("/dev/shm") / f"blink-{rig.name}"
    assert segment.exists()
    rig.stop()
    assert not segment.exists()
