"""Sampling parameters from HTTP to the model and back, on a real engine: each has the effect that its name promises."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from hil_rigs.local import LocalRig

PROMPT = [5, 6, 7, 8]


def ask(rig: LocalRig, **body: Any) -> dict[str, Any]:
    fields = {"model": rig.model_name, "prompt": PROMPT, "max_tokens": 12, "ignore_eos": True, **body}
    response = httpx.post(f"{rig.base_url}/v1/completions", json=fields, timeout=60.0)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def listed(rig: LocalRig, **body: Any) -> dict[str, Any]:
    logprobs: dict[str, Any] = ask(rig, logprobs=20, **body)["choices"][0]["logprobs"]
    return logprobs


def test_greedy_takes_the_most_probable(tiny_rig: LocalRig) -> None:
    """Catches: alternatives of another position, a log probability that is not the token's own, too few or too many."""
    found = listed(tiny_rig, temperature=0)
    assert len(found["tokens"]) == 12
    for token, logprob, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert top[token] == logprob == max(top.values())
        assert len(top) == 20  # spelt by their bytes, in which no two ids of this tokeniser agree
        assert sum(map(pow, [2.718281828] * len(top), top.values())) <= 1.0001


def test_bias_and_penalties_change_the_choice(tiny_rig: LocalRig) -> None:
    """Catches: a parameter that is checked, carried and then not applied."""
    plain = listed(tiny_rig, temperature=0)["tokens"]
    forced = ask(tiny_rig, temperature=0, logit_bias={"40": 100}, logprobs=0)["choices"][0]["logprobs"]
    assert len(set(forced["tokens"])) == 1
    assert forced["token_logprobs"][0] < -0.01  # of the raw logits, not of the biased ones
    # The bias comes first, so the penalty divides it as well.
    once = listed(tiny_rig, temperature=0, logit_bias={"40": 100}, repetition_penalty=100)["tokens"]
    assert once[0] == forced["tokens"][0]
    assert once.count(once[0]) == 1
    two = {"temperature": 0, "logit_bias": {"40": 100, "41": 100}, "max_tokens": 40}
    assert len(set(listed(tiny_rig, **two, frequency_penalty=2)["tokens"])) == 2
    assert len(set(listed(tiny_rig, **two, frequency_penalty=-2, presence_penalty=-2)["tokens"])) == 1
    assert listed(tiny_rig, temperature=2, top_k=1)["tokens"] == plain
    assert listed(tiny_rig, temperature=2, min_p=1)["tokens"] == plain
    assert listed(tiny_rig, temperature=2, top_p=0)["tokens"] == plain


def test_min_tokens_keeps_stop_ids_away(tiny_rig: LocalRig) -> None:
    """Catches: an answer that ends before min_tokens, or a stop id that never ends it afterwards."""
    fields: dict[str, Any] = {"temperature": 0, "stop_token_ids": [40], "logit_bias": {"40": 100}}
    assert ask(tiny_rig, **fields)["usage"]["completion_tokens"] == 1
    answer = ask(tiny_rig, min_tokens=7, **fields)
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (8, "stop")


def test_choices_are_reproducible_and_different(tiny_rig: LocalRig) -> None:
    """Catches: L09, n equal samples; samples that depend on what runs beside them, or on n."""
    fields: dict[str, Any] = {"temperature": 1.5, "seed": 99, "max_tokens": 24}
    four = [choice["text"] for choice in ask(tiny_rig, n=4, **fields)["choices"]]
    assert len(set(four)) == 4
    assert [choice["text"] for choice in ask(tiny_rig, n=4, **fields)["choices"]] == four
    assert [choice["text"] for choice in ask(tiny_rig, n=2, **fields)["choices"]] == four[:2]
    usage = ask(tiny_rig, n=4, **fields)["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(PROMPT), 4 * 24)


def test_cached_tokens_are_told(tiny_rig: LocalRig) -> None:
    """Catches: a prefix hit that the client is not told of, or one told of although the request refused it."""
    prompt = list(range(50, 50 + 40))
    ask(tiny_rig, prompt=prompt)
    again = ask(tiny_rig, prompt=prompt)["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert 0 < again < 40
    refused = ask(tiny_rig, prompt=prompt, prefix_cache=False)["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert refused == 0


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"timeout": 1e-6, "max_tokens": 200}, 504, "deadline"),
        ({"logit_bias": {str(k): 1 for k in range(301)}}, 400, "invalid_value"),
        ({"n": 1000}, 400, "invalid_value"),
    ],
)
def test_refusals(tiny_rig: LocalRig, fields: dict[str, Any], status: int, code: str) -> None:
    """Catches: a request that ends by its own deadline or limit and is answered as if it had succeeded."""
    body = {"model": tiny_rig.model_name, "prompt": PROMPT, "ignore_eos": True, **fields}
    response = httpx.post(f"{tiny_rig.base_url}/v1/completions", json=body, timeout=60.0)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert ask(tiny_rig)["usage"]["completion_tokens"] == 12
