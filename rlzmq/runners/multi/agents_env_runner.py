"""The env runner interface used by samplers of multi-agent episodes."""

from __future__ import annotations

from typing import Any

import torch

from rlzmq.config.base_config import BaseConfig
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.suggest import did_you_mean
from rlzmq.core.tree import tree_map
from rlzmq.envs.multi_agent_vector import SyncVectorMultiAgentEnv
from rlzmq.episodes.multi_agent_episode import default_agent_to_module_mapping_fn
from rlzmq.runners.module_step import to_numpy
from rlzmq.runners.sampling_runner import SamplingRunner

__all__ = ["AgentsEnvRunner"]


class AgentsEnvRunner(SamplingRunner):
    """A runner of several multi-agent environments and their modules."""

    env: SyncVectorMultiAgentEnv

    def __init__(self, *, config: BaseConfig, **kwargs: Any) -> None:
        self.counts_agent_steps = getattr(config, "count_steps_by", "env_steps") == "agent_steps"
        super().__init__(config=config, **kwargs)

    def mapping_fn(self, agent_id: Any, episode: Any) -> str:
        """Return the module id from ``config.policy_mapping_fn``, checked.

        Raises:
            ConfigurationError: It returned an unknown module id.
        """
        fn = getattr(self.config, "policy_mapping_fn", None) or default_agent_to_module_mapping_fn
        module_id = fn(agent_id, episode)
        if module_id not in self.multi_rl_module:
            raise ConfigurationError(
                f"policy_mapping_fn({agent_id!r}, episode) returned {module_id!r}, which is not a module."
                f"{did_you_mean(module_id, list(self.multi_rl_module.keys()))}"
            )
        return str(module_id)

    def forward(self, batch: dict[str, Any], explore: bool, t: int) -> Any:
        """Return the modules' forward passes on a batch by module id."""
        with torch.inference_mode():
            if explore:
                return self.multi_rl_module.forward_exploration(batch, t=t)
            return self.multi_rl_module.forward_inference(batch)

    def initial_state(self, module_id: Any) -> Any:
        """Return a module's state at an episode's start, as arrays without batch dimension."""
        return tree_map(to_numpy, self.multi_rl_module[module_id].get_initial_state())
