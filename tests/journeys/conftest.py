"""A terminal per journey; what a journey leaves behind fails it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.journeys.terminal import Terminal, until


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
