"""A terminal per journey; what a journey leaves behind fails it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.journeys.terminal import Terminal, until

_LIMIT_S = 600  # above the waits for events, which say what did not come


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let busy machines take their time."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(_LIMIT_S))


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    """A terminal in an empty directory. After the journey no process and no temporary file may be left."""
    place = Terminal(tmp_path)
    try:
        yield place
        until(
            lambda: not place.left_processes(),
            "the end of all processes",
            lambda: str(place.left_processes()),
        )
        until(lambda: not place.left_files(), "an empty temporary directory", lambda: str(place.left_files()))
    finally:
        place.close()
