"""Every emitted token against HuggingFace, by the float32 criterion."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from blink_core.abi.dtypes import Array
from blink_core.abi.enums import LogKind
from verification.certificate.recorder import Recorder
from verification.criterion import TokenScores, judge_tokens, score_tokens
from verification.fixtures import PROMPTS, Subject
from verification.oracles.gguf_decode import check_weights
from verification.properties import token_equivalence
from verification.result import CheckResult, Verdict

if TYPE_CHECKING:
    import openai

pytestmark = [pytest.mark.blink_property("token-equivalence"), pytest.mark.capability("cpu", "shared-memory", "oracle")]

PROGRAMS = {"model": 3, "tiny": 4}


def _capture(subject: Subject) -> dict[tuple[int, int, int, int], Array]:
    descriptor = subject.rig.descriptor
    assert descriptor.capture is not None
    return token_equivalence.captured(Path(descriptor.capture), descriptor.config.vocab)


def _check(subject: Subject, record: Recorder, seed: int, programs: int) -> None:
    histories = [subject.run(program) for program in subject.draw(seed, programs)]
    rows = _capture(subject)
    parts: list[TokenScores] = []
    for history in histories:
        record.check(token_equivalence.check_capture(history, rows))
        parts += token_equivalence.score(history, rows, *subject.oracles)
    _judge(subject, record, TokenScores.concatenate(parts))


def _judge(subject: Subject, record: Recorder, scores: TokenScores) -> None:
    yardstick = float(np.quantile(scores.hf32_rms, subject.thresholds.tokens.reference_percentile / 100))
    record.series(
        f"{subject.name}: logit row error in units of HuggingFace float32's p99",
        (),
        scores.engine_rms / yardstick,
        "ratio",
        kind="histogram",
        limit=subject.thresholds.tokens.rms_factor,
    )
    record.check(judge_tokens(scores, subject.thresholds.tokens))


def test_tiny_models(tiny: Subject, record: Recorder, seed: int) -> None:
    """Models whose greedy tokens change with any wrong page, position or head, under preemption and chunked prefill.

    Catches: one foreign KV row, one wrong rotary position, a wrong head mapping, a resume from wrong tokens.
    """
    _check(tiny, record, seed, PROGRAMS["tiny"])


def test_model_under_test(engine: Subject, record: Recorder, seed: int) -> None:
    """The real weights, real and random prompts, greedy and sampled.

    Catches: the above, and errors of loading, scale or precision.
    """
    _check(engine, record, seed, PROGRAMS["model"])


def test_weights(engine: Subject, record: Recorder) -> None:
    """The oracle's weights, decoded a second time from the GGUF file by a decoder of the suite's own.

    Catches: a decoding error of transformers or of the gguf package, which the engine may share.
    """
    assert engine.rig.model is not None
    if engine.rig.model.suffix != ".gguf":
        pytest.skip("the model is not a GGUF file: nothing is decoded")
    record.check(check_weights(engine.rig.model, engine.oracles[1]))


@pytest.mark.capability("http")
def test_from_message_text(engine: Subject, client: openai.OpenAI, record: Recorder) -> None:
    """Chats by message text through HTTP; the oracle starts from the text and the original file.

    Catches: a chat template or tokeniser that differs, a doubled BOS, text that does not belong to the tokens.
    """
    hf64, hf32 = engine.oracles
    parts: list[TokenScores] = []
    for text in PROMPTS:
        messages = [{"role": "user", "content": text}]
        before = engine.snapshot()
        answer = client.chat.completions.create(
            model=engine.rig.model_name,
            messages=messages,  # type: ignore[arg-type]
            max_tokens=24,
            temperature=0.0,
        )
        after = engine.snapshot()
        prompt = hf32.encode_chat(messages)
        new = after.log[max(0, int(before.header["log_tail"]) - after.log_lost) :]
        (accepted,) = new[new["kind"] == LogKind.ACCEPT]
        slot, generation = int(accepted["slot"]), int(accepted["generation"])
        assert answer.usage is not None
        count = answer.usage.completion_tokens
        known = engine.rig.memory.tokens(slot, len(prompt) + count).tolist()
        emitted = known[len(prompt) :]
        _equal(record, "prompt-ids", known[: len(prompt)], prompt, int(accepted["a"]) == len(prompt))
        _equal(record, "usage", answer.usage.prompt_tokens, len(prompt))
        shown = answer.choices[0].message.content
        _equal(record, "text", shown, hf32.decode(emitted, skip_special_tokens=True))
        rows = _capture(engine)
        logits = np.stack([rows[0, slot, generation, len(prompt) + i]["logits"] for i in range(count)])
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
    scores = TokenScores.concatenate(parts)
    _judge(engine, record, scores)


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
