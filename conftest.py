"""Settings shared by every test: Hypothesis draws the same examples in every run, so that a red run can be repeated."""

import pytest
from hypothesis import settings

settings.register_profile("blink-derandomised", derandomize=True, deadline=None, database=None, print_blob=True)
settings.load_profile("blink-derandomised")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Under `-n`, a file's tests share a worker, and so do all those that start whole engines or walk the guides."""
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            part = item.nodeid.split("::")[0]
            alone = [folder for folder in ("tests/integration/", "tests/docs/") if part.startswith(folder)]
            item.add_marker(pytest.mark.xdist_group(alone[0] if alone else part))
