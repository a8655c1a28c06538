"""The float32 criterion: are these logits, tokens and KV rows those of the model, up to float32 rounding?

Pure functions over arrays (design section 9, "Token equivalence"). The reference is HuggingFace in float64; the
yardstick is HuggingFace's own float32 error against that reference on the same rows, so that no tolerance is invented.
``score_*`` reduces arrays of one request to a few numbers a row, ``judge_*`` decides over the pooled rows of a run.
"""

from verification.criterion.kv import KV_PROPERTY, KVScores, check_kv, judge_kv, score_kv
from verification.criterion.tokens import (
    TOKEN_PROPERTY,
    Divergence,
    TokenScores,
    check_tokens,
    judge_tokens,
    score_tokens,
)
from verification.criterion.yardstick import Yardstick, clopper_pearson, measure_yardstick, row_rms

__all__ = [
    "KV_PROPERTY",
    "TOKEN_PROPERTY",
    "Divergence",
    "KVScores",
    "TokenScores",
    "Yardstick",
    "check_kv",
    "check_tokens",
    "clopper_pearson",
    "judge_kv",
    "judge_tokens",
    "measure_yardstick",
    "row_rms",
    "score_kv",
    "score_tokens",
]
