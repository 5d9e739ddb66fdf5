"""Learners: groups and single ones, updates, states, checkpoints, a loss of one's own."""

import tempfile

import gymnasium as gym
import numpy as np
import torch

from rlzmq import (
    COMPONENT_OPTIMIZER,
    COMPONENT_RL_MODULE,
    Columns,
    Learner,
    PPOConfig,
    SingleAgentEnvRunner,
    TorchLearner,
    override,
)

config = PPOConfig().learners(num_learners=0, num_gpus_per_learner=0, num_cpus_per_learner=1)

env = gym.make("CartPole-v1")
settings = {
    "use_kl_loss": True,
    "kl_coeff": 0.01,
    "kl_target": 0.05,
    "clip_param": 0.2,
    "vf_clip_param": 0.2,
    "entropy_coeff": 0.05,
    "vf_loss_coeff": 0.5,
}
config = PPOConfig().learners(num_learners=1).training(**settings, num_epochs=1)
learner_group = config.build_learner_group(env=env)
config = PPOConfig().training(**settings, num_epochs=1)
learner = config.build_learner(env=env)
learner.build()

TIMESTEPS = {"num_env_steps_sampled_lifetime": 250}
BATCH = {
    "default_policy": {
        Columns.OBS: np.array([[0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 0.7, 0.8], [0.9, 1.0, 1.1, 1.2]], np.float32),
        Columns.ACTIONS: np.array([0, 1, 1]),
        Columns.REWARDS: np.array([1.0, -1.0, 0.5], np.float32),
        Columns.TERMINATEDS: np.array([False, False, True]),
        Columns.TRUNCATEDS: np.array([False, False, False]),
        Columns.VF_PREDS: np.array([0.5, 0.6, 0.7], np.float32),
        Columns.ACTION_DIST_INPUTS: np.array([[-2.0, 0.5], [-3.0, -0.3], [-0.1, 2.5]], np.float32),
        Columns.ACTION_LOGP: np.array([-0.5, -0.1, -0.2], np.float32),
        Columns.ADVANTAGES: np.array([0.1, 0.2, 0.3], np.float32),
        Columns.VALUE_TARGETS: np.array([0.5, 0.6, 0.7], np.float32),
    }
}
results = learner_group.update(batch=BATCH, timesteps=TIMESTEPS)
assert isinstance(results, list)
assert isinstance(results[0], dict)
result = learner.update(batch=BATCH, timesteps=TIMESTEPS)
assert "policy_loss" in result["default_policy"]

state = learner_group.get_state()
learner_group.set_state(state)
weights = learner_group.get_weights()
learner_group.set_weights(weights)

state = learner.get_state()
assert {COMPONENT_RL_MODULE, COMPONENT_OPTIMIZER} <= state.keys()
learner.set_state(state)
rl_module_only_state = learner.get_state(components=COMPONENT_RL_MODULE)
assert rl_module_only_state.keys() == {COMPONENT_RL_MODULE}
learner.module.set_state(rl_module_only_state[COMPONENT_RL_MODULE])

LEARNER_CKPT_DIR = tempfile.mkdtemp()
LEARNER_GROUP_CKPT_DIR = tempfile.mkdtemp()
learner_group.save_to_path(LEARNER_GROUP_CKPT_DIR)
learner_group.restore_from_path(LEARNER_GROUP_CKPT_DIR)
learner.save_to_path(LEARNER_CKPT_DIR)
learner.restore_from_path(LEARNER_CKPT_DIR)
learner_group.shutdown()


class BCTorchLearner(TorchLearner):
    @override(Learner)
    def compute_loss_for_module(self, *, module_id, config=None, batch, fwd_out):
        action_dist_class = self._module[module_id].get_train_action_dist_cls()
        action_dist = action_dist_class.from_logits(fwd_out[Columns.ACTION_DIST_INPUTS])
        loss = -torch.mean(action_dist.logp(batch[Columns.ACTIONS]))
        self.metrics.log_value((module_id, "bc_loss"), loss.item())
        return loss


config = (
    PPOConfig()
    .environment("CartPole-v1")
    .training(learner_class=BCTorchLearner, num_epochs=1)
    .env_runners(num_env_runners=0)
)
episodes = SingleAgentEnvRunner(config=config).sample(num_timesteps=64)
result = config.build_learner(env=env).update(episodes=episodes)
assert result["default_policy"]["bc_loss"] > 0.0
