"""The criterion of kernels in bfloat16 and float16: as near to the truth as HuggingFace in the same type (design 9).

In these types rounding hides a foreign row, so that tokens decide nothing; float32 does that. What can be asked of a
kernel is that it rounds no worse than others. Row error: RMS over the vocabulary against HuggingFace float64. Clauses:

  error       the engine's error over all rows is at most `rms_ratio` times HuggingFace's own in that type
  worst-row   its worst row is within `worst_row` times the worst of HuggingFace with either attention back end
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from verification.criterion.yardstick import Float
from verification.result import CheckResult, Measurement, Verdict, merge
from verification.thresholds import KernelThresholds

KERNEL_PROPERTY = "token-equivalence"


def judge_kernels(engine: Float, backends: Mapping[str, Float], thresholds: KernelThresholds) -> CheckResult:
    """Decide over row errors [N] of the engine and, on the same rows, of HuggingFace's back ends, the first of which is
    its own as people run it. Unknown for too few rows, or where HuggingFace's own are not finite."""
    names, rows = list(backends), len(engine)
    if any(len(errors) != rows for errors in backends.values()) or not names:
        raise ValueError(f"{rows} rows of the engine, { ({n: len(e) for n, e in backends.items()}) } of HuggingFace")
    if rows < thresholds.min_rows:
        message = f"{rows} rows; {thresholds.min_rows} are needed"
        return CheckResult(Verdict.UNKNOWN, KERNEL_PROPERTY, "rows", message)
    if not all(np.isfinite(errors).all() and (errors > 0).any() for errors in backends.values()):
        return CheckResult(
            Verdict.UNKNOWN, KERNEL_PROPERTY, "oracle", "HuggingFace's own errors are not finite, or none"
        )
    with np.errstate(invalid="ignore", over="ignore"):
        own = float(np.sqrt(np.mean(np.square(backends[names[0]]))))
        ratio = float(np.sqrt(np.mean(np.square(engine)))) / own
        most = max(float(errors.max()) for errors in backends.values())
        worst = float(engine.max()) / most
    listed = ", ".join(names)
    return merge(
        [
            _result(
                "error", ratio, thresholds.rms_ratio, rows,
                f"RMS error over {rows} rows is {ratio:.3f} times HuggingFace's ({names[0]})",
            ),
            _result(
                "worst-row", worst, thresholds.worst_row, rows,
                f"the worst of {rows} rows is {worst:.3f} times the worst of HuggingFace ({listed})",
            ),
        ]
    )  # fmt: skip


def _result(clause: str, value: float, limit: float, rows: int, message: str) -> CheckResult:
    ok = value <= limit  # also not where it is NaN
    measured = {f"kernel_{clause.replace('-', '_')}_ratio": Measurement(value, "ratio", limit, rows)}
    verdict = Verdict.VALID if ok else Verdict.INVALID
    return CheckResult(verdict, KERNEL_PROPERTY, clause, f"{message}, at most {limit:g}", {}, measured)
