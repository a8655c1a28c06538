"""Every emitted token against HuggingFace, by the float32 criterion."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from blink_core.abi.dtypes import Array
from blink_core.abi.enums import LogKind
from verification.certificate.recorder import Recorder
from verification.criterion import TokenScores, score_tokens
from verification.fixtures import PROMPTS, Judge, Subject
from verification.history import History
from verification.models.tiny import MANIFEST
from verification.oracles.gguf_decode import check_weights
from verification.oracles.sampler import SampledRow
from verification.properties import token_equivalence
from verification.properties.log_probabilities import check_log_probabilities
from verification.result import CheckResult, Verdict
from verification.suite.planted import check_power, measure_power
from verification.suite.running import serve
from verification.suite.situations import Lengths

if TYPE_CHECKING:
    import openai

pytestmark = [pytest.mark.blink_property("token-equivalence"), pytest.mark.capability("cpu", "shared-memory", "oracle")]

PROGRAMS = {"model": 2, "tiny": 4}
MOST_TIMES = 4  # so many times more programs are drawn when these give too few rows
Rows = dict[token_equivalence.Key, Array]


def _captured(subject: Subject, judge: Judge, window: tuple[int, int], *histories: History) -> Rows:
    descriptor = subject.rig.descriptor
    assert descriptor.capture is not None
    vocab = subject.oracles[1].vocab_size
    records = token_equivalence.read_window(Path(descriptor.capture), vocab, window)
    rows, result = token_equivalence.index_capture(records, vocab)
    judge(result, *histories)
    return rows


def _check(subject: Subject, judge: Judge, seed: int, programs: int) -> None:
    parts: list[TokenScores] = []
    sampled: list[SampledRow] = []
    histories: list[History] = []
    prompts = Lengths(subject)
    for program in subject.draw(seed, MOST_TIMES * programs, sampled=0.5):
        greedy = any(part.greedy.any() for part in parts)
        enough = sum(map(len, parts)) >= subject.thresholds.tokens.min_rows
        if len(histories) >= programs and enough and greedy and sampled and prompts.reached:
            break
        history = serve(subject, program, judge)
        histories.append(history)
        rows = _captured(subject, judge, history.capture, history)
        judge(token_equivalence.check_capture(history, rows), history)
        judge(check_log_probabilities(history, rows, subject.thresholds.sampling.logprob_tolerance), history)
        sampled += token_equivalence.sampled_rows(history, rows, subject.eos_ids)
        parts += token_equivalence.score(history, rows, *subject.oracles)
        for s in history.submitted:
            prompts.add(len(history.program.requests[s.request].prompt) if history.tokens_of(s) else 0)
    judge(token_equivalence.check_sampler(sampled, subject.thresholds.sampling), *histories)
    _judge(subject, judge, parts, *histories)
    judge(prompts.check(judge.record, token_equivalence.PROPERTY), *histories)


def _judge(subject: Subject, judge: Judge, parts: list[TokenScores], *histories: History) -> None:
    result = token_equivalence.judge(parts, subject.thresholds.tokens)
    if not parts:
        judge(result, *histories)
    scores = TokenScores.concatenate(parts)
    yardstick = float(np.quantile(scores.hf32_rms, subject.thresholds.tokens.reference_percentile / 100))
    judge.record.series(
        f"{subject.name}: logit row error in units of HuggingFace float32's p99",
        (),
        scores.engine_rms / yardstick,
        "ratio",
        kind="histogram",
        limit=subject.thresholds.tokens.rms_factor,
    )
    judge(result, *histories)


def test_tiny_models(family: Subject, judge: Judge, seed: int) -> None:
    """Each family's models, whose greedy tokens change with any wrong page, position or head, under preemption and
    chunked prefill, with prompts beyond the window and the length that a RoPE scaling starts from.

    Catches: one foreign KV row, one wrong rotary position, a wrong head mapping, a resume from wrong tokens; a sampler
    that ignores seed, temperature or top_p.
    """
    _check(family, judge, seed, PROGRAMS["tiny"])


def test_model_under_test(engine: Subject, judge: Judge, seed: int) -> None:
    """The real weights, real and random prompts, greedy and sampled.

    Catches: the above, and errors of loading, scale or precision.
    """
    _check(engine, judge, seed, PROGRAMS["model"])


def test_weights(engine: Subject, record: Recorder) -> None:
    """The oracle's weights, decoded a second time from the GGUF file by a decoder of the suite's own.

    Catches: a decoding error of transformers or of the gguf package, which the engine may share.
    """
    assert engine.rig.model is not None
    if engine.rig.model.suffix != ".gguf":
        note = "the weights are safetensors: they are stored as they are, and nothing is decoded"
        record.check(CheckResult(Verdict.VALID, token_equivalence.PROPERTY, "weights", note))
        return
    record.check(check_weights(engine.rig.model, engine.oracles[1]))


def test_criterion_power(family: Subject, record: Recorder, seed: int) -> None:
    """Faults planted in a stand-in for the engine, one at a time: the criterion must kill each, and accept it clean.

    Catches: a criterion, or a tiny model, that no longer notices a foreign row or page, a wrong position, head, window,
    rotary factor or expert.
    """
    assert family.rig.model is not None
    built = json.loads((family.rig.model / MANIFEST).read_text(encoding="utf-8"))["sensitivity"]
    for fault, killed in built["killed"].items():
        name = f"{family.name}: {fault}, changed a greedy token, at build"
        record.planted_fault(name, caught=killed, planted=built["probes"])
    _check_power(family, family.name, record, seed)


@pytest.mark.blink_profile("nightly", "full")
def test_criterion_power_on_model_under_test(engine: Subject, record: Recorder, seed: int) -> None:
    """The same faults in the real model.

    Catches: a criterion that is sharp on models built to be sensitive only.
    """
    _check_power(engine, engine.rig.model_name, record, seed)


def _check_power(subject: Subject, name: str, record: Recorder, seed: int) -> None:
    power = measure_power(*subject.oracles, seed, subject.thresholds)
    least = subject.thresholds.tiny_models.min_kill_fraction
    result = check_power(name, power, record, least, token_equivalence.PROPERTY)
    for clean in power.clean:
        record.check(clean)
    record.check(result)


@pytest.mark.capability("http")
def test_from_message_text(engine: Subject, client: openai.OpenAI, record: Recorder, judge: Judge) -> None:
    """Chats by message text through HTTP; the oracle starts from the text and the original file.

    Catches: a chat template or tokeniser that differs, a doubled BOS, text that does not belong to the tokens.
    """
    hf64, hf32 = engine.oracles
    parts: list[TokenScores] = []
    for text in PROMPTS:
        messages = [{"role": "user", "content": text}]
        record.cases()
        start, before = engine.capture_size(), engine.snapshot(log_from=2**63)  # no entries
        answer = client.chat.completions.create(
            model=engine.rig.model_name,
            messages=messages,  # type: ignore[arg-type]
            max_tokens=24,
            temperature=0.0,
        )
        after = engine.snapshot(log_from=int(before.header["log_tail"]))
        prompt = hf32.encode_chat(messages)
        accepts = after.log[after.log["kind"] == LogKind.ACCEPT]
        _equal(record, "requests", len(accepts), 1)
        (accepted,) = accepts
        slot, generation = int(accepted["slot"]), int(accepted["generation"])
        assert answer.usage is not None
        _equal(record, "usage", answer.usage.completion_tokens >= 1, True)
        count = answer.usage.completion_tokens
        known = engine.rig.memory.tokens(slot, len(prompt) + count).tolist()
        emitted = known[len(prompt) :]
        _equal(record, "prompt-ids", known[: len(prompt)], prompt, int(accepted["a"]) == len(prompt))
        _equal(record, "usage", answer.usage.prompt_tokens, len(prompt))
        shown = answer.choices[0].message.content
        _equal(record, "text", shown, hf32.decode(emitted, skip_special_tokens=True))
        rows = _captured(engine, judge, (start, engine.capture_size()))
        found = [rows.get((0, slot, generation, len(prompt) + i)) for i in range(count)]
        _equal(record, "capture", [None if row is None else int(row["token"]) for row in found], emitted)
        logits = np.stack([row["logits"] for row in found if row is not None])
        ids, start = [*prompt, *emitted[:-1]], len(prompt) - 1
        parts.append(
            score_tokens(
                logits=logits,
                hf64=hf64.teacher_force(ids, start=start),
                hf32=hf32.teacher_force(ids, start=start),
                emitted=emitted,
                names=[{"prompt": text[:40], "index": i} for i in range(count)],
            )
        )
    _judge(engine, judge, parts)


def _equal(record: Recorder, clause: str, found: object, expected: object, also: bool = True) -> None:
    ok = found == expected and also
    record.check(
        CheckResult(
            Verdict.VALID if ok else Verdict.INVALID,
            token_equivalence.PROPERTY,
            clause,
            f"{clause}: {found!r}, HuggingFace gives {expected!r}",
        )
    )
