"""Log probabilities in the API's two shapes, aligned with text that is held back, cut, or split inside characters."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blink_core.abi.enums import FinishReason
from blink_core.frontend.logprobs import LEAST, TokenLogprob, chat_logprobs, completion_logprobs
from blink_core.frontend.tokenizer import Tokenizer

if TYPE_CHECKING:
    import httpx

    from tests.unit.frontend.conftest import FrontEndHarness, Harness

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
EOS = 259


def chunks_of(response: httpx.Response) -> list[Any]:
    payloads = [line.removeprefix("data: ") for line in response.text[:-2].split("\n\n")]
    assert payloads.pop() == "[DONE]"
    return [json.loads(payload) for payload in payloads]


def ask(made: FrontEndHarness, path: str, *, top: int | None = 1, **fields: Any) -> httpx.Response:
    body: dict[str, Any] = {"model": "tiny", **fields}
    if path == CHAT:
        body |= {"messages": [{"role": "user", "content": "x"}]}
        body |= {} if top is None else {"logprobs": True, "top_logprobs": top}
    else:
        body |= {"prompt": "x", "max_tokens": 60} | ({} if top is None else {"logprobs": top})
    response = made.call(path, body)
    assert response.status_code == 200, response.text
    return response


def test_chat_shape(harness: Harness) -> None:
    """Catches: a field of the chat format missing or misnamed, or the end-of-sequence token listed."""
    choice = ask(harness(text="hi"), CHAT, top=2).json()["choices"][0]
    assert choice["logprobs"] == {
        "content": [
            {
                "token": "h",
                "logprob": -0.5,
                "bytes": [104],
                "top_logprobs": [
                    {"token": "i", "logprob": -1.0, "bytes": [105]},
                    {"token": "j", "logprob": -2.0, "bytes": [106]},
                ],
            },
            {
                "token": "i",
                "logprob": -0.5,
                "bytes": [105],
                "top_logprobs": [
                    {"token": "j", "logprob": -1.0, "bytes": [106]},
                    {"token": "k", "logprob": -2.0, "bytes": [107]},
                ],
            },
        ],
        "refusal": None,
    }


def test_completion_shape(harness: Harness) -> None:
    """Catches: a field of the completion format missing, offsets off, the token itself left out of its alternatives."""
    choice = ask(harness(text="hi"), COMPLETIONS, top=2).json()["choices"][0]
    assert choice["logprobs"] == {
        "text_offset": [0, 1],
        "token_logprobs": [-0.5, -0.5],
        "tokens": ["h", "i"],
        "top_logprobs": [{"i": -1.0, "j": -2.0, "h": -0.5}, {"j": -1.0, "k": -2.0, "i": -0.5}],
    }


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_not_asked_for(harness: Harness, path: str) -> None:
    """Catches: log probabilities sent, or asked of the engine, that nobody wants; 0 alternatives taken for none."""
    made = harness(text="hi")
    assert ask(made, path, top=None).json()["choices"][0]["logprobs"] is None
    assert ask(made, path, top=0).json()["choices"][0]["logprobs"] is not None
    assert [params.logprobs for params in made.engine.params] == [0, 0]
    chunks = chunks_of(ask(made, path, top=None, stream=True))
    assert all(chunk["choices"][0]["logprobs"] is None for chunk in chunks)


def test_special_and_foreign_tokens_have_a_spelling(harness: Harness) -> None:
    """Catches: an alternative that is a special token or a padding row of the vocabulary shown as nothing; a crash."""
    made = harness(script=lambda _p, _s: [255, 256, EOS, FinishReason.EOS])
    content = ask(made, CHAT, top=6).json()["choices"][0]["logprobs"]["content"]
    spelled = [top["token"] for top in content[0]["top_logprobs"]]
    assert spelled == ["he", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|stop|>", "<think>"]
    assert [t["token"] for t in content] == ["\\xff", "he"]


def test_values_that_json_lacks(tiny: Tokenizer) -> None:
    """Catches: -inf or NaN, which no JSON parser takes, in a response."""
    listed = [TokenLogprob(97, float("-inf"), ((98, float("-inf")), (99, float("nan"))), 0)]
    chat, text = chat_logprobs(listed, tiny.token_bytes), completion_logprobs(listed, tiny.token_bytes)
    assert [top["logprob"] for top in chat["content"][0]["top_logprobs"]] == [LEAST, LEAST]
    assert text["top_logprobs"] == [{"b": LEAST, "c": LEAST, "a": LEAST}]
    json.dumps([chat, text], allow_nan=False)


def test_one_spelling_of_two_ids_keeps_the_more_probable(tiny: Tokenizer) -> None:
    """Catches: an alternative overwritten by a less probable one that is spelled alike."""
    listed = [TokenLogprob(97, -3.0, ((98, -1.0), (98, -2.0)), 0)]
    assert completion_logprobs(listed, tiny.token_bytes)["top_logprobs"] == [{"b": -1.0, "a": -3.0}]


def listed_of(choice: dict[str, Any], path: str) -> list[tuple[bytes, int | None]]:
    """(bytes, offset) of each listed token; bytes of the completion format are spelled back."""
    logprobs = choice["logprobs"]
    if logprobs is None:
        return []
    if path == CHAT:
        return [(bytes(entry["bytes"]), None) for entry in logprobs["content"]]
    spelled = []
    for token in logprobs["tokens"]:
        if token.startswith("bytes:"):
            spelled.append(bytes(int(part, 16) for part in token.removeprefix("bytes:").split("\\x")[1:]))
        else:
            spelled.append(token.encode())
    return list(zip(spelled, logprobs["text_offset"], strict=True))


TEXTS = st.text(alphabet="abSTOP é😀he", max_size=14)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=TEXTS,
    stop=st.lists(st.sampled_from(["STOP", "S", "TO", "é", "he ", "😀b"]), max_size=2),
    cut=st.integers(1, 40),
    path=st.sampled_from([CHAT, COMPLETIONS]),
)
def test_listed_tokens_are_those_of_the_text(harness: Harness, text: str, stop: list[str], cut: int, path: str) -> None:
    """Catches: T06, held-back text that leaves its log probabilities behind or ahead; tokens of a stop string listed, a
    token of shown text left out, an offset that points elsewhere, a stream that lists others than a whole answer."""
    made = harness(text=text)
    fields: dict[str, Any] = {"stop": stop, "max_tokens": min(cut, 60)}
    choice = ask(made, path, **fields).json()["choices"][0]
    shown = choice["message"]["content"] if path == CHAT else choice["text"]
    listed = listed_of(choice, path)
    spelled = b"".join(raw for raw, _ in listed)
    if choice["finish_reason"] == "length" and not stop:
        assert spelled.decode("utf-8", "replace") == shown
    # A token of which the stop string left a part is listed; nothing that begins behind the shown text is.
    whole = text.encode()
    assert whole.startswith(spelled)
    assert len(spelled) >= len(shown.encode()) or "\ufffd" in shown
    without_last = b"".join(raw for raw, _ in listed[:-1])
    assert len(without_last.decode("utf-8", "replace")) <= len(shown)
    for at, (_, offset) in enumerate(listed):
        if offset is not None:
            before = b"".join(raw for raw, _ in listed[:at])
            assert offset == len(before.decode("utf-8", "ignore"))
    streamed: list[tuple[bytes, int | None]] = []
    sent = ""
    for chunk in chunks_of(ask(made, path, stream=True, **fields)):
        part = chunk["choices"][0]
        sent += part["delta"].get("content", "") if path == CHAT else part["text"]
        streamed += listed_of(part, path)
        # Never ahead of the text, and behind it by no more than a character in the making.
        complete = b"".join(raw for raw, _ in streamed).decode("utf-8", "ignore")
        assert complete.startswith(sent) or sent.startswith(complete) or "\ufffd" in sent
    assert (sent, streamed) == (shown, listed)


def test_held_back_tokens_come_with_their_text(harness: Harness) -> None:
    """Catches: log probabilities of a possible stop string sent before its text, which may never be sent."""
    chunks = [
        chunk["choices"][0] for chunk in chunks_of(ask(harness(text="aSTx"), COMPLETIONS, stop="STOP", stream=True))
    ]
    parts = [(chunk["text"], [] if chunk["logprobs"] is None else chunk["logprobs"]["tokens"]) for chunk in chunks]
    assert parts == [("a", ["a"]), ("STx", ["S", "T", "x"]), ("", [])]


def test_tokens_of_a_stop_string_are_not_listed(harness: Harness) -> None:
    """Catches: the stop string, which is not shown, spelled out by its log probabilities."""
    choice = ask(harness(text="aSTOPb"), COMPLETIONS, stop="STOP").json()["choices"][0]
    assert (choice["text"], choice["logprobs"]["tokens"]) == ("a", ["a"])
    # "he" is one token: the stop string takes its second half only.
    choice = ask(harness(text="ahe"), COMPLETIONS, stop="e").json()["choices"][0]
    assert (choice["text"], choice["logprobs"]["tokens"]) == ("ah", ["a", "he"])
