"""What several tests of sockets need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rlzmq.core.addresses import SocketDirectory
from rlzmq.net.context import Context


@pytest.fixture
def context() -> Iterator[Context]:
    with Context() as context:
        yield context


@pytest.fixture
def directory() -> Iterator[SocketDirectory]:
    with SocketDirectory() as directory:
        yield directory
