"""What a benchmark of a model measures, and its command line."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from blink_core.model_store import resolve


@dataclass(frozen=True, slots=True)
class Result:
    """One quantity: value in `unit`, the limit it is held against in words, and the samples it is the median of."""

    name: str
    value: float
    unit: str
    target: str = ""
    samples: tuple[float, ...] = ()

    def line(self) -> str:
        count = f"n={len(self.samples)}" if self.samples else ""
        return f"{self.name:<44} {self.value:>9.3f} {self.unit:<4} {self.target:<8} {count}".rstrip()


def command(about: str | None, run: Callable[[Path], list[Result]], arguments: Sequence[str] | None = None) -> None:
    """`--model PATH [--json]`: prints what `run` measures with that model. about: the docstring of its module."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a fetched model's name, a .gguf file, or a folder")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args(arguments)
    results = run(resolve(chosen.model))
    print(json.dumps([asdict(r) for r in results]) if chosen.json else "\n".join(r.line() for r in results))
