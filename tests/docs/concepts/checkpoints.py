"""Checkpoints: of an algorithm and of its parts, new instances from them, one module swapped out."""

from pathlib import Path

import numpy as np
import torch

from rlzmq import Algorithm, PPOConfig, RLModule, register_env
from rlzmq.envs.examples import MultiAgentPendulum

config = PPOConfig().environment("Pendulum-v1").env_runners(num_env_runners=0)
ppo = config.build()
ppo.train()
checkpoint_dir = ppo.save_to_path()
_weights_check = ppo.get_module("default_policy").get_state()
ppo.stop()

register_env("multi-pendulum", lambda cfg: MultiAgentPendulum({"num_agents": 2}))
multi_agent_config = (
    PPOConfig()
    .environment("multi-pendulum")
    .env_runners(num_env_runners=0)
    .multi_agent(policies={"p0", "p1"}, policy_mapping_fn=lambda aid, eps, **kw: f"p{aid}")
)
ppo = multi_agent_config.build()
ppo.train()
multi_agent_checkpoint_dir = ppo.save_to_path()
ppo.stop()

new_ppo = Algorithm.from_checkpoint(checkpoint_dir)
assert new_ppo.config.env == "Pendulum-v1"
new_ppo.train()
new_ppo.stop()

rl_module_checkpoint_dir = Path(checkpoint_dir) / "learner_group" / "learner" / "rl_module" / "default_policy"
rl_module = RLModule.from_checkpoint(rl_module_checkpoint_dir)
results = rl_module.forward_inference({"obs": torch.tensor([0.5, 0.25, -0.3]).unsqueeze(0).float()})
assert results["action_dist_inputs"].shape == (1, 2)

new_ppo = config.build()
new_ppo.restore_from_path(checkpoint_dir)
new_ppo.train()
new_ppo.stop()

config.callbacks(
    on_algorithm_init=(lambda algorithm, _dir=checkpoint_dir, **kw: algorithm.restore_from_path(_dir)),
)
restored = config.build()
assert restored.training_iteration == 1
restored.stop()

multi_rl_module_component_tree = "learner_group/learner/rl_module"


def _on_algo_init(algorithm, **kwargs):
    algorithm.restore_from_path(
        path=Path(checkpoint_dir) / multi_rl_module_component_tree / "default_policy",
        component=multi_rl_module_component_tree + "/p1",
    )


multi_agent_config.callbacks(on_algorithm_init=_on_algo_init)
swapped = multi_agent_config.build()
for name, array in swapped.get_module("p1").get_state().items():
    np.testing.assert_array_equal(array, _weights_check[name])
swapped.stop()
