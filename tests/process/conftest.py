"""For jobs of real processes: with a slow engine their tests have more time."""

from __future__ import annotations

from pathlib import Path

import pytest

from .job import SLOWER


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if SLOWER == 1:
        return
    for item in items:
        if item.path.parent == Path(__file__).parent:
            marker = item.get_closest_marker("timeout")
            seconds = marker.args[0] if marker else float(config.getini("timeout"))
            item.add_marker(pytest.mark.timeout(4 * seconds), append=False)
