"""Small suites under the plugin, in a pytest of their own."""

from __future__ import annotations

from tests.unit.plugin.conftest import fork_server, suite

__all__ = ["fork_server", "suite"]
