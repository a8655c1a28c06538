"""The HTTP front end over a served tiny model: streams, answers, bounds; classes R, T, B, and of numbers in a body V.

Four checkers that share no decision: a stream against the whole answer, an answer against HuggingFace's tokens, a table
of requests at the edges of every limit, and drawn requests judged by the limits alone.
"""

from __future__ import annotations

import functools
import json
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import tokenizers

from verification.mutants.checkers.base import Checker, Finding, Product, found, left
from verification.mutants.engines import SIZES, parts_of
from verification.mutants.parts import Part
from verification.mutants.references import model_path, reference
from verification.properties import streaming
from verification.result import Verdict

MODEL = "mistral-full"
MAX_LEN, VOCAB, SLOTS, MAX_LOGPROBS = 200, 512, 8, 4
ENGINE = SIZES | {"max_len": MAX_LEN, "slots": SLOTS, "sq_entries": 32, "max_logprobs": MAX_LOGPROBS}
ENGINE |= {"lease_us": 10_000_000}
Wrong = tuple[str, str] | None


class Client:
    """One server; `ask` gives a whole answer, `stream` the chunks of one."""

    def __init__(self, http: httpx.Client, served: Part) -> None:
        self.http, self.served = http, served

    def post(self, body: Any, path: str = "/v1/completions", **options: Any) -> httpx.Response:
        """body: JSON for a dict, else raw bytes."""
        if isinstance(body, bytes):
            return self.http.post(path, content=body, **options)
        return self.http.post(path, json={"model": "tiny", **body}, **options)

    def ask(self, body: dict[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
        """The JSON of an answer. Raises RefusedError for another status than 200."""
        response = self.post(body, path)
        if response.status_code != 200:
            raise RefusedError(f"status {response.status_code}: {response.text[:200]} for {body}")
        whole: dict[str, Any] = response.json()
        return whole

    def stream(self, body: dict[str, Any], path: str = "/v1/completions") -> list[dict[str, Any]]:
        """The JSON of each event but the last, which must be [DONE]."""
        asked = {"model": "tiny", **body, "stream": True, "stream_options": {"include_usage": True}}
        response = self.http.post(path, json=asked)
        lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        if response.status_code != 200 or lines[-1:] != ["[DONE]"]:
            raise RefusedError(f"status {response.status_code}, the stream ends with {lines[-1:]} for {body}")
        return [json.loads(line) for line in lines[:-1]]

    def hold(self, events: int) -> None:
        """The front end's next poll that finds events finds at least so many more, whatever the pace of the engine."""
        self.served.call("hold", events)


class RefusedError(Exception):
    """A valid request was not answered."""


@contextmanager
def serving(product: Product, deadline: float) -> Iterator[Client]:
    """The tiny model, served by the product until the `with` ends. Raises TimeoutError for no answer in time."""
    parts = parts_of(product, deadline)
    served = parts.keep(
        "hil_rigs.served:ServedModel", str(model_path(MODEL)), tempfile.mkdtemp(dir=product.scratch), ENGINE
    )
    try:
        with httpx.Client(base_url=served.call("url"), timeout=min(20.0, left(deadline))) as http:
            yield Client(http, served)
    except httpx.TimeoutException as error:  # no TimeoutError, which is what counts as a hang
        raise TimeoutError(f"no answer in time: {error}") from error
    finally:
        if parts.alive:
            served.call("close")
            parts.drop(served)


REFUSED = "a valid request is refused"


@dataclass(frozen=True)
class HttpChecker:
    """Runs one drawn check on a served model."""

    name: str
    functions: frozenset[str]
    clauses: Mapping[str, frozenset[str]]
    check: Callable[[Client, random.Random, int], Wrong]
    where: frozenset[str] = frozenset({"python"})
    seconds: float = 90.0

    def run(self, product: Product, seed: int, deadline: float) -> Finding | None:
        """What `check` found wrong."""
        with serving(product, deadline) as client:
            try:
                wrong = self.check(client, random.Random(f"{self.name}-{seed}"), seed)
            except RefusedError as error:
                wrong = REFUSED, str(error)
        return None if wrong is None else found(self, *wrong)


@functools.cache
def backend() -> tokenizers.Tokenizer:
    """The model's tokeniser, by the library that made it."""
    return tokenizers.Tokenizer.from_file(str(model_path(MODEL) / "tokenizer.json"))


# ---- a stream and the whole answer

STREAMS = {
    REFUSED: frozenset("RT"),
    "stream and whole answer": frozenset("RT"),
    "stop string": frozenset("T"),
    "log probabilities and text": frozenset("TR"),
    "usage of all choices": frozenset("R"),
}
WORDS = ("the lamp", "Zähle 12 Schiffe", "def add(left, right):", "日本語", "the storm 🙂")


def check_streams(client: Client, rng: random.Random, seed: int) -> Wrong:
    """Chats and texts, one choice and several, with stop strings and log probabilities, whole and streamed."""
    for path in ("/v1/completions", "/v1/chat/completions"):
        ask = _asker(client, path, rng)
        body: dict[str, Any] = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
        body |= {"logit_bias": {"201": 3}}  # a newline by itself now and then
        (free, stream), *_ = ask(body)
        if (wrong := _compared(free, stream)) is not None:
            return wrong
        for number in range(4):
            # A piece of the middle; one that only begins with the text's end, so that this is held back; one that is
            # not there; and one within the beginning of another.
            at = rng.randrange(1, max(2, len(free.text) - 6)) if number < 3 else 0
            stops = [
                [free.text[at : at + 4], "\N{SNOWMAN}"],
                [free.text[-1:] + "\N{SNOWMAN}"],
                ["x\N{SNOWMAN}"],
                _nested(free.text, seed),
            ][number]
            if not all(stops):
                continue
            (cut, stream), *_ = ask(body | {"stop": stops})
            result = streaming.check_stop(free, cut, stops)
            if result.verdict is Verdict.INVALID:
                return "stop string", str(result)
            if (wrong := _compared(cut, stream, stops)) is not None:
                return wrong
        answers = ask({"max_tokens": 12, "temperature": 1.2, "seed": rng.getrandbits(40), "n": 3})
        for whole, stream in answers:
            if (wrong := _compared(whole, stream)) is not None:
                return wrong
    return _choices(client, rng) or _listed(client, rng, free.text)


def _nested(text: str, seed: int) -> list[str]:
    """A stop string that begins in the text and is not in it, and one that ends within this beginning, where it occurs
    first. An empty one where no two characters of the text serve."""
    places = [at for at in range(1, len(text) - 1) if text.find(text[at : at + 2]) == at]
    places = [at for at in places if streaming.REPLACEMENT not in text[at - 1 : at + 2]]
    if not places:
        return [""]
    at = places[seed % len(places)]
    return [text[at - 1 : at + 2] + "\N{SNOWMAN}", text[at : at + 2]]


def _asker(
    client: Client, path: str, rng: random.Random
) -> Callable[[dict[str, Any]], list[tuple[streaming.Answer, streaming.Stream]]]:
    """Asks for a body whole and streamed: a pair for each choice. Usage counts once, at the first choice."""
    text, chat = rng.choice(WORDS), "chat" in path
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}

    def ask(body: dict[str, Any]) -> list[tuple[streaming.Answer, streaming.Stream]]:
        whole, chunks = client.ask(prompt | body, path), client.stream(prompt | body, path)
        usage = whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]
        streamed = chunks[-1].get("usage")
        pairs = []
        for index, choice in enumerate(whole["choices"]):
            mine = [c["choices"][0] for c in chunks if c["choices"] and c["choices"][0]["index"] == index]
            answer = choice["message"]["content"] if chat else choice["text"]
            pairs.append(
                (
                    streaming.Answer(answer, choice["finish_reason"], *usage),
                    streaming.Stream(
                        tuple((c["delta"].get("content") or "") if chat else c["text"] for c in mine),
                        tuple(c["finish_reason"] for c in mine) or (None,),
                        streamed and (streamed["prompt_tokens"], streamed["completion_tokens"]),
                        tuple(c["delta"].get("role") for c in mine) if chat else None,
                    ),
                )
            )
        return pairs

    return ask


def _compared(whole: streaming.Answer, stream: streaming.Stream, stops: list[str] | None = None) -> Wrong:
    result = streaming.check(whole, stream, tuple(stops or ()))
    return None if result.ok() else ("stream and whole answer", str(result))


def _choices(client: Client, rng: random.Random) -> Wrong:
    """Two prompts with three choices each: what is told and counted, against the same with one choice. All that the
    engine says to the three comes in one poll: tokens of six requests, several of each."""
    prompts = [[rng.randrange(3, VOCAB) for _ in range(n)] for n in (4, 7)]
    body = {"prompt": prompts, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    one = client.ask(body | {"n": 1})
    client.hold(6 * (5 + 1))
    three = client.ask(body | {"n": 3})
    got = tuple(three["usage"][k] for k in ("prompt_tokens", "completion_tokens", "total_tokens"))
    texts = [choice["text"] for choice in three["choices"]]
    if got != (11, 30, 41) or one["usage"]["completion_tokens"] != 10:
        return "usage of all choices", f"3 choices of 2 prompts with 4 and 7 tokens, 5 new each: {got}"
    if texts != [choice["text"] for choice in one["choices"] for _ in range(3)]:
        return "usage of all choices", f"greedy choices of one prompt differ: {texts}"
    return None


def _listed(client: Client, rng: random.Random, free: str) -> Wrong:
    """With log probabilities: tokens listed are those of the text shown, whole and streamed, with and without stop."""
    prompt = [rng.randrange(3, VOCAB) for _ in range(6)]
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True, "logprobs": 2}
    plain = client.ask(body)["choices"][0]
    # Stop strings that begin with a token, and one that holds the end of a longer token back.
    starts = [o for o in plain["logprobs"]["text_offset"] if 1 < o < len(plain["text"]) - 1]
    pairs = zip(plain["logprobs"]["tokens"], plain["logprobs"]["text_offset"], strict=True)
    long = [o + len(token) - 1 for token, o in pairs if len(token) > 1 and not token.startswith("bytes:")]
    begin = [plain["text"][at : at + 2] for at in rng.sample(starts, min(3, len(starts)))]
    held = [plain["text"][at] + "\N{SNOWMAN}" for at in rng.sample(long, min(2, len(long))) if at < len(plain["text"])]
    for stop in (None, *begin, *held):
        asked = body if stop is None else body | {"stop": [stop]}
        whole, chunks = client.ask(asked)["choices"][0], client.stream(asked)
        text, listed = whole["text"], whole["logprobs"]
        beyond = (
            [o for o in listed["text_offset"] if o >= len(text)] if stop is not None and stop in plain["text"] else []
        )
        if beyond or len(listed["tokens"]) != len(listed["token_logprobs"]):
            return (
                "log probabilities and text",
                f"tokens at {beyond} of a text of {len(text)} characters, stop {stop!r}",
            )
        if any(len(top) not in (2, 3) for top in listed["top_logprobs"]):
            return "log probabilities and text", f"alternatives of a token: {listed['top_logprobs']}"
        shown = ""
        streamed: list[str] = []
        for chunk in (c["choices"][0] for c in chunks if c["choices"]):
            shown += chunk["text"]
            streamed += chunk["logprobs"]["tokens"] if chunk["logprobs"] else []
            offsets = chunk["logprobs"]["text_offset"] if chunk["logprobs"] else []
            early = [
                (o, token)
                for o, token in zip(offsets, chunk["logprobs"]["tokens"] if offsets else (), strict=True)
                # A special token is listed, and has no text of its own to wait for.
                if len(shown) < o + len(token) and text.startswith(token, o)
            ]
            if early:
                return "log probabilities and text", f"{early} listed when {len(shown)} characters were shown"
        if streamed != listed["tokens"]:
            return "log probabilities and text", f"streamed {streamed}, whole {listed['tokens']}"
    return None


# ---- an answer and HuggingFace

ANSWERS = {
    REFUSED: frozenset("RT"),
    "text of the answer": frozenset("RT"),
    "usage": frozenset("R"),
    "log probabilities": frozenset("RL"),
    "end of the answer": frozenset("RT"),
}


def check_answers(client: Client, rng: random.Random, seed: int) -> Wrong:
    """Greedy answers are the text of HuggingFace's tokens, their counts and log probabilities are its own."""
    for expected in reference(MODEL, seed)[4:]:
        prompt, tokens = list(expected.prompt), list(expected.tokens)
        body = {"prompt": prompt, "max_tokens": len(tokens), "temperature": 0, "ignore_eos": True, "logprobs": 1}
        whole = client.ask(body)
        choice, usage = whole["choices"][0], whole["usage"]
        text = backend().decode(tokens, skip_special_tokens=True)
        if choice["text"] != text:
            return "text of the answer", f"{choice['text']!r}, HuggingFace's tokens {tokens} give {text!r}"
        counts = usage["prompt_tokens"], usage["completion_tokens"], choice["finish_reason"]
        if counts != (len(prompt), len(tokens), "length"):
            return "usage", f"{counts} for {len(prompt)} prompt tokens and {len(tokens)} new ones"
        rows = expected.logits64 - expected.logits64.max(axis=1, keepdims=True)
        rows = rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))
        values = choice["logprobs"]["token_logprobs"]
        exact = [float(rows[i, t]) for i, t in enumerate(tokens)]
        if len(values) != len(exact) or not np.allclose(values, exact, atol=2e-3):
            return "log probabilities", f"{values}, HuggingFace gives {exact}"
        tops = choice["logprobs"]["top_logprobs"]
        if any(len(top) != 1 for top in tops):
            return "log probabilities", f"one alternative was asked for: {tops}"
        if (wrong := _ends(client, prompt, tokens, rng)) is not None:
            return wrong
    return None


def _ends(client: Client, prompt: list[int], tokens: list[int], rng: random.Random) -> Wrong:
    """A stop id ends the answer and is not shown; a special stop string does so by its id."""
    at = rng.randrange(1, len(tokens))
    body = {"prompt": prompt, "max_tokens": len(tokens), "temperature": 0, "ignore_eos": True}
    stopped = client.ask(body | {"stop_token_ids": [tokens[at]]})["choices"][0]
    text = backend().decode(tokens[: tokens.index(tokens[at])], skip_special_tokens=True)
    if (stopped["text"], stopped["finish_reason"]) != (text, "stop"):
        return "end of the answer", f"stop id {tokens[at]} in {tokens}: {stopped['text']!r}, expected {text!r}"
    forced = body | {"logit_bias": {"1": 100}, "stop": ["<|im_start|>"]}
    answer = client.ask(forced)
    if (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) != ("stop", 1):
        return "end of the answer", f"the special stop string did not end it: {answer['choices'][0]}, {answer['usage']}"
    return None


# ---- bounds

BOUNDS = {
    "accepted at the limit": frozenset("B"),
    "refused beyond the limit": frozenset("B"),
    "a long timeout": frozenset("V"),
}


def edges(rng: random.Random) -> Iterator[tuple[dict[str, Any], str | None]]:
    """(body, error code or None for 200) at both sides of every limit."""
    ids = [rng.randrange(3, VOCAB) for _ in range(MAX_LEN + 1)]
    length = rng.randrange(2, 60)
    short: dict[str, Any] = {"prompt": ids[:4], "max_tokens": 2}
    rest, invalid = MAX_LEN - length, "invalid_value"
    yield {"prompt": ids[:length], "max_tokens": rest, "stop_token_ids": [], "temperature": 0}, None
    yield {"prompt": ids[:length], "max_tokens": rest + 1}, "context_length_exceeded"
    yield {"prompt": ids[: MAX_LEN - 1], "max_tokens": 1}, None
    yield {"prompt": ids[:MAX_LEN]}, "context_length_exceeded"
    yield {"prompt": ids}, "context_length_exceeded"
    table: tuple[tuple[str, tuple[Any, ...], tuple[Any, ...]], ...] = (
        ("temperature", (0, 2), (-0.1, 2.001, 3)),
        ("top_p", (0, 1), (-0.01, 1.01)),
        ("min_p", (0, 1), (-0.01, 1.01)),
        ("top_k", (-1, 0, VOCAB), (-2,)),
        ("presence_penalty", (-2, 2), (-2.1, 2.1)),
        ("frequency_penalty", (-2, 2), (-2.1, 2.1)),
        ("repetition_penalty", (0.01, 100), (0, 100.1)),
        ("priority", (0, 3), (-1, 4)),
        ("logprobs", (0, MAX_LOGPROBS), (-1, MAX_LOGPROBS + 1)),
        ("min_tokens", (0, 2), (-1, 3)),
        ("max_tokens", (1,), (0, -1)),
        ("n", (1, SLOTS), (0, SLOTS + 1)),
        ("seed", (0, 2**64 - 1, -(2**63)), (2**64, -(2**63) - 1)),
        ("logit_bias", ({"0": -100}, {str(VOCAB - 1): 100}), ({"0": -100.5}, {"1": 101}, {str(VOCAB): 1})),
        ("stop", (["a", "b", "c", "d"], "x" * 1024), (["a", "b", "c", "d", "e"], "x" * 1025, "")),
        ("stop_token_ids", (list(range(3, 11)), [VOCAB - 1]), (list(range(3, 12)), [VOCAB], [-1])),
        ("prompt", ([0], [VOCAB - 1]), ([VOCAB], [-1], [], "")),
    )
    for name, good, bad in table:
        for value in good:
            yield short | {name: value}, None
        for value in bad:
            yield short | {name: value}, invalid
    yield short | {"stop_token_ids": list(range(3, 11)), "stop": ["<|im_start|>"]}, invalid
    yield short | {"prompt": [ids[:2]] * 2, "n": SLOTS // 2}, None
    yield short | {"prompt": [ids[:2]] * 2, "n": SLOTS // 2 + 1}, invalid
    yield short | {"wrong_parameter": 1}, "unknown_parameter"
    yield short | {"max_tokens": "2"}, "invalid_type"
    yield short | {"temperature": "0.5"}, "invalid_type"


def check_edges(client: Client, rng: random.Random, seed: int) -> Wrong:
    """The table above; whole bodies of a wrong type, or too long; and a timeout beyond 32 bits of microseconds."""
    for body, code in edges(rng):
        response = client.post(body)
        shown = {k: v if len(str(v)) < 60 else f"{len(v)} long" for k, v in body.items()}
        if code is None:
            if response.status_code != 200:
                return "accepted at the limit", f"{shown}: {response.status_code} {response.text[:150]}"
            continue
        error = response.json().get("error", {}) if response.status_code != 200 else {}
        if response.status_code != 400 or error.get("code") != code:
            return "refused beyond the limit", f"{shown}: {response.status_code} {error}, expected 400 {code}"
    limit = 4 * 2**20
    raw = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 1}).encode()
    json_type = {"content-type": "application/json"}
    for padded, status in ((raw + b" " * (limit - len(raw)), 200), (raw + b" " * (limit + 1 - len(raw)), 413)):
        response = client.post(padded, headers=json_type)
        if response.status_code != status:
            clause = "accepted at the limit" if status == 200 else "refused beyond the limit"
            return clause, f"a body of {len(padded)} bytes: {response.status_code}, expected {status}"
    response = client.post(raw, headers={"content-type": "text/plain"})
    if response.status_code != 415:
        return "refused beyond the limit", f"a body of text/plain: {response.status_code}, expected 415"
    response = client.post({"prompt": "a", "max_tokens": 150, "ignore_eos": True, "timeout": 2**32 / 1e6 + 0.002})
    if response.status_code != 200:
        return "a long timeout", f"a timeout of 4295 s ended with {response.status_code} {response.text[:150]}"
    return None


DRAWN = {"refused within the limits": frozenset("B"), "taken beyond the limits": frozenset("B")}


def check_drawn(client: Client, rng: random.Random, seed: int) -> Wrong:
    """Drawn requests near their limits: whether one is taken must be what `allowed` says of its numbers alone."""
    for _ in range(60):
        prompts = [
            [rng.randrange(3, VOCAB) for _ in range(rng.choice((1, 5, 90)))] for _ in range(rng.choice((1, 1, 3)))
        ]
        body: dict[str, Any] = {"prompt": prompts, "max_tokens": rng.choice((1, 2, 3)), "temperature": 0}
        longest = max(map(len, prompts))
        drawn: dict[str, Any] = {
            "max_tokens": MAX_LEN - longest + rng.choice((-150, 0, 1, 2)),
            "n": rng.choice((1, 2, 3, 8)),
            "temperature": rng.choice((0, 1.5, 2.0, 2.5, 19)),
            "min_tokens": body["max_tokens"] + rng.choice((-1, 0, 1)),
            "stop": ["q"] * rng.randrange(1, 6),
            "logit_bias": {str(VOCAB + rng.choice((-1, 0))): rng.choice((-100, 1, 100, 100.5))},
            "stop_token_ids": [*range(rng.choice((1, 8, 9)))],
        }
        for name in rng.sample(sorted(drawn), rng.choice((1, 1, 2))):
            body[name] = drawn[name]
        if rng.random() < 0.1:
            body[rng.choice(("tempreature", "maxtokens", "beam_width"))] = 1
        if rng.random() < 0.1:
            body["max_tokens"] = str(body["max_tokens"])
        response = client.post(body)
        if (response.status_code == 200) != allowed(body):
            clause = "taken beyond the limits" if response.status_code == 200 else "refused within the limits"
            shown = {k: v for k, v in body.items() if k != "prompt"}
            return (
                clause,
                f"prompts of {list(map(len, prompts))}, {shown}: {response.status_code} {response.text[:120]}",
            )
    return None


def allowed(body: Mapping[str, Any]) -> bool:
    """Whether a request keeps to all limits."""
    known = {"prompt", "max_tokens", "n", "temperature", "min_tokens", "stop", "logit_bias", "stop_token_ids"}
    new = body["max_tokens"]
    if set(body) - known or not isinstance(new, int):
        return False
    return (
        1 <= new <= MAX_LEN - max(map(len, body["prompt"]))
        and body.get("n", 1) * len(body["prompt"]) <= SLOTS
        and 0 <= body["temperature"] <= 2
        and 0 <= body.get("min_tokens", 0) <= new
        and len(body.get("stop", ())) <= 4
        and len(body.get("stop_token_ids", ())) <= 8
        and all(int(k) < VOCAB and -100 <= v <= 100 for k, v in body.get("logit_bias", {}).items())
    )


_HERE = "verification.mutants.checkers.http."
_STREAMING = "verification.properties.streaming."
CHECKERS: tuple[Checker, ...] = (
    HttpChecker(
        "http-streams",
        frozenset({_STREAMING + "check", _STREAMING + "check_stop", _HERE + "check_streams"}),
        STREAMS,
        check_streams,
    ),
    HttpChecker("http-huggingface", frozenset({_HERE + "check_answers"}), ANSWERS, check_answers),
    HttpChecker("http-edges", frozenset({_HERE + "check_edges"}), BOUNDS, check_edges),
    HttpChecker("http-drawn-bounds", frozenset({_HERE + "allowed"}), DRAWN, check_drawn),
)
