"""Signatures of failures: equal for one fault in any run, different for different faults as far as words tell.

A signature is made of property, clause, outcome and the message with everything that varies between runs (numbers,
addresses, texts, paths, ids) taken out. It holds no time, no seed and no test: one fault seen by two tests is one.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

_ID_CHARS = 12
_MAX_PATTERN = 240

_DIED = re.compile(r"\b(exited with status|exit status) (-?\d+)")
# The last line of a traceback, or what the kernel and faulthandler say; within the tail of a process's log.
_CAUSE = re.compile(r"^\s*(?:[\w.]+: )*((?:[A-Za-z_][\w.]*(?:Error|Exception|Fault|Failure)|Fatal Python error)\b.*)$")
_PREFIX = re.compile(r"^[\d-]+ [\d:,.]+ [A-Z]+ [\w.]+: ")
_STEPS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\((?:\d+|<n>) of (?:\d+|<n>) checks \w+\)$"), ""),  # how many more of the same kind: chance, not kind
    (re.compile(r"<(?:text of|token:|\d+ numbers)[^>]*>"), "S"),
    (re.compile(r"""(?<!\w)[bru]{0,2}(['"])(?:\\.|(?!\1)[^\\])*\1(?!\w)""", re.DOTALL), "S"),
    (re.compile(r"(?<![\w/])(?:~|\.{0,2})(?:/[\w.@+-]+)+/?"), "P"),
    (re.compile(r"\b0x[0-9a-fA-F]+\b"), "N"),
    (re.compile(r"\b[0-9a-f]{8}-?(?:[0-9a-f]{4}-?){3}[0-9a-f]{12}\b|\b[0-9a-f]{16,64}\b"), "H"),
    (re.compile(r"<n>|(?<![A-Za-z_0-9.])[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?|\b(?:nan|[+-]?inf)\b"), "N"),
    (re.compile(r"[\[({][\sNS,:HP\[\](){}]*[\])}]"), "L"),
    (re.compile(r"\b([NSLHP])(?:(?:,| and| to|;) \1)+\b"), r"\1"),
    (re.compile(r"\b(N \w+?)s\b"), r"\1"),  # "1 page" and "2 pages"
    (re.compile(r"\s+"), " "),
)


@dataclass(frozen=True, slots=True)
class Signature:
    """id: short hash, for machines. pattern: the message it was made of, for people and for known issues."""

    id: str
    pattern: str


def normalise(message: str) -> str:
    """The first line of a message without what varies; of a dead process also its exit status and last error."""
    lines = message.strip().splitlines() or [""]
    text = _vary(lines[0])
    died = _DIED.findall(lines[0])
    for words, status in died:  # a segmentation fault is not an exit 1
        text = text.replace(f"{words} N", f"{words} {status}", 1)
    cause = next((found for line in reversed(lines[1:]) if (found := _CAUSE.match(_PREFIX.sub("", line)))), None)
    if died and cause is not None:
        text += f"; {_vary(cause.group(1))}"
    return text[:_MAX_PATTERN]


def _vary(text: str) -> str:
    for pattern, replacement in _STEPS:
        text = pattern.sub(replacement, text)
    return text.strip()


def signature(outcome: str, property: str | None, clause: str, message: str, *, where: str = "") -> Signature:
    """The signature of one failure.

    outcome: "product_failure", "unknown" ... clause: of the check that decided, "" for a bare exception. message: its
    message; a bare exception's starts with its type. where: function in which a bare exception was raised.
    """
    pattern = normalise(message) + (f" @ {where}" if where else "")
    digest = hashlib.sha256("\0".join([outcome, property or "", clause, pattern]).encode("utf-8")).hexdigest()
    return Signature(digest[:_ID_CHARS], pattern)
