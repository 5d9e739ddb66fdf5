"""Episodes that never end: the README's lines cope, and it is said once what to do."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rlzmq.runners.episode_metrics import HOW_TO_LIMIT
from rlzmq.telemetry.view import summary_line
from tests.support.runs import ShortEnv, small


class Endless(ShortEnv):
    length = math.inf


LIMIT = f"limit them: {HOW_TO_LIMIT}"


def config(**evaluation: Any) -> Any:
    return small(env=Endless, train_batch_size_per_learner=1500, minibatch_size=1500).evaluation(**evaluation)


def test_without_a_return_the_readmes_lines_cope_and_one_hint_says_why(caplog: Any, capsys: Any) -> None:
    with config(evaluation_duration=20, evaluation_duration_unit="timesteps").build() as algo:
        for _ in range(4):
            result = algo.train()
            assert not result["env_runners"]["episode_return_mean"] >= 450
        evaluated = algo.evaluate()["env_runners"]
    print(result["env_runners"]["episode_return_mean"], evaluated["episode_return_mean"])
    assert capsys.readouterr().out == "nan nan\n"
    assert "episode_return_mean" not in result["env_runners"]
    assert result["env_runners"].get("episode_len_max") is None
    with pytest.raises(KeyError, match="episode_retrun_mean"):
        result["env_runners"]["episode_retrun_mean"]
    assert summary_line(result).startswith(
        "iter 4  return – (no episode has ended)  episodes 0  steps 6000  "
    )
    assert caplog.messages == [
        "No episode has ended in 4500 env steps (2250 in each environment), so there is no episode_return_mean. "
        f"If they never end, {LIMIT}."
    ]
