"""The runner's life: states, weights, connector deltas, callbacks, new environments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sampling_cases import make_config, random_env_config

from rlzmq.connectors.env_to_module import MeanStdFilter
from rlzmq.core.callbacks import Callback
from rlzmq.core.errors import ConfigurationError
from rlzmq.envs.examples import RandomEnv
from rlzmq.runners.vector_env_runners import SingleAgentEnvRunner


def weights_of(runner: Any) -> dict[str, Any]:
    return {name: value.copy() for name, value in runner.module.get_state().items()}


def test_only_newer_or_unnumbered_weights_are_loaded() -> None:
    runner = SingleAgentEnvRunner(config=make_config())
    own = weights_of(runner)
    zeros = {name: np.zeros_like(value) for name, value in own.items()}
    runner.weights_seq_no = 5
    runner.set_state({"rl_module": {"default_policy": zeros}, "weights_seq_no": 4})
    assert all(np.array_equal(runner.module.get_state()[name], own[name]) for name in own)
    runner.set_state({"rl_module": zeros, "weights_seq_no": 6})  # a bare module state, too
    assert runner.weights_seq_no == runner.get_state()["weights_seq_no"] == 6
    assert runner.get_state("rl_module", inference_only=True).keys() == {"rl_module", "weights_seq_no"}
    assert not any(value.any() for value in weights_of(runner).values())
    runner.set_state({"rl_module": {"default_policy": own}})
    assert runner.weights_seq_no == 6
    assert all(np.array_equal(runner.module.get_state()[name], own[name]) for name in own)


def test_flat_weights_follow_version_and_generation() -> None:
    runner = SingleAgentEnvRunner(config=make_config())
    layout = runner.get_weights_layout()
    block = layout.snapshot(runner.multi_rl_module)
    assert runner.set_weights(block, version=3, generation=1)
    assert not runner.set_weights(block, version=2, generation=1)
    assert not runner.set_weights(block, version=9, generation=0)
    assert runner.set_weights(bytes(block), version=3, generation=2)
    assert (runner.weights_seq_no, runner.weights_generation) == (3, 2)
    runner.sample_lease(4)
    assert runner.set_weights(block, version=4, generation=2, num_env_steps=1000)
    assert runner.global_env_steps == 1000
    runner.sample_lease(4)
    assert runner.set_weights(block, version=5, generation=2)
    assert runner.global_env_steps > 1000
    with pytest.raises(ValueError, match="bytes"):
        runner.set_weights(block[:-1], version=10, generation=2)


def test_spaces_follow_the_pipeline() -> None:
    runner = SingleAgentEnvRunner(config=make_config(env_to_module_connector=lambda *a, **k: MeanStdFilter()))
    spaces = runner.get_spaces()
    assert spaces["__env__"][0].shape == (3, 4)
    assert spaces["__env_single__"][0].shape == (4,)
    assert spaces["default_policy"][0].high.tolist() == [10.0] * 4
    assert runner.sample_lease(2).observation_space == spaces["default_policy"][0]


def test_a_runners_config_is_its_own_and_can_be_changed() -> None:
    config = random_env_config()
    config.freeze()
    runner = SingleAgentEnvRunner(config=config)
    runner.config.environment(env_config={**config.env_config, "max_episode_steps": 2, "p_terminated": 0.0})
    runner.make_env()
    assert {len(episode) for episode in runner.sample(num_episodes=5)} == {2}
    assert config.env_config["max_episode_steps"] == 6
    runner.change_modules(config)
    runner.make_env()
    assert {len(episode) for episode in runner.sample(num_episodes=5)} == {2}
    assert not runner.config.is_frozen


def test_foreach_env_reaches_every_env() -> None:
    runner = SingleAgentEnvRunner(config=make_config(num_envs=2))
    assert runner.foreach_env(lambda env: env.unwrapped.gravity) == [9.8, 9.8]
    native = SingleAgentEnvRunner(config=make_config(gym_env_vectorize_mode="vector_entry_point"))
    assert native.foreach_env(lambda env: env.num_envs) == [3]
    config = make_config(num_envs=2, gym_env_vectorize_mode="async")
    with (
        SingleAgentEnvRunner(config=config) as processes,
        pytest.raises(ConfigurationError, match=r"env\.call"),
    ):
        processes.foreach_env(lambda env: env)


class Recorder(Callback):
    log: list[tuple[Any, ...]] = []  # noqa: RUF012

    def on_environment_created(self, *, env: Any, env_context: Any, **kwargs: Any) -> None:
        self.log.append(("env", env.num_envs, env_context.worker_index))

    def on_episode_created(self, *, episode: Any, env_index: int, **kwargs: Any) -> None:
        self.log.append(("created", env_index, len(episode)))

    def on_episode_start(self, *, episode: Any, env_index: int, rl_module: Any, **kwargs: Any) -> None:
        self.log.append(("start", env_index, len(episode.observations)))

    def on_episode_step(self, *, episode: Any, env_index: int, **kwargs: Any) -> None:
        self.log.append(("step", env_index, episode.t))

    def on_episode_end(
        self,
        *,
        episode: Any,
        env_index: int,
        prev_episode_chunks: list[Any],
        metrics_logger: Any,
        **kwargs: Any,
    ) -> None:
        self.log.append(("end", env_index, episode.t, len(prev_episode_chunks)))
        metrics_logger.log_value("my_ends", 1, reduce="sum")

    def on_sample_end(self, *, samples: Any, **kwargs: Any) -> None:
        self.log.append(("sample", len(samples)))


def test_callbacks_come_in_rllibs_order() -> None:
    Recorder.log = log = []
    config = make_config(
        RandomEnv, num_envs=2, env_config={"p_terminated": 0.0, "max_episode_steps": 2}
    ).callbacks(Recorder)
    runner = SingleAgentEnvRunner(config=config)
    runner.sample_lease(1)
    runner.sample_lease(2)
    assert log == [
        ("env", 2, 0),
        ("created", 0, 0), ("created", 1, 0),
        ("start", 0, 1), ("start", 1, 1),
        ("step", 0, 1), ("step", 1, 1),
        ("sample", 2),
        ("step", 0, 2), ("end", 0, 2, 1), ("created", 0, 0),
        ("step", 1, 2), ("end", 1, 2, 1), ("created", 1, 0),
        ("start", 0, 1), ("start", 1, 1),
        ("sample", 2),
    ]  # fmt: skip
    assert runner.get_metrics()["my_ends"] == 2
    log.clear()
    runner.sample(num_episodes=2)
    kinds = [entry[0] for entry in log]
    assert kinds.count("created") - kinds.count("start") <= 1
    assert kinds.count("end") == 2


class NoHooks(Callback):
    def on_episode_end(self, **kwargs: Any) -> None:
        """Needs episodes, so that the sampler is another one."""


@pytest.mark.parametrize("callbacks", [None, NoHooks])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_returns_are_the_recorded_ones_if_a_wrapper_changes_rewards(mode: str, callbacks: Any) -> None:
    config = make_config().callbacks(callbacks)
    config.environment(wrappers=["RecordEpisodeStatistics", "ClipReward(max_reward=0.25)"])
    runner = SingleAgentEnvRunner(config=config.env_runners(gym_env_vectorize_mode=mode))
    episodes = [episode for _ in range(4) for episode in runner.sample(num_timesteps=50)]
    results = runner.get_metrics()
    runner.stop()
    assert {float(reward) for episode in episodes for reward in episode.get_rewards()} == {0.25}
    assert results["episode_return_mean"] == results["episode_len_mean"]
