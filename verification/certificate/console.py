"""A finished run on a terminal: table, warnings, reasons, verdict line; or one JSON object."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from verification.certificate import output, report
from verification.certificate.verdict import WORDS, ExitCode


def show_result(built: dict[str, Any], out: Path, as_json: bool) -> None:
    """Prints a report's table, warnings, reasons and verdict line, or one JSON object."""
    verdict = built["verdict"]
    if as_json:
        summary = {
            "verdict": verdict["word"],
            "exit_code": verdict["exit_code"],
            "kind": built["kind"],
            "reasons": verdict["reasons"],
            "properties": {entry["name"]: entry["outcome"] for entry in built["properties"]},
            "counts": built["counts"],
            "warnings": built["warnings"],
            "report": str(out / output.REPORT),
        }
        print(json.dumps(summary, indent=1), flush=True)
        return
    console = Console()
    console.print(summary_table(built))
    for warning in built["warnings"]:
        console.print(f"warning: {warning}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    for reason in verdict["reasons"]:
        console.print(f"- {reason}", markup=False, highlight=False, soft_wrap=True)
    for test in built["tests"]:
        if test["bundle"]:
            console.print(f"bundle: {out / test['bundle']}", markup=False, highlight=False, soft_wrap=True)
            console.print(f"replay: {test['replay']}", markup=False, highlight=False, soft_wrap=True)
    for line in report.known_issue_lines(built):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(built["claim"]["standing"], markup=False, highlight=False, soft_wrap=True)
    print(f"report: {out / output.PAGE}")
    print(f"verdict: {verdict['word']} (exit {verdict['exit_code']})", flush=True)


def show_refusal(reason: str, as_json: bool) -> int:
    """Prints why there is no run, and the verdict line or one JSON object; returns the exit code."""
    code = int(ExitCode.COULD_NOT_RUN)
    if as_json:
        print(
            json.dumps(
                {"verdict": WORDS[ExitCode.COULD_NOT_RUN], "exit_code": code, "reasons": [reason], "report": None}
            )
        )
    else:
        print(f"error: {reason}", file=sys.stderr, flush=True)
        print(f"verdict: {WORDS[ExitCode.COULD_NOT_RUN]} (exit {code})", flush=True)
    return code


def summary_table(built: dict[str, Any]) -> Table:
    """The properties of a report as a table for a terminal."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for header in ("property", "outcome", "passed", "n", "failed", "95 % bounds", "time"):
        table.add_column(header, no_wrap=True)
    styles = {"passed": "green", "product_failure": "bold red"}
    for entry in built["properties"]:
        interval = entry["failure_rate_interval"]
        table.add_row(
            entry["name"],
            f"[{styles.get(entry['outcome'], 'yellow')}]{entry['outcome'].replace('_', ' ')}[/]",
            f"{entry['passed']}/{entry['tests']}",
            str(entry["cases"]),
            str(entry["failures"]),
            "" if interval is None else f"{interval[0]:.2g}..{interval[1]:.2g}",
            f"{entry['duration_s']:.1f} s",
        )
    return table
