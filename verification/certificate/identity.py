"""Own ids of tests: stable when a file moves, the same in a source tree and in an installed package."""

from __future__ import annotations

import shlex

import pytest

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


def replay_command(nodeid: str, rig: str, profile: str, model: str | None, seed: int) -> str:
    """A command line that runs one test again with the same draws. `--pyargs`-free: paths are relative to the root."""
    words = ["pytest", nodeid, "--rig", rig, "--profile", profile, "--seed", str(seed)]
    if model:
        words += ["--model", model]
    return shlex.join(words)
