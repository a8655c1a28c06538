"""Plots of the HTML report, as inline SVG that follows the page's colours."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from verification.certificate.outcomes import Outcome

# Drawn in a colour that nothing else uses and exchanged for `currentColor`, so that text follows dark and light.
_INK = "#010203"
_LINE = "#3b7dd8"
_LIMIT = "#d1495b"
OUTCOME_COLOURS: dict[str, str] = {
    Outcome.PASSED: "#2e8b57",
    Outcome.PRODUCT_FAILURE: "#c0392b",
    Outcome.INFRASTRUCTURE: "#d35400",
    Outcome.TEST_DEFECT: "#8e44ad",
    Outcome.UNKNOWN: "#b7950b",
    Outcome.BLOCKED: "#7f6a4d",
    Outcome.FILTERED: "#8a97a6",
    Outcome.SKIPPED: "#a9b4c0",
    Outcome.MISSING: "#5d6d7e",
}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.unicode_minus": False,
}


def _plain(text: str) -> str:
    """Text in which matplotlib sees no mathematics."""
    return text.replace("\\", "\\\\").replace("$", r"\$") if "$" in text else text


def _svg(figure: Figure, prefix: str, label: str) -> str:
    """SVG of a figure, without prologue; ids carry `prefix`, because ids are shared by the whole page."""
    buffer = io.StringIO()
    figure.savefig(
        buffer, format="svg", transparent=True, bbox_inches="tight", metadata={"Date": None, "Creator": None}
    )
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r"url\(#", f"url(#{prefix}-", text)
    text = re.sub(r'href="#', f'href="#{prefix}-', text)
    text = text.replace(_INK, "currentColor")
    return text.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)


def _finite(values: Sequence[Any]) -> list[float]:
    return [float(value) for value in values if not isinstance(value, str) and math.isfinite(value)]


def outcome_bar(counts: dict[str, int]) -> str:
    """One bar that shows how many tests ended how."""
    with mpl.rc_context(_STYLE | {"svg.hashsalt": "outcomes"}):
        figure = Figure(figsize=(7.5, 0.55))
        axes = figure.add_subplot()
        left = 0
        for outcome, count in counts.items():
            if count:
                axes.barh(0, count, left=left, color=OUTCOME_COLOURS[outcome], edgecolor="none")
                axes.text(left + count / 2, 0, str(count), ha="center", va="center", color="#ffffff", fontweight="bold")
                left += count
        axes.set_axis_off()
        axes.set_xlim(0, max(1, left))
        return _svg(figure, "outcomes", "number of tests by outcome")


def measurement_bars(rows: Sequence[tuple[str, float, float]]) -> str:
    """Value over limit, for rows of (name, value, limit), on a log scale; 1 is the limit."""
    ratios = [(name, value / limit) for name, value, limit in rows if limit > 0 and value >= 0]
    if not ratios:
        return ""
    with mpl.rc_context(_STYLE | {"svg.hashsalt": "margins"}):
        figure = Figure(figsize=(7.5, 0.6 + 0.24 * len(ratios)))
        axes = figure.add_subplot()
        floor = min([ratio for _, ratio in ratios if ratio > 0] + [1.0]) / 3
        shown = [max(ratio, floor) for _, ratio in ratios]
        colours = [_LINE if ratio <= 1 else _LIMIT for _, ratio in ratios]
        axes.barh(range(len(ratios)), shown, color=colours)
        axes.set_yticks(range(len(ratios)), [_plain(name) for name, _ in ratios])
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.axvline(1.0, color=_LIMIT, linewidth=1.2)
        axes.set_xlabel("measured / limit, or its inverse for a least value (the line is the limit)")
        return _svg(figure, "margins", "measured values as a fraction of their limits")


def series_plot(series: dict[str, Any], index: int) -> str:
    """Plot one recorded series; an empty string when it has no finite point."""
    pairs = (
        [(0.0, value) for value in _finite(series["y"])]
        if series["kind"] == "histogram"
        else [
            (float(x), float(y)) for x, y in zip(series["x"], series["y"], strict=True) if _finite([x]) and _finite([y])
        ]
    )
    if not pairs:
        return ""
    with mpl.rc_context(_STYLE | {"svg.hashsalt": f"series{index}"}):
        figure = Figure(figsize=(3.6, 2.3))
        axes = figure.add_subplot()
        _draw(axes, series, [x for x, _ in pairs], [y for _, y in pairs])
        axes.set_title(_plain(series["name"]), fontsize=9)
        return _svg(figure, f"series{index}", "plot of a recorded series")


def _draw(axes: Axes, series: dict[str, Any], x: list[float], y: list[float]) -> None:
    limit = next(iter(_finite([series["limit"]])), None) if series["limit"] is not None else None
    unit = _plain(series["unit"])
    if series["kind"] == "histogram":
        spread = min(y) > 0 and max(y) > 50 * min(y)
        if spread:
            low, high = math.log10(min(y)), math.log10(max(y))
            edges = [10 ** (low + (high - low) * step / 30) for step in range(31)]
            edges[0], edges[-1] = min(y), max(y)
            axes.hist(y, bins=edges, color=_LINE)
            axes.set_xscale("log")
        else:
            axes.hist(y, bins=30, color=_LINE)
        if limit is not None:
            axes.axvline(limit, color=_LIMIT, linewidth=1.2)
        axes.set_xlabel(unit)
        axes.set_ylabel("count")
        return
    if series["kind"] == "bars":
        axes.bar(x, y, color=_LINE)
    elif series["kind"] == "steps":
        axes.step(x, y, where="post", color=_LINE, linewidth=1.1)
    else:
        axes.plot(x, y, color=_LINE, linewidth=1.1)
    if limit is not None:
        axes.axhline(limit, color=_LIMIT, linewidth=1.2)
    axes.set_xlabel(_plain(series["x_label"]))
    axes.set_ylabel(unit)
