"""What changes a row's logits before its token is chosen: bias, mask, barred ids and penalties (design section 7).

Order: logit bias, grammar mask and ids barred by min_tokens, repetition penalty, presence and frequency penalty.
Everything is float64 over one row. Ids outside the vocabulary are ignored: a request that is cancelled while its step
runs may show its successor's values, and its result is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
U32 = npt.NDArray[np.uint32]

NO_IDS: I32 = np.zeros(0, np.int32)
NO_VALUES: F32 = np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """How one row's token is chosen. Field meanings are those of `abi.params.SamplingParams`.

    position: of the new token in its sequence. prompt, output: int32 [N], tokens known, in order; needed only with
    penalties. bias_ids int32 [B], bias float32 [B]. barred: int32 [N], ids that may not be chosen (before min_tokens).
    mask: uint32 [ceil(V / 32)], bit i % 32 of word i // 32 allows id i; None allows all. logprobs: alternatives wanted.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0
    position: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    prompt: I32 = field(default_factory=lambda: NO_IDS)
    output: I32 = field(default_factory=lambda: NO_IDS)
    bias_ids: I32 = field(default_factory=lambda: NO_IDS)
    bias: F32 = field(default_factory=lambda: NO_VALUES)
    barred: I32 = field(default_factory=lambda: NO_IDS)
    mask: U32 | None = None
    logprobs: int = 0

    @property
    def penalised(self) -> bool:
        """Whether tokens already there count."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def plain(self) -> bool:
        """Whether the logits are used as they are."""
        return not (self.penalised or self.bias_ids.size or self.barred.size or self.mask is not None)

    def usable(self) -> bool:
        """Whether every parameter is in its range, NaN excluded. The scheduler admits no other request."""
        finite = all(abs(x) < np.inf for x in (self.presence_penalty, self.frequency_penalty))
        return (
            0.0 <= self.temperature < np.inf
            and 0.0 < self.top_p <= 1.0
            and 0.0 <= self.min_p <= 1.0
            and 0.0 < self.repetition_penalty < np.inf
            and finite
            and bool(np.isfinite(self.bias).all())
        )


def processed(logits: F32, row: SamplingRow) -> F64:
    """A new float64 [V]: `logits` float32 [V] after bias, mask, barred ids and penalties."""
    values = logits.astype(np.float64)
    size = values.shape[0]
    if row.bias_ids.size:
        inside = _inside(row.bias_ids, size)
        np.add.at(values, row.bias_ids[inside], row.bias[inside].astype(np.float64))
    if row.mask is not None:
        values[~allowed(row.mask, size)] = -np.inf
    if row.barred.size:
        values[row.barred[_inside(row.barred, size)]] = -np.inf
    if row.penalised:
        _penalise(values, row)
    return values


def allowed(mask: U32, size: int) -> npt.NDArray[np.bool_]:
    """Bits 0 to size - 1 of a mask as bool [size]. Ids beyond the mask's words are not allowed."""
    bits = np.unpackbits(np.ascontiguousarray(mask, "<u4").view(np.uint8), bitorder="little", count=size)
    return bits.view(np.bool_)


def _inside(ids: I32, size: int) -> npt.NDArray[np.bool_]:
    return (ids >= 0) & (ids < size)


def _penalise(values: F64, row: SamplingRow) -> None:
    """Repetition (Keskar et al., "CTRL", 2019, section 4.1) over prompt and output, as HuggingFace and vLLM apply it;
    then the OpenAI API's presence and frequency penalties over the output."""
    size = values.shape[0]
    if row.repetition_penalty != 1.0:
        seen = np.concatenate((row.prompt, row.output))
        seen = seen[_inside(seen, size)]
        old = values[seen]  # an id that occurs twice is read twice before it is written: it counts once
        values[seen] = np.where(old > 0, old / row.repetition_penalty, old * row.repetition_penalty)
    if row.presence_penalty != 0.0 or row.frequency_penalty != 0.0:
        ids, counts = np.unique(row.output[_inside(row.output, size)], return_counts=True)
        values[ids] -= row.frequency_penalty * counts + row.presence_penalty
