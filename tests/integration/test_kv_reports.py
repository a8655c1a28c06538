"""Engines under the KV sanitizer whose tests do not look at it themselves."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blink_core.abi.params import SamplingParams
from verification.certificate.outcomes import PropertyViolation
from verification.drivers.ring import run_program
from verification.faults.wrong_plans import FILE, seed_of
from verification.program import Program, RequestSpec
from verification.run_context import RunContext
from verification.serving import TINY_SIZES, serving


def swapped_pages(model: Path, end: Callable[[], None] = lambda: None, **options: Any) -> None:
    """An engine of the suite that exchanges two pages of a block table, and a test that does not mind."""
    run = RunContext(f"kv-reports-{os.getpid()}", "local", "smoke", None, 7, "given", None)
    command = ("-m", "verification.faults.wrong_plans")
    with serving(
        run, "watched", model, TINY_SIZES, http=False, kv_sanitizer=True, engine_command=command, **options
    ) as rig:
        size = rig.descriptor.config.page_size
        params = SamplingParams(8, temperature=0.0, ignore_eos=True, seed=seed_of("swapped-pages"))
        assert run_program(rig.ring(1), Program((RequestSpec(tuple(range(2, 2 * size + 4)), params),))).complete
        assert rig.run_dir is not None
        assert json.loads((rig.run_dir / FILE).read_text())["fault"] == "swapped-pages"
        end()


def test_reports_that_nobody_read_fail_the_suite(tiny_model: Path) -> None:
    """Catches: a run with `kv_sanitizer: true` that passes although the sanitizer of one of its engines had reports,
    one that fails where they were asked for, and a test's own error that they hide."""
    with pytest.raises(PropertyViolation, match=r"engine watched: 1 reports .*, the first position: step") as failure:
        swapped_pages(tiny_model)
    result = failure.value.result
    assert (result.property, result.clause) == ("kv-sanitizer", "quiet")
    first = result.witness["report"]
    assert isinstance(first, dict)
    assert first["kind"] == "position"
    swapped_pages(tiny_model, kv_reports_expected=True)

    def fails() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as own:
        swapped_pages(tiny_model, fails)
    assert "engine watched: 1 reports" in own.value.__notes__[0]
