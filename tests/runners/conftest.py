"""One torch thread for all runner tests, and runners that sample on rows or with real episodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from rlzmq.runners.vector_env_runners import SingleAgentEnvRunner


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=["fused", "episodes"])
def runner_of(request: pytest.FixtureRequest) -> Iterator[Callable[[Any], SingleAgentEnvRunner]]:
    """Makes a runner of a config; in one of both ways to sample."""
    made = []

    def make(config: Any) -> SingleAgentEnvRunner:
        runner = SingleAgentEnvRunner(config=config)
        runner.use_rows = request.param == "fused"
        made.append(runner)
        return runner

    yield make
    for runner in made:
        runner.stop()
