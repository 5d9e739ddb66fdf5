"""Environments and modules for the multi-agent runner's tests."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch

from rlzmq.envs.multi_agent_env import MultiAgentEnv
from rlzmq.modules.rl_module import TorchRLModule

AGENTS = ["a", "b", "c", "d"]


class RestlessAgentsEnv(MultiAgentEnv):
    """Agents are born, wait for their outcomes, and die at random; all data tell whose they are.

    Observations: [agent number, the agent's own number of observations before, env step, random].
    Rewards: 100 * agent number + env step (as floats).

    Args:
        config: ``p_birth``, ``p_death``, ``p_wait`` (probability that an outcome comes later), ``p_end``
            (of ``"__all__"``), ``p_raise`` (of an exception), ``action`` ("discrete", "box" or "mixed").
    """

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.config = {
            "p_birth": 0.3,
            "p_death": 0.15,
            "p_wait": 0.3,
            "p_end": 0.02,
            "p_raise": 0.0,
            **(config or {}),
        }
        self.possible_agents = list(AGENTS)
        self.observation_spaces = {a: gym.spaces.Box(-10, 1e6, (4,), np.float32) for a in AGENTS}
        kinds = {
            "discrete": [gym.spaces.Discrete(3)] * 4,
            "box": [gym.spaces.Box(-2.0, 3.0, (2,))] * 4,
            "mixed": [gym.spaces.Box(-2.0, 3.0, (2,)), gym.spaces.Box(-1.0, 4.0, (2,))] * 2,
        }
        self.action_spaces = dict(zip(AGENTS, kinds[self.config.get("action", "discrete")], strict=True))
        self._random = np.random.default_rng(0)
        self._buffer = np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self._random = np.random.default_rng(seed)
        self.t = 0
        self._num_obs = dict.fromkeys(AGENTS, 0)
        self._unborn = list(AGENTS)
        self._waiting: set[str] = set()
        self.agents = []
        num = 1 + int(self._random.integers(len(AGENTS)))
        born = [self._unborn.pop(0) for _ in range(num)]
        self.agents = born
        return {a: self._observation(a) for a in born}, {a: {"t": 0} for a in born[:1]}

    def _observation(self, agent: str) -> Any:
        number = AGENTS.index(agent)
        values = [number, self._num_obs[agent], self.t, self._random.random()]
        self._num_obs[agent] += 1
        return np.array(values, np.float32)

    def step(self, action_dict: Any) -> Any:
        config, rng = self.config, self._random
        if rng.random() < config["p_raise"]:
            raise OSError("scripted failure")
        acting = [a for a in self.agents if a not in self._waiting]
        assert set(action_dict) == set(acting), (set(action_dict), acting)
        for agent, action in action_dict.items():
            assert self.action_spaces[agent].contains(action), (agent, action)
        self.t += 1
        observations, rewards, terminateds, truncateds, infos = {}, {}, {}, {}, {}  # type: ignore[var-annotated]
        over = rng.random() < config["p_end"]
        truncated_over = over and rng.random() < 0.5
        for agent in list(self.agents):
            rewards[agent] = 100.0 * AGENTS.index(agent) + self.t
            dies = rng.random() < config["p_death"]
            is_cut = truncated_over or (dies and rng.random() < 0.5)
            if rng.random() < config["p_wait"] and not is_cut:
                self._waiting.add(agent)
            else:
                self._waiting.discard(agent)
                observations[agent] = self._observation(agent)
                if rng.random() < 0.2:
                    infos[agent] = {"t": self.t}
            if dies:
                (truncateds if is_cut else terminateds)[agent] = True
                self.agents.remove(agent)
                self._waiting.discard(agent)
        while self._unborn and rng.random() < config["p_birth"] and not over:
            agent = self._unborn.pop(0)
            self.agents.append(agent)
            observations[agent] = self._observation(agent)
        terminateds["__all__"] = over and not truncated_over
        truncateds["__all__"] = truncated_over
        return observations, rewards, terminateds, truncateds, infos


class TracingModule(TorchRLModule):
    """Stateful; its state tells whose it is: [number of acts, agent number, sum of steps]."""

    def setup(self) -> None:
        self.layer = torch.nn.Linear(4, self._num_outputs())

    def _num_outputs(self) -> int:
        return 3 if isinstance(self.action_space, gym.spaces.Discrete) else 4

    def get_initial_state(self) -> Any:
        return {"h": np.array([0.0, -1.0, 7.0], np.float32)}

    def _forward(self, batch: Any, **kwargs: Any) -> Any:
        observations = batch["obs"][:, 0]
        h = batch["state_in"]["h"]
        new = torch.stack([h[:, 0] + 1, observations[:, 0], h[:, 2] + observations[:, 1]], dim=1)
        return {"action_dist_inputs": self.layer(observations / 10).unsqueeze(1), "state_out": {"h": new}}


class SteadyModule(TorchRLModule):
    """Stateless."""

    def setup(self) -> None:
        self.layer = torch.nn.Linear(4, 3 if isinstance(self.action_space, gym.spaces.Discrete) else 4)

    def _forward(self, batch: Any, **kwargs: Any) -> Any:
        return {"action_dist_inputs": self.layer(batch["obs"] / 10)}
