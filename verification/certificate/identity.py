"""Own ids of tests: stable when a file moves, the same in a source tree and in an installed package."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from verification.run_context import RunContext

_PACKAGE = Path(__file__).resolve().parents[1]
MARKER = "blink_property"


def property_of(item: pytest.Item) -> str | None:
    """The property a test is marked with, None without a marker; `pytest.UsageError` for a marker without a name."""
    marker = item.get_closest_marker(MARKER)
    if marker is None:
        return None
    name = marker.args[0] if marker.args else marker.kwargs.get("name")
    if not isinstance(name, str) or not name:
        raise pytest.UsageError(f"{item.nodeid}: blink_property needs the name of a property, got {name!r}")
    return name


def own_id(item: pytest.Item) -> str:
    """The stable id of a test: "<property>/<name>[parameters]", or "<module>/<name>[parameters]" without a property.

    The marker's `id` replaces the name. Parameters are pytest's ids of them.
    """
    name = item.name.partition("[")[0]
    parameters = item.name[len(name) :]
    parents = [node.name for node in item.listchain() if isinstance(node, pytest.Class)]
    short = ".".join([*parents, name.removeprefix("test_")])
    marker = item.get_closest_marker(MARKER)
    if marker is not None and marker.kwargs.get("id"):
        short = str(marker.kwargs["id"])
    return f"{property_of(item) or item.path.stem.removeprefix('test_')}/{short}{parameters}"


def describe(item: pytest.Item) -> dict[str, str | None]:
    """A test as the collector notes it."""
    return {"nodeid": item.nodeid, "id": own_id(item), "property": property_of(item)}


def replay_command(item: pytest.Item, context: RunContext) -> str:
    """The one command line that runs a test again with the same draws, from the folder in which the run was started.

    A test of the package's own suite is named by its module, wherever that is installed; any other by its path.
    """
    config = item.config
    test = item.nodeid.partition("::")[2]
    words = ["pytest", *_plugin_arguments(config)]
    if item.path.is_relative_to(_PACKAGE):
        module = item.path.relative_to(_PACKAGE.parent).with_suffix("")
        words += ["--pyargs", f"{'.'.join(module.parts)}::{test}"]
    else:
        words.append(f"{os.path.relpath(item.path, config.invocation_params.dir)}::{test}")
    words += ["--rig", context.rig, "--profile", context.profile_name, "--seed", str(context.seed)]
    words += ["--model", context.model] if context.model else []
    drawn = getattr(config.option, "hypothesis_seed", None)
    words += [] if drawn is None else ["--hypothesis-seed", str(drawn)]
    return shlex.join(words)


def _plugin_arguments(config: pytest.Config) -> list[str]:
    """The plugin by name where it is not installed as an entry point; twice would be an error."""
    return [] if config.pluginmanager.hasplugin("blink") else ["-p", "verification.plugin"]
