"""Weaves faults into a copy of the scheduler's C++ and builds one native module that holds them all (mutant schemata).

An `expression` becomes `(mutant_is(id) ? (new) : (old))`, a `statement` `if (mutant_is(id)) { new } else { old }`.
Faults whose texts lie inside each other are nested; texts that overlap otherwise are refused. Which fault is on is one
number, set by `activate_mutant(id)` of the built module; 0 is the product as it ships. The product's own sources hold
nothing of this: the release build compiles them as they are (Untch, Offutt and Harrold, ISSTA 1993).
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from filelock import FileLock

from verification.mutants.model import PRODUCT, Mutant, RegistryError, Span, load

FOLDERS = ("blink_core/device", "blink_core/runtime/native")
BUILD_TIMEOUT_S = 600
_GUARD = "mutant.hpp"
_ENTRY = "NB_MODULE(_native, m) {"
_HEADER = """// Written by the weaver: which fault is on. Only in the mutant build.
#pragma once
#include <cstdint>

namespace blink {
inline uint32_t active_mutant = 0;
inline bool mutant_is(uint32_t id) { return active_mutant == id; }
}  // namespace blink
"""


class WeaveError(RegistryError):
    """Faults that cannot be woven together; the message names both."""


class BuildFailed(RuntimeError):
    """CMake or the compiler failed, or there is nothing to build from; the message says what was printed last."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One text of one file and what stands there instead when `identity` is active (1, 2, ...)."""

    identity: int
    name: str
    file: str
    span: Span
    kind: Literal["expression", "statement"]


@dataclass(frozen=True, slots=True)
class Rendered:
    """A woven text, and where in it each fault's own text and all that it guards stands: [start, end) by identity."""

    text: str
    places: dict[int, tuple[int, int]]
    guarded: dict[int, tuple[int, int]]


@dataclass(slots=True)
class _Node:
    start: int
    end: int
    faults: list[Fault] = field(default_factory=list)
    inner: list[_Node] = field(default_factory=list)


def number(mutants: Iterable[Mutant], first: int = 1) -> list[Fault]:
    """Native mutants as faults, numbered in order of their names. Raises RegistryError for one that is outdated."""
    faults = []
    chosen = sorted((m for m in mutants if m.where == "native"), key=lambda m: m.name)
    sources = {file: (PRODUCT / file).read_text(encoding="utf-8") for file in {m.file for m in chosen}}
    for identity, mutant in enumerate(chosen, first):
        assert mutant.kind is not None  # validated by Mutant
        span = mutant.locate(sources[mutant.file])
        faults.append(Fault(identity, mutant.name, mutant.file, span, mutant.kind))
    return faults


def render(source: str, faults: Sequence[Fault]) -> Rendered:
    """The text with all faults guarded. Raises WeaveError for texts that overlap without lying inside each other."""
    root = _Node(0, len(source))
    path = [root]
    for fault in sorted(faults, key=lambda f: (f.span.start, -f.span.end, f.identity)):
        while fault.span.start >= path[-1].end and path[-1] is not root:
            path.pop()
        above = path[-1]
        if fault.span.end > above.end:
            raise WeaveError(f"{fault.file}: {fault.name} overlaps {above.faults[0].name}, and neither holds the other")
        if above is not root and (fault.span.start, fault.span.end) == (above.start, above.end):
            above.faults.append(fault)
            continue
        node = _Node(fault.span.start, fault.span.end, [fault])
        above.inner.append(node)
        path.append(node)
    pieces: list[str] = []
    rendered = Rendered("", {}, {})
    _write(source, root, pieces, rendered, 0)
    return Rendered("".join(pieces), rendered.places, rendered.guarded)


def _write(source: str, node: _Node, out: list[str], to: Rendered, at: int) -> int:
    """Appends the text of a node to `out`, which holds `at` characters; returns how many it then holds."""
    first = at

    def put(text: str) -> None:
        nonlocal at
        out.append(text)
        at += len(text)

    closing: list[str] = []
    for fault in node.faults:
        if fault.kind == "expression":
            put(f"(mutant_is({fault.identity}) ? (")
        else:
            put(f"if (mutant_is({fault.identity})) {{ ")
        begin = at
        put(fault.span.new)
        to.places[fault.identity] = begin, at
        put(") : (" if fault.kind == "expression" else "\n} else { ")
        closing.append("))" if fault.kind == "expression" else "\n}")
    position = node.start
    for inner in node.inner:
        put(source[position : inner.start])
        at = _write(source, inner, out, to, at)
        position = inner.end
    put(source[position : node.end])
    for text in reversed(closing):
        put(text)
    to.guarded.update((fault.identity, (first, at)) for fault in node.faults)
    return at


def sources() -> list[Path]:
    """The C++ that the native module is made from. Raises BuildFailed where an install has left it out."""
    found = [path for folder in FOLDERS for path in sorted((PRODUCT / folder).glob("*.[ch]pp"))]
    if not any(path.name == "module.cpp" for path in found) or not (PRODUCT / "CMakeLists.txt").is_file():
        raise BuildFailed(f"{PRODUCT} holds no CMakeLists.txt and module.cpp: mutants are built in a clone of Blink")
    return found


def write(faults: Sequence[Fault], folder: Path) -> dict[str, Rendered]:
    """Writes the woven copy below `folder`; returns what was woven, by file. Unchanged files keep their time."""
    woven: dict[str, Rendered] = {}
    for path in sources():
        file = path.relative_to(PRODUCT).as_posix()
        text = path.read_text(encoding="utf-8")
        mine = [fault for fault in faults if fault.file == file]
        if mine:
            woven[file] = render(text, mine)
            text = _guarded(woven[file].text)
        if path.name == "module.cpp":
            text = _with_switch(text, len(faults))
        _put(folder / file, text)
    _put(folder / FOLDERS[0] / _GUARD, _HEADER)
    return woven


def _guarded(text: str) -> str:
    return text.replace("#pragma once\n", f'#pragma once\n#include "{_GUARD}"\n', 1)


def _with_switch(text: str, count: int) -> str:
    if text.count(_ENTRY) != 1:
        raise WeaveError(f"module.cpp: {_ENTRY!r} does not stand there once")
    switch = (
        f'{_ENTRY}\n  m.attr("mutants") = {count};\n'
        '  m.def("activate_mutant", [](uint32_t id) { blink::active_mutant = id; }, nb::arg("id"));'
    )
    return f'#include "{_GUARD}"\n' + text.replace(_ENTRY, switch)


def _put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Woven:
    """A built module and the number of each fault in it, by name."""

    path: Path
    identities: dict[str, int]


def digest(faults: Sequence[Fault]) -> str:
    """Of all that a woven module is made from: sources, faults, interpreter."""
    total = hashlib.sha256(sys.version.encode())
    for path in [PRODUCT / "CMakeLists.txt", *sources()]:
        total.update(path.read_bytes())
    for f in faults:
        total.update(repr((f.identity, f.name, f.file, f.span.start, f.span.end, f.span.new, f.kind)).encode())
    return total.hexdigest()


def build(faults: Sequence[Fault] | None = None, folder: Path | None = None) -> Woven:
    """Builds the module with these faults (None: all named native mutants), or takes the one that is built already.

    folder: where it is built (None: `build/mutants` of the clone). Two callers at once build once. Raises BuildFailed
    with the end of the compiler's output, RegistryError for faults that are outdated or overlap.
    """
    faults = number(load()) if faults is None else faults
    folder = folder or PRODUCT / "build" / "mutants"
    folder.mkdir(parents=True, exist_ok=True)
    module = folder / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    stamp, wanted = folder / "digest", digest(faults)
    with FileLock(folder / "lock", timeout=BUILD_TIMEOUT_S):
        if not (module.exists() and stamp.exists() and stamp.read_text() == wanted):
            stamp.unlink(missing_ok=True)
            write(faults, folder / "woven")
            compile_module(folder, f"-DBLINK_SOURCES={folder / 'woven' / 'blink_core'}")
            stamp.write_text(wanted)
    return Woven(module, {fault.name: fault.identity for fault in faults})


def compile_module(folder: Path, *options: str) -> None:
    """Configures and builds in `folder` with CMake and Ninja. Raises BuildFailed."""
    try:
        import ninja
    except ImportError as error:
        raise BuildFailed("building needs cmake and ninja: `make install-dev` brings them") from error
    tool = f"-DCMAKE_MAKE_PROGRAM={Path(ninja.BIN_DIR) / 'ninja'}"
    here = ("-S", str(PRODUCT), "-B", str(folder), "-G", "Ninja", tool, f"-DPython_EXECUTABLE={sys.executable}")
    run(sys.executable, "-m", "cmake", *here, "-DCMAKE_BUILD_TYPE=Release", *options)
    run(sys.executable, "-m", "cmake", "--build", str(folder))


def run(*command: str) -> str:
    """Output of a command. Raises BuildFailed with the end of it, also past `BUILD_TIMEOUT_S`."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False, cwd=PRODUCT
        )
    except subprocess.TimeoutExpired as error:
        raise BuildFailed(f"{' '.join(command)}\nran for more than {BUILD_TIMEOUT_S} s") from error
    if done.returncode:
        raise BuildFailed(f"{' '.join(command)}\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout


def includes() -> list[str]:
    """Compiler arguments for libcu++'s headers: the nvidia-cuda-cccl wheel, as CMakeLists.txt finds them."""
    import importlib.metadata

    for file in importlib.metadata.files("nvidia-cuda-cccl") or ():
        if re.search(r"include/(cccl/)?cuda/atomic$", str(file)):
            return ["-isystem", str(Path(str(file.locate())).resolve().parent.parent)]
    raise BuildFailed("the nvidia-cuda-cccl wheel has no cuda/atomic")


def compiler() -> str:
    """The C++ compiler: CXX or g++."""
    return os.environ.get("CXX", "g++")
