"""Every sampling parameter at its edges, just beyond them, and of the wrong kind."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from blink_core.frontend.engine_api import EngineLimits

if TYPE_CHECKING:
    from tests.unit.frontend.conftest import Harness

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"model": "tiny", "prompt": "hi", "max_tokens": 50},
}
BOTH = (CHAT, COMPLETIONS)
HUGE = 10**400  # beyond float64
LONG = 10**4000  # 4,001 digits

EDGES: list[tuple[str, list[Any]]] = [
    ("temperature", [0, 0.0, 1e-300, 2, 2.0]),
    ("top_p", [0, 1e-300, 1, 1.0]),
    ("top_k", [-1, 0, 1, 261, 262, 263, 2**64, LONG]),
    ("min_p", [0, 1e-300, 1, 1.0]),
    ("repetition_penalty", [0.01, 1, 100, 100.0]),
    ("presence_penalty", [-2, -2.0, 0, 2]),
    ("frequency_penalty", [-2, -2.0, 0, 2]),
    ("min_tokens", [0, 1, 50]),
    ("n", [1, 8]),
    ("seed", [0, -1, -(2**63), 2**63, 2**64 - 1]),
    ("priority", [0, 3]),
    ("timeout", [1e-6, 1, 86_400]),
    ("ignore_eos", [True, False]),
    ("prefix_cache", [True, False]),
    ("stop_token_ids", [[], [0], [261], [5] * 8]),
    ("logit_bias", [{}, {"0": -100}, {"261": 100}, {"5": 0, "6": 1e-300}, {str(i): 1 for i in range(262)}]),
    ("stop", [[], "a", ["a"] * 4, "x" * 1024]),
]

BEYOND: list[tuple[str, list[tuple[Any, str]]]] = [
    ("temperature", [(-1e-9, "-1e-09 is outside the range from 0 to 2"), (2.0000001, "outside"), (HUGE, "")]),
    ("top_p", [(-1e-9, "from 0 to 1"), (1.0000001, "1.0000001 is outside"), (-HUGE, "")]),
    ("top_k", [(-2, "-2 is less than the minimum of -1"), (-LONG, "...")]),
    ("min_p", [(-1e-9, "from 0 to 1"), (1.0000001, "outside")]),
    ("repetition_penalty", [(0, "0.0 is outside the range from 0.01 to 100"), (-1, "outside"), (100.1, "outside")]),
    ("presence_penalty", [(-2.01, "-2.01 is outside the range from -2 to 2"), (2.01, "outside"), (HUGE, "")]),
    ("frequency_penalty", [(-2.01, "from -2 to 2"), (2.01, "outside")]),
    (
        "min_tokens",
        [
            (-1, "-1 is less than the minimum of 0"),
            (51, "51 is more than 'max_tokens', which is 50"),
            (LONG, "is more than 'max_tokens', which is 50"),
        ],
    ),
    (
        "n",
        [(0, "0 is less than the minimum of 1"), (-1, "less"), (9, "9 choices, the limit is 8"), (LONG, "limit is 8")],
    ),
    ("seed", [(2**64, "18446744073709551616 does not fit in 64 bits"), (-(2**63) - 1, "64 bits"), (LONG, "64 bits")]),
    ("priority", [(-1, "-1 is outside the range from 0 to 3"), (4, "4 is outside"), (LONG, "from 0 to 3")]),
    ("timeout", [(0, "0.0 is outside the range from 1e-06 to 86400"), (-1, "outside"), (86_401, "outside")]),
    ("stop_token_ids", [([262], "262 is outside the vocabulary of 262"), ([-1], "-1 is outside"), ([LONG], "outside")]),
    ("stop_token_ids", [([5] * 9, "9 ids, the limit is 8"), (list(range(9)), "9 ids")]),
    ("logit_bias", [({"262": 1}, "token id 262 is outside the vocabulary of 262"), ({"9" * 10: 1}, "outside")]),
    ("logit_bias", [({str(k): 1 for k in range(301)}, "301 ids, the limit is 300")]),
    ("logit_bias.5", [({"5": 100.1}, "100.1 is outside the range from -100 to 100"), ({"5": -101}, "outside")]),
    ("logit_bias.5", [({"5": HUGE}, "outside"), ({"5": "1"}, '"1" is not a number'), ({"5": True}, "true is not")]),
    ("logit_bias.5", [({"5": None}, "null is not a number"), ({"5": [1]}, "[1] is not a number")]),
    (
        "logit_bias",
        [
            ({"05": 1, "5": 1}, '"05" is not a token id'),
            *(
                ({key: 1}, "is not a token id")
                for key in ("", " 5", "+5", "-1", "5.0", "1e1", "a", "٥", "1_0", "9" * 11)
            ),
            ([[5, 1]], "expected an object"),
            ("5", "expected an object"),
            (5, "expected an object"),
        ],
    ),
]

NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "timeout")
INTEGERS = ("top_k", "min_tokens", "n", "seed", "priority", "max_tokens")


def cases(table: list[tuple[str, list[Any]]]) -> list[Any]:
    made = []
    for name, values in table:
        for at, value in enumerate(values):
            made.append(pytest.param(name, value, id=f"{name}-{at}"))
    return made


def dumped(path: str, fields: dict[str, Any]) -> bytes:
    import sys

    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return json.dumps({**BASE[path], "max_tokens": 50, **fields}).encode()
    finally:
        sys.set_int_max_str_digits(limit)


@pytest.mark.parametrize(("name", "value"), cases(EDGES))
@pytest.mark.parametrize("path", BOTH)
def test_values_at_the_edge_are_taken(harness: Harness, path: str, name: str, value: Any) -> None:
    """Catches: a range that leaves its own ends out."""
    made = harness()
    response = made.call(path, raw=dumped(path, {name: value}))
    assert response.status_code == 200, response.text
    assert len(made.engine.params) == (value if name == "n" else 1)


@pytest.mark.parametrize(("name", "value"), cases(BEYOND))
@pytest.mark.parametrize("path", BOTH)
def test_values_beyond_the_edge_are_named(harness: Harness, path: str, name: str, value: tuple[Any, str]) -> None:
    """Catches: a value out of range used or clamped in silence, or an error without parameter, value or limit, or one
    that sends a megabyte back."""
    made = harness()
    sent, message = value
    response = made.call(path, raw=dumped(path, {name.partition(".")[0]: sent}))
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", name), error
    assert message in error["message"]
    assert len(response.content) < 700
    assert made.engine.prompts == []


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("name", [*NUMBERS, *INTEGERS, "ignore_eos", "prefix_cache", "stop_token_ids", "stop"])
@pytest.mark.parametrize("value", ["1", [1.5], {}, "NaN", "x" * 10_000])
def test_values_of_the_wrong_kind_are_named(harness: Harness, path: str, name: str, value: Any) -> None:
    """Catches: a string taken for a number, or a container that ends in a 500."""
    if name == "stop" and isinstance(value, str) and len(value) < 1000:
        return  # a stop string
    response = harness().call(path, raw=dumped(path, {name: value}))
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert error["param"].partition("[")[0] == name
    assert len(response.content) < 700


@pytest.mark.parametrize("name", [*NUMBERS, *INTEGERS])
@pytest.mark.parametrize("value", [True, None])
def test_booleans_are_no_numbers(harness: Harness, name: str, value: Any) -> None:
    """Catches: true taken for 1; null, which means "not given", refused."""
    response = harness().call(COMPLETIONS, raw=dumped(COMPLETIONS, {name: value}))
    assert response.status_code == (200 if value is None else 400)


@pytest.mark.parametrize("name", INTEGERS)
def test_fractions_are_no_integers(harness: Harness, name: str) -> None:
    """Catches: a fraction rounded to the nearest integer."""
    response = harness().call(COMPLETIONS, raw=dumped(COMPLETIONS, {name: 1.5}))
    assert (response.status_code, response.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_what_is_not_finite_is_refused(harness: Harness, name: str, text: str) -> None:
    """Catches: NaN or infinity, which some JSON writers send, reaching the engine."""
    made = harness()
    raw = dumped(COMPLETIONS, {}).replace(b'"max_tokens"', f'"{name}": {text}, "max_tokens"'.encode())
    response = made.call(COMPLETIONS, raw=raw)
    assert response.status_code == 400
    assert made.engine.prompts == []
    bias = dumped(COMPLETIONS, {}).replace(b'"max_tokens"', f'"logit_bias": {{"5": {text}}}, "max_tokens"'.encode())
    assert made.call(COMPLETIONS, raw=bias).status_code == 400


@pytest.mark.parametrize(
    ("path", "fields", "param", "message"),
    [
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "21 is outside the range from 0 to 20"),
        (CHAT, {"logprobs": True, "top_logprobs": -1}, "top_logprobs", "-1 is outside"),
        (CHAT, {"logprobs": True, "top_logprobs": 1.5}, "top_logprobs", "integer"),
        (CHAT, {"logprobs": True, "top_logprobs": True}, "top_logprobs", "integer"),
        (CHAT, {"top_logprobs": 3}, "top_logprobs", "only allowed when 'logprobs' is true"),
        (CHAT, {"logprobs": False, "top_logprobs": 0}, "top_logprobs", "only allowed when"),
        (CHAT, {"logprobs": 1}, "logprobs", "boolean"),
        (CHAT, {"logprobs": "true"}, "logprobs", "boolean"),
        (COMPLETIONS, {"logprobs": 21}, "logprobs", "21 is outside the range from 0 to 20"),
        (COMPLETIONS, {"logprobs": -1}, "logprobs", "-1 is outside"),
        (COMPLETIONS, {"logprobs": True}, "logprobs", "integer"),
        (COMPLETIONS, {"logprobs": LONG}, "logprobs", "from 0 to 20"),
        (COMPLETIONS, {"top_logprobs": 1}, "top_logprobs", "Unknown parameter"),
        (COMPLETIONS, {"prompt": ["a"] * 3, "n": 3}, "n", "3 choices for each of 3 prompts, the limit is 8 in all"),
        (COMPLETIONS, {"prompt": ["a"] * 9}, "prompt", "9 prompts, the limit is 8"),
        (
            COMPLETIONS,
            {"max_tokens": None, "min_tokens": 17},
            "min_tokens",
            "17 is more than 'max_tokens', which is 16",
        ),
        (
            CHAT,
            {"max_tokens": None, "max_completion_tokens": 3, "min_tokens": 4},
            "min_tokens",
            "'max_completion_tokens'",
        ),
    ],
)
def test_rules_between_parameters(
    harness: Harness, path: str, fields: dict[str, Any], param: str, message: str
) -> None:
    """Catches: log probabilities beyond what the API allows, choices beyond the slots, min_tokens beyond max_tokens."""
    made = harness()
    error = made.call(path, raw=dumped(path, fields)).json()["error"]
    assert error["param"] == param, error
    assert message in error["message"]
    assert made.engine.prompts == []


def test_limits_of_a_smaller_engine(harness: Harness) -> None:
    """Catches: the API's own limits applied where the engine was configured with lower ones."""
    limits = EngineLimits(128, 262, 127, slots=2, max_bias=1, max_logprobs=3)
    for path, fields, message in (
        (CHAT, {"logprobs": True, "top_logprobs": 4}, "4 is more than this engine's limit of 3"),
        (COMPLETIONS, {"logprobs": 4}, "4 is more than this engine's limit of 3"),
        (COMPLETIONS, {"logit_bias": {"1": 1, "2": 1}}, "2 ids, the limit is 1"),
        (COMPLETIONS, {"n": 3}, "3 choices, the limit is 2"),
    ):
        response = harness(limits=limits).call(path, raw=dumped(path, fields))
        assert response.status_code == 400
        assert message in response.json()["error"]["message"]


@pytest.mark.parametrize("name", ["temperature", "model"])
def test_key_given_twice_is_refused(harness: Harness, name: str) -> None:
    """Catches: one of two values for a parameter picked in silence, perhaps not the one that a proxy checked."""
    made = harness()
    raw = dumped(COMPLETIONS, {"temperature": 0}).replace(b"{", f'{{"{name}": "other", '.encode(), 1)
    response = made.call(COMPLETIONS, raw=raw)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "invalid_json")
    assert f'"{name}" twice' in error["message"]
    nested = dumped(COMPLETIONS, {"logit_bias": {"5": 1}}).replace(b'"5": 1', b'"5": 1, "5": 2')
    assert made.call(COMPLETIONS, raw=nested).status_code == 400
    assert made.engine.prompts == []


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 200),
        ("Application/JSON; charset=UTF-8", 200),
        ('application/json;charset="utf-8"', 200),
        ("application/json; charset=utf-16", 415),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        ("application/jsonp", 415),
        ("", 415),
        (None, 415),
        ("x" * 5000, 415),
    ],
)
def test_content_type(harness: Harness, content_type: str | None, status: int) -> None:
    """Catches: a body that any web page may post across origins taken for a request."""
    made = harness()
    response = made.call(COMPLETIONS, raw=dumped(COMPLETIONS, {}), content_type=content_type)
    assert response.status_code == status
    if status == 415:
        error = response.json()["error"]
        assert error["code"] == "unsupported_media_type"
        assert "application/json" in error["message"]
        assert len(response.content) < 700
        assert made.engine.prompts == []


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "m" * 100_000},
        {"k" * 100_000: 1},
        {"user": ["u" * 100_000]},
        {"seed": LONG},
        {"stop": ["a", {"b" * 100_000: 1}]},
        {"logit_bias": {"x" * 100_000: 1}},
        {"stream_options": {"y" * 100_000: 1}, "stream": True},
    ],
)
@pytest.mark.parametrize("path", BOTH)
def test_errors_do_not_send_the_request_back(harness: Harness, path: str, fields: dict[str, Any]) -> None:
    """Catches: an error, and a log line, as long as what a client sent."""
    response = harness().call(path, raw=dumped(path, fields))
    assert response.status_code in (400, 404)
    assert len(response.content) < 700


def test_slash_at_the_end_is_an_unknown_path(harness: Harness) -> None:
    """Catches: a redirect, in plain text, after which clients send a GET or no body."""
    response = harness().call(COMPLETIONS + "/", raw=dumped(COMPLETIONS, {}))
    assert response.status_code == 404
    assert "Unknown path" in response.json()["error"]["message"]
