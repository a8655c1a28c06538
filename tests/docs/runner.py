"""Runs the code of a guide: fenced blocks, in order, in one folder that is a copy of the sources.

What a block's first line says after the language decides:

  ```console exec            lines with `$ ` are run by bash, the lines below one must be part of what it prints; `...`
                             stands for anything; the exit code must be 0, or N with `exit=N`
  ```python exec             is run by Python and must end well
  ```python file=PATH        is written to PATH
  ```yaml insert=PATH after="TEXT"    is put after the one line of PATH that holds TEXT (`before=` likewise)

Any other block is text. Commands find `blink`, `pytest` and `python` of this environment, and `$MODEL`, a tiny model.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

COMMAND_LIMIT_S = 500
_FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_WORDS = {"exec", "file", "insert", "after", "before", "exit"}


class GuideError(AssertionError):
    """A block of a guide that does not work; the message names guide and line."""


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block. line: of its fence, from 1."""

    guide: Path
    line: int
    language: str
    options: dict[str, str]
    text: str

    def fail(self, why: str) -> GuideError:
        return GuideError(f"{self.guide.name}, line {self.line}: {why}")


def blocks(guide: Path) -> list[Block]:
    """The blocks of a guide that are to be run. GuideError for an option that the runner does not know."""
    content = guide.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(content):
        line = content.count("\n", 0, match.start()) + 1
        options = {}
        for word in shlex.split(match[2]):
            name, _, value = word.partition("=")
            options[name] = value
        block = Block(guide, line, match[1], options, match[3])
        if unknown := sorted(set(options) - _WORDS):
            raise block.fail(f"unknown words after the language: {', '.join(unknown)}")
        if options:
            found.append(block)
    return found


def run_block(block: Block, folder: Path, environment: dict[str, str]) -> None:
    """Runs one block in `folder`. GuideError when it does not do what the guide says."""
    options = block.options
    if "file" in options:
        path = folder / options["file"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text, encoding="utf-8")
    elif "insert" in options:
        _insert(block, folder)
    elif block.language == "python":
        _run(block, ["python", "-c", block.text], folder, environment, block.text, 0)
    elif block.language == "console":
        for command, expected in _commands(block):
            printed = _run(block, ["bash", "-c", command], folder, environment, command, int(options.get("exit", 0)))
            _compare(block, command, expected, printed)
    else:
        raise block.fail(f"a block of {block.language} cannot be run")


def _insert(block: Block, folder: Path) -> None:
    path = folder / block.options["insert"]
    where = "after" if "after" in block.options else "before"
    text = block.options[where]
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    at = [number for number, line in enumerate(lines) if text in line]
    if len(at) != 1:
        raise block.fail(f"{text!r} stands in {len(at)} lines of {block.options['insert']}, it must be one")
    lines.insert(at[0] + (where == "after"), block.text)
    path.write_text("".join(lines), encoding="utf-8")


def _commands(block: Block) -> list[tuple[str, list[str]]]:
    found: list[tuple[str, list[str]]] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        elif found and found[-1][0].endswith("\\"):
            found[-1] = (f"{found[-1][0]}\n{line}", [])
        elif found:
            found[-1][1].append(line)
        else:
            raise block.fail("a console block begins with a command: `$ `")
    return found


def _run(block: Block, command: list[str], folder: Path, environment: dict[str, str], shown: str, code: int) -> str:
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=COMMAND_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise block.fail(f"{shown}\nran for more than {COMMAND_LIMIT_S} s") from error
    printed = done.stdout + done.stderr
    if done.returncode != code:
        raise block.fail(f"{shown}\nended with {done.returncode}, not {code}:\n{printed[-6000:]}")
    return printed


def _compare(block: Block, command: str, expected: list[str], printed: str) -> None:
    """Every expected line must be part of a printed one, in order; `...` in it stands for anything."""
    rest = [" ".join(line.split()) for line in printed.splitlines()]
    for line in expected:
        if line.strip() in ("", "..."):
            continue
        pattern = ".*".join(re.escape(" ".join(part.split())) for part in line.split("..."))
        at = next((number for number, found in enumerate(rest) if re.search(pattern, found)), None)
        if at is None:
            raise block.fail(f"{command}\nprinted no line like {line!r} (in this order):\n{printed[-6000:]}")
        rest = rest[at + 1 :]
