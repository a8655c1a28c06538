"""The engine process of the gpu rig, as far as it goes without a GPU."""

from __future__ import annotations

import importlib.util

import pytest

from blink_core.runtime import cuda_main

ARGUMENTS = ["--run-dir", "run", "--segment", "blink-x", "--slots", "16"]


def test_arguments_are_those_of_every_engine_and_its_own() -> None:
    """Catches: an option of the rig's description that the GPU's engine does not take, or takes for another's."""
    own, args = cuda_main.parse([*ARGUMENTS, "--dtype", "float32", "--launch", "host"])
    assert (own.dtype, own.launch, own.step_limit) == ("float32", "host", 30.0)
    assert (args.segment, args.slots) == ("blink-x", 16)


@pytest.mark.parametrize("wrong", [["--dtype", "float64"], ["--launch", "often"], ["--nothing"]])
def test_unknown_options_are_refused(wrong: list[str]) -> None:
    """Catches: a misspelt option that is passed over in silence."""
    with pytest.raises(SystemExit):
        cuda_main.parse([*ARGUMENTS, *wrong])


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is installed")
def test_without_cupy_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches: a traceback where one line would say what to install."""
    assert cuda_main.main(ARGUMENTS) == 2
    assert "pip install" in capsys.readouterr().err
