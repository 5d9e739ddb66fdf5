"""A learner does without torch's graph only for losses, gradients and modules of this package, and trains the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlzmq import DQNConfig, SACConfig
from rlzmq.algorithms.ppo.ppo_learner import PPOLearner
from rlzmq.learners.learner import Learner
from rlzmq.modules.default_models.actor_critic import DefaultActorCriticModule
from rlzmq.modules.spec import RLModuleSpec
from tests.learners.cases import ACTION_SPACE, OBSERVATION_SPACE, episode_batch, ppo_config

RELU = {"fcnet_hiddens": [16, 16], "fcnet_activation": "relu", "vf_share_layers": False}


class WithPenalty(PPOLearner):
    """Differentiates by weights, which a recorded network's outputs do not depend on."""

    def compute_loss_for_module(self, **kwargs: Any) -> Tensor:
        loss = super().compute_loss_for_module(**kwargs)
        weight = self.module["default_policy"].pi.layers[0].weight
        (gradient,) = torch.autograd.grad(
            kwargs["fwd_out"]["action_dist_inputs"].sum(), weight, retain_graph=True
        )
        self.norm = float(gradient.norm())
        return loss


class OwnModule(DefaultActorCriticModule):
    pass


def build(
    learner_class: type[PPOLearner] = PPOLearner, module_class: Any = None, **settings: Any
) -> PPOLearner:
    config = ppo_config(RELU, **settings)
    spec = RLModuleSpec(
        module_class=module_class or DefaultActorCriticModule,
        observation_space=OBSERVATION_SPACE,
        action_space=ACTION_SPACE,
        model_config=RELU,
    )
    learner = learner_class(config=config, module_spec=spec)
    learner.build()
    return learner


def test_an_update_trains_to_the_bits_of_one_with_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = []
    for records in (True, False):
        learner = build(grad_clip=0.5, entropy_coeff=0.01)
        assert learner._can_record_networks()
        monkeypatch.setattr(learner, "_can_record_networks", lambda records=records: records)
        learner.update(episodes=episode_batch(30, 34))
        weights.append(torch.cat([p.detach().flatten() for p in learner.module.parameters()]))
    assert torch.equal(*weights)


def test_a_learner_of_ones_own_may_use_the_graph() -> None:
    learner: Any = build(WithPenalty)
    learner.update(episodes=episode_batch(30, 34))
    assert learner.norm > 0.0
    assert not learner._can_record_networks()


def test_a_module_of_ones_own_is_not_recorded() -> None:
    assert not build(module_class=OwnModule)._can_record_networks()


def test_a_compiled_learner_records_nothing() -> None:
    config = ppo_config(RELU).framework(
        torch_compile_learner=True, torch_compile_learner_dynamo_backend="eager"
    )
    spec = RLModuleSpec(observation_space=OBSERVATION_SPACE, action_space=ACTION_SPACE, model_config=RELU)
    learner = PPOLearner(config=config, module_spec=spec)
    learner.build()
    assert not learner._can_record_networks()


@pytest.mark.parametrize("config", [DQNConfig(), SACConfig()], ids=["DQN", "SAC"])
def test_replay_learners_train_to_the_same_bits(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config.environment("CartPole-v1" if isinstance(config, DQNConfig) else "Pendulum-v1").debugging(seed=3)
    config.training(train_batch_size_per_learner=16, num_steps_sampled_before_learning_starts=20)
    config.rl_module(model_config={"fcnet_hiddens": [8, 8], "fcnet_activation": "relu"})
    if isinstance(config, SACConfig):  # the sum of squared errors' gradients differs in its last bit
        config.training(td_error_loss_fn="huber")
    config.reporting(min_time_s_per_iteration=0, min_sample_timesteps_per_iteration=60)
    weights = []
    for records in (True, False):
        if not records:
            monkeypatch.setattr(Learner, "_can_record_networks", lambda self: False)
        with config.copy(copy_frozen=False).build_algo() as algo:
            algo.train()
            state = algo.learner_group.get_weights()["default_policy"]
            weights.append(np.concatenate([np.ravel(value) for value in state.values()]))
    assert np.array_equal(*weights)
