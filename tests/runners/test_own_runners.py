"""Env runners of users: overridden methods of the built-in ones, and a simulator that is no Gymnasium env."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest

from rlzmq import ConnectorV2, EnvRunner, PPOConfig, SingleAgentEnvRunner, SingleAgentEpisode
from rlzmq.runners import env_runner

BATCH = 40


def config_of(runner: Any, num_env_runners: int = 0) -> PPOConfig:
    config = PPOConfig().debugging(seed=0)
    config.env_runners(env_runner_cls=runner, num_env_runners=num_env_runners)
    config.training(train_batch_size_per_learner=BATCH, minibatch_size=BATCH, num_epochs=1)
    return config.rl_module(model_config={"fcnet_hiddens": [8]})


class Seen(ConnectorV2):
    """Notes the rewards of the episodes that are trained on."""

    rewards: ClassVar[set[float]] = set()

    def __call__(self, *, batch: Any, episodes: Any, **kwargs: Any) -> Any:
        for episode in episodes:
            self.rewards.update(map(float, episode.get_rewards()))
        return batch


class Halves(SingleAgentEnvRunner):
    """Halves rewards, and reports two numbers of its own."""

    def sample(self, **kwargs: Any) -> Any:
        episodes = super().sample(**kwargs)
        for episode in episodes:
            episode.set_rewards(new_data=np.asarray(episode.get_rewards()) / 2)
        return episodes

    def get_metrics(self) -> Any:
        metrics = super().get_metrics()
        metrics["mine"] = 7
        metrics["nested"] = {"part": 1.5}
        metrics["episode_len_mean"] = -1.0
        return metrics


@pytest.mark.parametrize("num_env_runners", [0, 1])
def test_overridden_methods_are_called_in_training_and_evaluation(num_env_runners: int) -> None:
    config = config_of(Halves, num_env_runners).environment("CartPole-v1")
    config.evaluation(evaluation_interval=1, evaluation_duration=2)
    config.learners(learner_connector=lambda *spaces: [Seen()])
    with config.build() as algo:
        result = algo.train()
        values = algo.learner_group.foreach_learner(lambda learner: sorted(Seen.rewards))
    assert result["env_runners"]["mine"] == 7
    assert result["env_runners"]["nested"] == {"part": 1.5}
    assert result["env_runners"]["episode_len_mean"] == -1.0
    assert result["env_runners"]["num_env_steps_sampled_lifetime"] >= BATCH
    assert result["accounting"]["trained"] >= BATCH
    assert result["evaluation"]["env_runners"]["num_episodes"] == 2
    assert [most[-1] for most in values] == [0.5]


class Line(EnvRunner):
    """Walks on a line of ten places until it leaves it, without an environment. A sample is a whole episode."""

    def make_env(self) -> None:
        self.env = {"place": 0}

    def sample(
        self, *, num_timesteps: int | None = None, num_episodes: int | None = None, **kwargs: Any
    ) -> Any:
        return [self._episode() for _ in range(num_episodes or 1)]

    def _episode(self) -> SingleAgentEpisode:
        place = 5
        episode = SingleAgentEpisode(
            observation_space=self.config.observation_space, action_space=self.config.action_space
        )
        episode.add_env_reset(observation=np.array([place], np.float32))
        while not episode.is_done:
            to_module = self.env_to_module(
                rl_module=self.module, batch={}, episodes=[episode], explore=True, shared_data={}
            )
            to_env = self.module_to_env(
                rl_module=self.module,
                batch=self.module.forward_exploration(to_module),
                episodes=[episode],
                explore=True,
                shared_data={},
            )
            action = int(to_env.pop("actions")[0])
            to_env.pop("actions_for_env", None)
            place += 1 if action else -1
            is_over = not 0 <= place < 10
            episode.add_env_step(
                observation=np.array([place], np.float32),
                action=action,
                reward=1.0,
                terminated=is_over,
                truncated=len(episode) >= 60 and not is_over,
                extra_model_outputs={name: column[0] for name, column in to_env.items()},
            )
        return episode


def line(num_env_runners: int = 0) -> PPOConfig:
    spaces = gym.spaces.Box(-1.0, 10.0, (1,)), gym.spaces.Discrete(2)
    return config_of(Line, num_env_runners).environment(observation_space=spaces[0], action_space=spaces[1])


@pytest.mark.parametrize("num_env_runners", [0, 2])
def test_a_simulator_of_ones_own_trains_is_evaluated_and_restored(
    num_env_runners: int, tmp_path: Path
) -> None:
    config = line(num_env_runners).evaluation(evaluation_interval=2, evaluation_duration=3)
    with config.build() as algo:
        results = [algo.train() for _ in range(4)]
        path = algo.save_to_path(tmp_path / "saved")
        algo.restore_from_path(path)
        after = algo.train()
    for number, result in enumerate(results, start=1):
        account = result["accounting"]
        assert account["trained"] >= number * BATCH
        assert (
            account["sampled"] == account["trained"] + sum(account["dropped"].values()) + account["pending"]
        )
    runners = results[-1]["env_runners"]
    assert runners["num_episodes_lifetime"] > 2
    assert runners["episode_return_mean"] == runners["episode_len_mean"] >= 5
    assert results[-1]["evaluation"]["env_runners"]["num_episodes"] == 3
    assert after["accounting"]["trained"] >= 5 * BATCH


def test_what_a_lease_has_no_room_for_is_in_the_next_one() -> None:
    runner = Line(config=line())
    first, second = runner.sample_lease(3), runner.sample_lease(3)
    assert [batch.num_env_steps for batch in (first, second)] == [3, 2 if second.terminated.any() else 3]
    assert first[0].id_ == second[0].id_
    assert second[0].t_started == 3
    assert [batch.meta["num_env_steps"] for batch in (first, second)] == [3, second.num_env_steps]


def test_a_runner_that_returns_no_steps_again_and_again_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Empty(Line):
        def sample(self, **kwargs: Any) -> Any:
            return []

    monkeypatch.setattr(env_runner, "_EMPTY_S", 0.0)
    runner = Empty(config=line())
    for _ in range(9):
        assert runner.sample_lease(3).num_env_steps == 0
    assert [record.args[0] for record in caplog.records] == ["Empty"] * 8


def test_a_runner_without_the_two_methods_says_which_ones_it_lacks() -> None:
    class Lacks(EnvRunner):
        pass

    with pytest.raises(NotImplementedError, match=r"Lacks: override make_env\(\) and sample\(\)"):
        Lacks(config=line())
