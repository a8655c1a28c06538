"""The self-contained HTML page of a report: no request leaves it, everything in it is escaped."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from verification.certificate import plots
from verification.certificate.outcomes import MEANINGS, Outcome

_MAX_PLOTS = 40


def _template() -> jinja2.Template:
    folder = resources.files("verification") / "certificate" / "templates"
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters["figure"] = _figure
    environment.filters["words"] = lambda text: str(text).replace("_", " ")
    environment.filters["pretty"] = lambda value: json.dumps(value, indent=1, ensure_ascii=False)
    return environment.from_string((folder / "report.html.j2").read_text(encoding="utf-8"))


def _figure(value: Any) -> str:
    """A number to four significant digits, anything else as it is."""
    if isinstance(value, bool) or value is None:
        return "" if value is None else str(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _limited(report: dict[str, Any]) -> list[tuple[str, float, float]]:
    """Measurements that have a limit, as (name, used, allowed); for a least value the two change places."""
    rows = []
    for test in report["tests"]:
        for name, entry in test["measurements"].items():
            if isinstance(entry["value"], (int, float)) and isinstance(entry["limit"], (int, float)):
                pair = (float(entry["value"]), float(entry["limit"]))
                used, allowed = pair if entry["limit_is"] == "max" else pair[::-1]
                rows.append((f"{test['id']}: {name}", used, allowed))
    return rows


def render(report: dict[str, Any], files: list[str]) -> str:
    """Render a validated report as one HTML page; `files` are the names of the files that lie beside it."""
    series = [(test["id"], one) for test in report["tests"] for one in test["series"]]
    figures = []
    for index, (test_id, one) in enumerate(series[:_MAX_PLOTS]):
        svg = plots.series_plot(one, index)
        if svg:
            figures.append({"test": test_id, "series": one, "svg": Markup(svg)})
    return _template().render(
        report=report,
        files=files,
        figures=figures,
        plots_left_out=max(0, len(series) - _MAX_PLOTS),
        outcome_bar=Markup(plots.outcome_bar(report["counts"])),
        margins=Markup(plots.measurement_bars(_limited(report)[:_MAX_PLOTS])),
        colours=plots.OUTCOME_COLOURS,
        meanings={str(outcome): MEANINGS[outcome] for outcome in Outcome},
    )
