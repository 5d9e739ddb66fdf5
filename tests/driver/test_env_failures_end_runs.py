"""An environment that breaks again and again ends the run with what reproduces it, out of the runner's process."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from rlzmq import PPOConfig
from tests.support.runs import ShortEnv


class Unpicklable(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class BreaksAtThree(ShortEnv):
    def reward(self, action: Any) -> float:
        if self.t == 3:
            raise Unpicklable("broken at step three")
        return 1.0


def test_five_failures_in_a_runners_process_end_the_run_with_seed_actions_and_traceback() -> None:
    config = PPOConfig().environment(BreaksAtThree).env_runners(num_env_runners=1).debugging(seed=1)
    with config.build() as algo, pytest.raises(Exception, match="5 failures within 60 s") as caught:
        algo.train()
    text = "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert "Environment 0 of env runner 1 raised Unpicklable in step(): broken at step three" in text
    assert "To reproduce: reset(seed=" in text
    assert ", then 3 steps" in text
    assert "test_env_failures_end_runs.py" in text
