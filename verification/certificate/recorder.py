"""What a test hands to the report beside its outcome: measurements, series for plots, situations, planted faults.

A test gets a `Recorder` from the pytest fixture `record`. It holds plain values only and is read once, after the test's
teardown.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from verification.certificate.jsonable import bounded, jsonable, number
from verification.certificate.outcomes import enforce
from verification.result import LimitSense

if TYPE_CHECKING:
    from verification.result import CheckResult

MAX_SERIES_POINTS = 2000
SeriesKind = Literal["line", "steps", "bars", "histogram"]
_KINDS = ("line", "steps", "bars", "histogram")


class Recorder:
    """Collects what one test measured. Every method may be called any number of times, also before a failure."""

    def __init__(self) -> None:
        self._measurements: dict[str, dict[str, Any]] = {}
        self._series: dict[str, dict[str, Any]] = {}
        self._situations: dict[str, int] = {}
        self._planted: dict[str, dict[str, int]] = {}
        self._cases = 0
        self._clauses: list[str] = []
        self._check: dict[str, Any] | None = None

    def measure(
        self,
        name: str,
        value: float,
        unit: str = "",
        *,
        limit: float | None = None,
        limit_is: LimitSense = "max",
        n: int | None = None,
    ) -> None:
        """Record a measured value, with its unit, the limit it is held to and the number of samples behind it.

        `limit_is` says whether the limit is the most or the least allowed. A name that comes again keeps the value that
        is closer to, or further beyond, its limit; without a limit the last one. Recording decides nothing: the check
        that uses the limit is the test's. Raises `ValueError` for a negative n.
        """
        if n is not None and n < 0:
            raise ValueError(f"measurement {name!r}: n is {n}, it must not be negative (None when it does not apply)")
        known = self._measurements.get(name)
        if limit is not None and known is not None and known["limit_is"] == limit_is:
            old = float(known["value"])  # "nan" and "inf" read back as themselves
            kept_is_worse = old >= value if limit_is == "max" else old <= value
            if math.isnan(old) or kept_is_worse:
                return
        self._measurements[name] = {
            "value": number(float(value)),
            "unit": unit,
            "limit": None if limit is None else number(float(limit)),
            "limit_is": None if limit is None else limit_is,
            "n": n,
        }

    def series(
        self,
        name: str,
        x: Iterable[float],
        y: Iterable[float],
        unit: str = "",
        *,
        x_label: str = "",
        kind: SeriesKind = "line",
        limit: float | None = None,
    ) -> None:
        """Record a series that the HTML report plots.

        Args:
            name: title of the plot; the same name again replaces the series.
            x: abscissae, as many as `y`; ignored (pass `()`) for kind "histogram".
            y: ordinates, or for "histogram" the samples.
            unit: unit of `y`.
            x_label: what `x` counts, with its unit.
            kind: "line", "steps", "bars" or "histogram".
            limit: drawn as a line, when given.

        At most `MAX_SERIES_POINTS` points are kept, evenly thinned; the full number is recorded beside them.
        """
        if kind not in _KINDS:
            raise ValueError(f"series {name!r}: kind is {kind!r}, it must be one of {', '.join(_KINDS)}")
        ys = [float(value) for value in y]
        xs = [] if kind == "histogram" else [float(value) for value in x]
        if kind != "histogram" and len(xs) != len(ys):
            raise ValueError(f"series {name!r}: {len(xs)} x values for {len(ys)} y values")
        stride = max(1, -(-len(ys) // MAX_SERIES_POINTS))
        self._series[name] = {
            "x": [number(value) for value in xs[::stride]],
            "y": [number(value) for value in ys[::stride]],
            "unit": unit,
            "x_label": x_label,
            "kind": kind,
            "limit": None if limit is None else number(float(limit)),
            "points": len(ys),
        }

    def situation(self, name: str, reached: bool | int) -> None:
        """Record how often a situation that should occur did, or whether it did; once reached it stays so.

        What event logs show is recorded by the plugin (`verification.situations`); this is for what they cannot show.
        """
        self._situations[name] = self._situations.get(name, 0) + int(reached)

    def planted_fault(self, name: str, *, caught: int, planted: int) -> None:
        """Record how many of the faults planted in this test the checker caught."""
        if not 0 <= caught <= planted or planted == 0:
            raise ValueError(f"planted fault {name!r}: {caught} caught of {planted} planted")
        total = self._planted.setdefault(name, {"caught": 0, "planted": 0})
        total["caught"] += caught
        total["planted"] += planted

    def cases(self, n: int = 1) -> None:
        """Count `n` more programs that this test drew, ran and checked, each different; the report's bounds use them.

        A check is no case: many checks of one program are one draw.
        """
        if n < 0:
            raise ValueError(f"cases: {n} is negative")
        self._cases += n

    def check(self, result: CheckResult) -> CheckResult:
        """Record a check's result with its measurements and enforce it.

        Returns the result when it is valid; raises `PropertyViolation` or `PropertyUnknown` otherwise.
        """
        self.take(result)
        return enforce(result)

    def take(self, result: CheckResult) -> None:
        """Record clause, message, witness and measurements of a result without enforcing it."""
        clause = str(result.clause)
        if clause and clause not in self._clauses:
            self._clauses.append(clause)
        for name, measurement in result.measurements.items():
            self.measure(
                name,
                measurement.value,
                measurement.unit,
                limit=measurement.limit,
                limit_is=measurement.limit_is,
                n=measurement.n,
            )
        self._check = {
            "verdict": str(result.verdict).lower(),
            "property": result.property,
            "clause": clause,
            "message": result.message,
            "witness": bounded(result.witness),
        }

    def as_dict(self) -> dict[str, Any]:
        """Everything recorded, as JSON values."""
        failed = self._check is not None and self._check["verdict"] != "valid"
        return {
            "measurements": dict(self._measurements),
            "series": [{"name": name, **series} for name, series in self._series.items()],
            "situations": dict(self._situations),
            "planted_faults": [{"name": name, **counts} for name, counts in self._planted.items()],
            "cases": self._cases,
            "clause": self._check["clause"] if failed and self._check else "; ".join(self._clauses),
            "witness": jsonable(self._check["witness"]) if failed and self._check else None,
        }
