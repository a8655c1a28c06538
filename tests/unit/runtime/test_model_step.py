"""From a plan to the sampler's rows, also where a record shows a successor's values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from blink_core.abi.dtypes import BIAS_PAIR, PLAN_ROW, SAMPLING, STEP_RESULT
from blink_core.abi.enums import StepStatus
from blink_core.ops.sampling import sample
from blink_core.runtime.cpu import Plan
from blink_core.runtime.model_step import sampling_row

VOCAB = 40


def plan(rows: int = 1, **record: Any) -> Plan:
    """A plan whose rows have the tokens 0, 1, 2, ... (prompt 3, output 2) and the given sampling record."""
    sampling, planned = np.zeros(rows, SAMPLING), np.zeros(rows, PLAN_ROW)
    sampling["top_p"], sampling["repetition_penalty"], sampling["prompt_len"] = 1.0, 1.0, 3
    planned["context_len"], planned["emitted"], planned["sample"] = 5, 2, 1
    bias = np.zeros((rows, 4), BIAS_PAIR)
    bias["token"], bias["bias"] = [7, 8, 9, 10], [1, 2, 3, 4]
    for name, value in record.items():
        if name in (SAMPLING.names or ()):
            sampling[name] = value
        else:
            planned[name] = value
    return Plan(
        step=1,
        rows=planned,
        token_ids=np.zeros(rows, np.int32),
        positions=np.zeros(rows, np.int32),
        kv_slots=np.zeros(rows, np.int64),
        block_tables=np.zeros((rows, 1), np.uint32),
        results=np.zeros(rows, STEP_RESULT),
        sampling=sampling,
        bias=bias,
        tokens=[np.arange(16, dtype=np.int32) for _ in range(rows)],
        masks=np.full((rows, 2), 0b101, np.uint32),
        eos_ids=np.array([30, 31], np.int32),
        top_tokens=np.zeros((rows, 20), np.int32),
        top_logprobs=np.zeros((rows, 20), np.float32),
    )


def test_plain_row_asks_for_nothing() -> None:
    """Catches: tokens, bias or masks gathered for a greedy row, which must stay as cheap as an argmax."""
    row = sampling_row(plan(), 0)
    assert row.plain
    assert (row.temperature, row.position, row.prompt.size, row.output.size) == (0.0, 5, 0, 0)


def test_every_field_arrives() -> None:
    """Catches: a field of the record read for another parameter, or through another index than the row's own."""
    given = plan(2)
    given.sampling[1] = given.sampling[0]
    fields: dict[str, Any] = {
        "seed": 2**64 - 1,
        "temperature": 0.5,
        "top_p": 0.25,
        "min_p": 0.125,
        "top_k": 2**32 - 1,
        "repetition_penalty": 1.5,
        "presence_penalty": -1.0,
        "frequency_penalty": 2.0,
        "logprobs": 4,
        "choice": 2**32 - 1,
    }
    for name, value in fields.items():
        given.sampling[name][1] = value
    given.sampling["n_bias"][1] = 2
    given.rows["masked"][1] = 1
    row = sampling_row(given, 1)
    assert {name: getattr(row, name) for name in fields} == fields
    assert (row.prompt.tolist(), row.output.tolist()) == ([0, 1, 2], [3, 4])
    assert (row.bias_ids.tolist(), row.bias.tolist()) == ([7, 8], [1.0, 2.0])
    assert row.mask is not None
    assert row.mask.tolist() == [5, 5]
    assert sampling_row(given, 0).plain


@pytest.mark.parametrize(("min_tokens", "barred"), [(0, []), (2, []), (3, [30, 31, 5, 6]), (99, [30, 31, 5, 6])])
@pytest.mark.parametrize("flags", [0, 1])
def test_min_tokens_bars_eos_and_stop_ids(min_tokens: int, barred: list[int], flags: int) -> None:
    """Catches: min_tokens off by one, stop ids that still end the answer, eos let through because it is ignored."""
    stops = [5, 6, 0, 0, 0, 0, 0, 0]
    row = sampling_row(plan(min_tokens=min_tokens, n_stop=2, stop_ids=stops, flags=flags), 0)
    assert row.barred.tolist() == barred


def test_records_of_a_successor_do_no_harm() -> None:
    """Catches: an index error from what belongs to the request after a cancelled one, or an effect on other rows."""
    rng = np.random.default_rng(5)
    logits = rng.standard_normal((2, VOCAB), dtype=np.float32)
    clean = sample(logits[1:], [sampling_row(plan(temperature=1.0, seed=3), 0)])
    for _ in range(200):
        given = plan(2)
        given.sampling[0] = np.frombuffer(rng.bytes(SAMPLING.itemsize), SAMPLING)[0]
        given.bias[0] = np.frombuffer(rng.bytes(4 * BIAS_PAIR.itemsize), BIAS_PAIR)
        given.tokens[0][:] = rng.integers(-(2**31), 2**31, 16)
        given.masks[0] = rng.integers(0, 2**32, 2)
        given.rows["masked"][0] = 1
        given.sampling["temperature"][1], given.sampling["seed"][1] = 1.0, 3
        result = sample(logits, [sampling_row(given, 0), sampling_row(given, 1)], 20)
        assert result.status[1] == StepStatus.OK
        assert result.tokens[1] == clean.tokens[0]
        assert result.logprobs[1:].tobytes() == clean.logprobs.tobytes()
