"""Runs that go on from a checkpoint do so bit for bit, with new episodes (scripts/resume_exactly.py has more)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlzmq.algorithms.algorithm import Algorithm
from rlzmq.algorithms.ppo.ppo_learner import PPOLearner
from rlzmq.connectors.env_to_module import MeanStdFilter
from tests.support.runs import assert_accounted, small, two_agents, weights_of
from tests.support.warm_process import run_warm

SCRIPT = Path(__file__).parents[2] / "scripts" / "resume_exactly.py"


def make_config(num_env_runners: int = 0, num_learners: int = 0, num_envs: int = 3) -> Any:
    return small(
        num_env_runners=num_env_runners,
        num_envs_per_env_runner=num_envs,
        env_to_module_connector=lambda env, spaces, device: MeanStdFilter(),
        num_learners=num_learners,
        train_batch_size_per_learner=200,
        minibatch_size=50,
        num_epochs=2,
        lr=1e-3,
        seed=5,
    )


@pytest.mark.parametrize(("kills", "updates"), [("2", "4"), pytest.param("3", "6", marks=pytest.mark.slow)])
def test_a_run_whose_driver_is_killed_ends_as_one_that_is_not_killed(kills: str, updates: str) -> None:
    options = ["--kills", kills, "--cases", "filter-8", "--form", "serial", "--updates", updates]
    done = run_warm(str(SCRIPT), *options, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{kills} kills, 1 runs, 0 of them differ" in done.stdout


@pytest.fixture(scope="module")
def serial(tmp_path_factory: Any) -> tuple[str, dict[str, np.ndarray]]:
    """A checkpoint after one update, and the weights of the run that goes on from it, two updates later."""
    with make_config().build() as algo:
        algo.train()
        path = algo.save_to_path(tmp_path_factory.mktemp("serial") / "c")
        algo.restore_from_path(path)
        for _ in range(2):
            algo.train()
        return path, weights_of(algo)


@pytest.mark.parametrize("processes", [(0, 0), (1, 1)])
def test_going_back_within_a_run_repeats_it(
    processes: tuple[int, int], serial: tuple[str, dict[str, np.ndarray]]
) -> None:
    """Serial and distributed runs go on from each other's checkpoints."""
    path, expected = serial
    with make_config(*processes).build() as algo:
        for _ in range(2):
            algo.restore_from_path(path)
            for _ in range(2):
                result = algo.train()
            np.testing.assert_equal(expected, weights_of(algo))
            assert result["accounting"]["trained"] >= 600
            assert_accounted(result)
            assert result["learners"]["default_policy"]["weights_seq_no"] == 3


def test_going_back_takes_evaluation_counts_back(tmp_path: Path) -> None:
    config = small(num_env_runners=0, num_learners=0, seed=5)
    config.evaluation(evaluation_interval=1, evaluation_duration=1)

    def goes_on(algo: Any) -> Any:
        evaluations = [algo.train()["evaluation"]["env_runners"] for _ in range(2)]
        return [evaluation["num_episodes_lifetime"] for evaluation in evaluations]

    with config.build() as algo:
        algo.train()
        path = algo.save_to_path(tmp_path / "c")
        assert goes_on(algo) == [2, 3]
        algo.restore_from_path(path)
        assert goes_on(algo) == [2, 3]


class CountingLearner(PPOLearner):
    def after_gradient_based_update(self, *, timesteps: Any) -> None:
        super().after_gradient_based_update(timesteps=timesteps)
        self.metrics.log_value(("default_policy", "updates"), 1, reduce="lifetime_sum")


def log_ends(*, metrics_logger: Any, **kwargs: Any) -> None:
    metrics_logger.log_value("ends", 1, reduce="lifetime_sum")


def test_metrics_and_evaluation_go_on() -> None:
    config = make_config().evaluation(evaluation_interval=1, evaluation_duration=2)
    config.learners(learner_class=CountingLearner).callbacks(on_episode_end=log_ends)
    with config.build() as first, config.build() as second:
        first.train()
        first.metrics.log_value("mine", 3, reduce="lifetime_sum")
        state = first.get_state()
        for algo in (first, second):
            algo.set_state(state)
        results = []
        for algo in (first, second):
            algo.metrics.log_value("mine", 4, reduce="lifetime_sum")
            results.append(algo.train())
        assert [result["mine"] for result in results] == [7, 7]
        means = [result["env_runners"]["episode_return_mean"] for result in results]
        assert means[0] == means[1]
        for result in results:
            evaluation = result["evaluation"]["env_runners"]
            assert evaluation["num_episodes_lifetime"] == evaluation["ends"] == 4
            assert result["env_runners"]["ends"] == result["env_runners"]["num_episodes_lifetime"]
            assert result["learners"]["default_policy"]["updates"] == 2


def test_a_multi_agent_run_goes_on(tmp_path: Path) -> None:
    config = two_agents(num_env_runners=1, num_learners=1)

    def returns_and_weights(algo: Algorithm) -> Any:
        return algo.train()["env_runners"]["agent_episode_return_mean"], weights_of(algo, "p1")

    with config.build() as algo:
        algo.train()
        path = algo.save_to_path(tmp_path / "c")
        algo.restore_from_path(path)
        expected = [returns_and_weights(algo) for _ in range(2)]
    with config.build() as algo:
        algo.restore_from_path(path)
        for means, state in expected:
            again, weights_again = returns_and_weights(algo)
            assert again == means
            np.testing.assert_equal(state, weights_again)
