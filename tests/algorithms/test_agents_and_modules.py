"""Which agents and modules a config is for: spaces by method, mappings that draw, text forms, and what is refused."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rlzmq import (
    Columns,
    ConfigurationError,
    MultiAgentEnv,
    MultiRLModuleSpec,
    PPOConfig,
    RLModule,
    RLModuleSpec,
    register_env,
)
from rlzmq.cli.train import _config, _parse
from rlzmq.envs.examples import MultiAgentCartPole
from tests.support.runs import small, two_agents


class Robots(MultiAgentEnv):
    """Tells its spaces by the methods alone, and makes a new space object each time."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.agents = self.possible_agents = ["robot", "boss"]

    def get_observation_space(self, agent_id: Any) -> gym.Space[Any]:
        return gym.spaces.Box(0.0, 1.0, (4 if agent_id == "robot" else 2,), np.float32)

    def get_action_space(self, agent_id: Any) -> gym.Space[Any]:
        return gym.spaces.Discrete(3 if agent_id == "robot" else 2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.t = 0
        return {agent: self.get_observation_space(agent).sample() for agent in self.agents}, {}

    def step(self, action_dict: dict[Any, Any]) -> Any:
        self.t += 1
        observations = {agent: self.get_observation_space(agent).sample() for agent in self.agents}
        return observations, dict.fromkeys(action_dict, 1.0), {"__all__": self.t >= 5}, {"__all__": False}, {}


def robots() -> PPOConfig:
    return small(  # type: ignore[no-any-return]
        env=Robots, policies={"robot", "boss"}, policy_mapping_fn=lambda agent_id, episode: agent_id
    )


def test_spaces_told_by_methods_alone_train() -> None:
    with robots().build() as algo:
        result = algo.train()
        assert algo.get_module("robot").observation_space.shape == (4,)
        assert algo.get_module("boss").action_space.n == 2
    assert result["learners"].keys() >= {"robot", "boss"}


ONE_OF = ("one", "two", "three")


@pytest.mark.parametrize(
    "draw", [lambda episode: random.choice(ONE_OF), lambda episode: ONE_OF[int(episode.id_) % 3]]
)
def test_a_mapping_that_draws_tells_the_spaces_of_all_its_modules(draw: Any) -> None:
    def draws(agent_id: Any, episode: Any, **kwargs: Any) -> str:
        return agent_id if agent_id == "boss" else draw(episode)

    config = robots().multi_agent(policies={"boss", *ONE_OF}, policy_mapping_fn=draws)
    specs = config.get_multi_rl_module_spec().rl_module_specs
    assert {mid: spec.observation_space.shape for mid, spec in specs.items()} == {
        "boss": (2,), "one": (4,), "two": (4,), "three": (4,),
    }  # fmt: skip


def refusal(config: PPOConfig) -> str:
    with pytest.raises(ConfigurationError) as error:
        config.env_runners(num_env_runners=0).build()
    return str(error.value)


def test_an_env_of_several_agents_without_multi_agent_says_so() -> None:
    text = refusal(PPOConfig().environment(MultiAgentCartPole, env_config={"num_agents": 2}))
    assert "MultiAgentCartPole has several agents (0, 1)" in text
    assert ".multi_agent(policies={'shared'}, policy_mapping_fn=lambda agent_id, episode: 'shared')" in text
    assert "--policies p0,p1 --policy-mapping-fn rlzmq.envs.examples:module_of_agent" in text


def test_a_raw_pettingzoo_env_names_its_wrapper() -> None:
    rps_v2 = pytest.importorskip("pettingzoo.classic.rps_v2")
    register_env("raw-aec", lambda config: rps_v2.env())
    register_env("raw-parallel", lambda config: rps_v2.parallel_env())
    aec, parallel = (refusal(PPOConfig().environment(name)) for name in ("raw-aec", "raw-parallel"))
    assert "Wrap a PettingZoo env: register_env('mine', lambda config: PettingZooEnv(make_it()))" in aec
    assert "lambda config: ParallelPettingZooEnv(make_it()))" in parallel


def test_multi_agent_settings_for_a_single_agent_are_refused() -> None:
    config = PPOConfig().environment("CartPole-v1").multi_agent(
        policies={"a", "b"}, policy_mapping_fn=lambda agent_id, episode: "a"
    )  # fmt: skip
    assert "has a single agent, but the config has multi_agent() settings (modules ['a', 'b'])" in refusal(
        config
    )


@pytest.fixture
def mapping_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_mapping.py").write_text(
        "def by_id(agent_id, episode, **kw):\n    return f'p{agent_id}'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("my_mapping", None)
    return "my_mapping:by_id"


def test_policies_and_their_mapping_in_toml_and_on_the_command_line(mapping_module: str) -> None:
    toml = f'policies = ["p0", "p1"]\npolicies_to_train = ["p0"]\npolicy_mapping_fn = "{mapping_module}"\n'
    from_toml = PPOConfig.from_toml(toml)
    line = ["--env", "rlzmq.envs.examples:MultiAgentCartPole", "--policies", "p0,p1"]
    line += ["--policies-to-train", '["p0"]', "--policy-mapping-fn", mapping_module]
    from_flags = _config("ppo", _parse("ppo", line))
    for config in (from_toml, from_flags):
        assert config.module_ids == ["p0", "p1"]
        assert config.policies_to_train == ["p0"]
        assert config.policy_mapping_fn(1, None) == "p1"
    assert PPOConfig.from_toml(from_toml.to_toml()).policy_mapping_fn is from_toml.policy_mapping_fn
    with pytest.raises(ConfigurationError, match="'my_mapping:nothing' cannot be found"):
        PPOConfig.from_toml('policy_mapping_fn = "my_mapping:nothing"')


def test_only_files_that_people_write_name_code_without_its_mark(mapping_module: str) -> None:
    with pytest.raises(ConfigurationError, match="policy_mapping_fn: expected"):
        PPOConfig.from_state({"policy_mapping_fn": mapping_module})


class AlwaysLeft(RLModule):
    """No networks: a plain RLModule."""

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {Columns.ACTIONS: [0] * len(batch[Columns.OBS])}


def test_a_module_without_parameters_may_also_be_the_only_one() -> None:
    config = small(
        minibatch_size=None, rl_module_spec=RLModuleSpec(module_class=AlwaysLeft), evaluation_duration=2
    )
    with config.build() as algo:
        assert algo.evaluate()["env_runners"]["episode_return_mean"] < 15
        assert algo.train()["env_runners"]["num_env_steps_sampled"] == 64
        path = algo.save_to_path()
        assert algo.compute_action(np.zeros(4, np.float32)) == 0
        algo.restore_from_path(path)


def test_modules_without_parameters_play_beside_one_that_learns(tmp_path: Path) -> None:
    def draws(agent_id: Any, episode: Any, **kwargs: Any) -> str:
        return random.choice(["left", "also_left"]) if agent_id else "learned"

    specs = dict.fromkeys(("left", "also_left"), RLModuleSpec(module_class=AlwaysLeft))
    specs["learned"] = RLModuleSpec()
    config = two_agents(num_env_runners=1, num_learners=1, evaluation_interval=1, evaluation_duration=2)
    config.multi_agent(policies=set(specs), policy_mapping_fn=draws, policies_to_train=["learned"])
    config.rl_module(rl_module_spec=MultiRLModuleSpec(rl_module_specs=specs))
    with config.build() as algo:
        result = algo.train()
        path = algo.save_to_path(tmp_path / "c")
    assert result["learners"].keys() == {"learned", "__all_modules__"}
    assert result["evaluation"]["env_runners"]["num_episodes"] == 2
    with config.build() as algo:
        algo.restore_from_path(path)
        assert algo.train()["training_iteration"] == 2
        assert isinstance(algo.get_module("left"), AlwaysLeft)
