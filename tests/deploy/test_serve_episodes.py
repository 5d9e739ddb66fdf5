"""Pieces without a form in torch are served as Policy runs them; only an export needs that form."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rlzmq import (
    Columns,
    ConfigurationError,
    ConnectorV2,
    MeanStdFilter,
    Policy,
    PolicyServer,
    PPOConfig,
    SingleAgentObservationPreprocessor,
)
from rlzmq.deploy.export import export_policy
from tests.deploy.serving import Http, cartpole, write_checkpoint
from tests.support.runs import two_agents


class WithPast(SingleAgentObservationPreprocessor):
    """The observation, the time, the last reward, the last three actions and the stored observation before."""

    @property
    def required_lookback(self) -> int:
        return 3

    def recompute_output_observation_space(self, observation_space: Any, action_space: Any) -> Any:
        if isinstance(observation_space, gym.spaces.Dict):
            return gym.spaces.Dict({agent: self._space() for agent in observation_space.spaces})
        return self._space()

    @staticmethod
    def _space() -> gym.spaces.Box:
        return gym.spaces.Box(-np.inf, np.inf, (10,), np.float32)

    def preprocess(self, observation: Any, episode: Any) -> Any:
        num_before = episode.actions.len_incl_lookback()
        past = np.zeros(3, np.float32)
        for back in range(1, min(3, num_before) + 1):
            past[-back] = 1 + episode.get_actions(-back)
        reward = episode.get_rewards(-1) if num_before else 0.0
        before = episode.get_observations(-2)[0] if num_before else 0.0
        return np.asarray([*observation, np.sin(episode.t), reward, *past, before], np.float32)


class EveryFifthActionLeft(ConnectorV2):
    """Depends on the time in the episode."""

    def __call__(self, *, batch: dict[str, Any], episodes: Sequence[Any], **kwargs: Any) -> dict[str, Any]:
        times = {episode.id_: episode.t for episode in self.single_agent_episode_iterator(episodes)}

        def replace(action: Any, episode_id: str, agent_id: Any, module_id: Any) -> Any:
            return np.zeros_like(action) if times[episode_id] % 5 == 4 else action

        self.foreach_batch_item_change_in_place(batch, Columns.ACTIONS, replace)
        return batch


def with_past(config: PPOConfig) -> PPOConfig:
    return config.env_runners(
        env_to_module_connector=lambda: [MeanStdFilter(), WithPast()],
        module_to_env_connector=lambda: EveryFifthActionLeft(),
    )


def test_an_episode_of_a_server_is_an_episode_of_the_policy(tmp_path: Path) -> None:
    config = with_past(cartpole(use_lstm=True, lstm_cell_size=8))
    path = write_checkpoint(config, tmp_path / "000001")
    player = Policy.load(path, config=config)
    rng = np.random.default_rng(1)
    with (
        PolicyServer(path, config=config, http="127.0.0.1:0") as server,
        Http(server.http_url, server.token) as client,
    ):
        begun: dict[str, Any] = {}
        actions = []
        for _ in range(80):  # longer than the policy keeps of an episode
            observation, reward = rng.normal(size=4).astype(np.float32), float(rng.normal())
            expected = player.compute_action(observation, reward=reward)
            code, answer = client.act(obs=observation.tolist(), reward=reward, **begun)
            assert code == 200, answer
            assert answer["action"] == expected
            begun = {"state_in": answer["state_out"]}
            actions.append(int(expected))
        assert set(actions) == {0, 1}
        state = answer["state_out"]
        assert state["num_steps"] == 80
        rows = [observation.tolist()] * 2
        states = {name: [value, value] for name, value in state.items()}
        _, found = client.act(observations=rows, state_in=states, explore=True)
        assert found["state_out"]["num_steps"] == [81, 81]
        assert sorted(found["state_out"]) == sorted(states)
        _, found = client.act(observations=rows, state_in={**states, "num_steps": [-5, 0]})
        assert found["actions"] == [player.copy().compute_action(observation)] * 2


def test_agents_of_a_multi_agent_policy(tmp_path: Path) -> None:
    config = two_agents(
        model_config={"fcnet_hiddens": [16]}, env_to_module_connector=lambda: WithPast(), seed=3
    )
    path = write_checkpoint(config, tmp_path / "000001")
    player = Policy.load(path, config=config, module_id="p1", agent_id=1)
    rng = np.random.default_rng(1)
    with (
        PolicyServer(path, config=config, http="127.0.0.1:0") as server,
        Http(server.http_url, server.token) as client,
    ):
        begun: dict[str, Any] = {}
        for _ in range(20):
            observation, reward = rng.normal(size=4).astype(np.float32), float(rng.normal())
            expected = player.compute_action(observation, reward=reward)
            code, answer = client.act(obs=observation.tolist(), reward=reward, agent=1, **begun)
            assert (code, answer["action"]) == (200, expected)
            begun = {"state_in": answer["state_out"]}


def test_the_server_warns_and_an_export_says_what_to_write(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = with_past(cartpole())
    path = write_checkpoint(config, tmp_path / "000001")
    wanted = r"'WithPast' \(number 2 of 7 in EnvToModulePipeline\): .*write WithPast.to_torch"
    with PolicyServer(path, config=config, http="127.0.0.1:0"):
        pass
    assert "Each observation is computed by itself" in caplog.text
    assert "write WithPast.to_torch" in caplog.text
    with pytest.raises(ConfigurationError, match=wanted):
        export_policy(Policy.load(path, config=config), tmp_path / "policy.onnx")
