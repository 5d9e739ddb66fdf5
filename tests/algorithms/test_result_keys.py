"""Every key of each algorithm's result, held in result_keys.json: people's plots and scripts read them.

If a change means to change them: ``RESULT_KEYS=write python -m pytest tests/algorithms/test_result_keys.py``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rlzmq.algorithms.registry import ALGORITHMS, get_config_class
from tests.learners.all_algorithms import record_pendulum

_KEPT = Path(__file__).with_name("result_keys.json")
_WRITES = os.environ.get("RESULT_KEYS") == "write"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(record_pendulum(tmp_path_factory.mktemp("recorded")))


def paths(tree: Any, prefix: str = "") -> Iterator[str]:
    """Yield the keys of a result's leaves; an agent's or a seed's own names do not count."""
    if isinstance(tree, Mapping) and prefix != "config/":
        for key, value in tree.items():
            yield from paths(value, f"{prefix}{key}/")
    else:
        yield prefix.rstrip("/")


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_result_has_the_kept_keys(algorithm: str, recorded: str) -> None:
    config = get_config_class(algorithm)().debugging(seed=1)
    config.environment("Pendulum-v1", env_config={"max_episode_steps": 50})
    if algorithm == "dqn":
        config.environment("CartPole-v1")
    config.rl_module(model_config={"fcnet_hiddens": [8]})
    config.reporting(min_time_s_per_iteration=0, min_sample_timesteps_per_iteration=0)
    if config.is_online:
        config.env_runners(num_env_runners=0, num_envs_per_env_runner=4)
        config.training(train_batch_size_per_learner=128)
        if hasattr(config, "num_steps_sampled_before_learning_starts"):
            config.training(num_steps_sampled_before_learning_starts=64)
            config.training(training_intensity=0.5)
        config.reporting(min_sample_timesteps_per_iteration=300)
        if hasattr(config, "num_epochs"):
            config.training(num_epochs=1)
    else:
        config.offline_data(input_=[recorded], dataset_num_iters_per_learner=2)
        config.training(train_batch_size_per_learner=128)
    with config.build() as algo:
        algo.train()
        found = sorted(paths(algo.train()))
    if _WRITES:
        kept = json.loads(_KEPT.read_text()) if _KEPT.exists() else {}
        kept[algorithm] = found
        _KEPT.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    assert found == json.loads(_KEPT.read_text())[algorithm]
