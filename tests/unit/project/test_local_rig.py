"""The `local` rig's names."""

from __future__ import annotations

from pathlib import Path

import pytest

from hil_rigs.description import load_rig
from hil_rigs.local import LocalRig


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"),
        ("Llama-3.2-1B.gguf", "Llama-3.2-1B"),
        ("Llama-3.2-1B-Instruct-Q4_K_M.gguf", "Llama-3.2-1B-Instruct"),
        ("Llama-3.2-1B-Instruct.f16.gguf", "Llama-3.2-1B-Instruct"),
        ("Qwen2.5-0.5B-BF16.gguf", "Qwen2.5-0.5B"),
        ("model-IQ3_XXS.GGUF", "model"),
        ("model.v1.5.q8_0.gguf", "model.v1.5"),
        ("Q4-first-model.gguf", "Q4-first-model"),
        ("quokka-Q4-chat.gguf", "quokka-Q4-chat"),
        ("q4_0.gguf", "q4_0"),
    ],
)
def test_served_name_of_a_file(tmp_path: Path, file: str, name: str) -> None:
    """Catches: two versions of a model served under one name, cut off at the first dot; a quantisation in the name."""
    (tmp_path / file).touch()
    assert LocalRig(load_rig("local"), tmp_path / file).model_name == name


def test_served_name_of_a_folder(tmp_path: Path) -> None:
    """Catches: a folder's name that is cut as if it were a file's."""
    folder = tmp_path / "Llama-3.2-1B.f16"
    folder.mkdir()
    assert LocalRig(load_rig("local"), folder).model_name == "Llama-3.2-1B.f16"
    assert LocalRig(load_rig("local"), None).model_name == "noop"
