"""Learners of networks of one layer, which is set by hand, and transitions to compute their losses on."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch

from rlzmq import Columns
from rlzmq.core.tree import tree_leaves

STATES = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)


def assert_close(actual: Any, expected: Any, rtol: float = 1.3e-6, atol: float = 1e-5) -> None:
    """Compare trees of tensors. torch's own function imports sympy, for more than a second, in each process."""
    for mine, theirs in zip(tree_leaves(actual), tree_leaves(expected), strict=True):
        np.testing.assert_allclose(mine.detach(), theirs.detach(), rtol, atol)


def one_layer(config_class: Any, action_space: Any, observation_space: Any = STATES, **training: Any) -> Any:
    """Return a config whose networks have no hidden layers, and whose learner waits for no data."""
    config = config_class().environment(observation_space=observation_space, action_space=action_space)
    if "num_steps_sampled_before_learning_starts" in config:
        config.training(num_steps_sampled_before_learning_starts=0)
    return config.training(**training).rl_module(model_config={"fcnet_hiddens": []}).debugging(seed=0)


def set_layer(network: Any, weight: Any, bias: Any) -> None:
    """Set the layer of a network, or of a network's head."""
    layer = getattr(network, "head", network).layers[0]
    with torch.no_grad():
        layer.weight.copy_(torch.as_tensor(weight).expand_as(layer.weight))
        layer.bias.copy_(torch.as_tensor(bias))


def transitions(num: int = 1, **columns: Any) -> dict[str, Any]:
    """Return `num` rows of zeros with rewards of 1, which end no episode, but for what `columns` has."""
    rows = {
        Columns.OBS: torch.zeros(num, 2),
        Columns.NEXT_OBS: torch.zeros(num, 2),
        Columns.ACTIONS: torch.zeros(num, 1),
        Columns.REWARDS: torch.ones(num),
        Columns.TERMINATEDS: torch.zeros(num, dtype=torch.bool),
    }
    return {**rows, **{name: torch.as_tensor(values) for name, values in columns.items()}}


def loss_of(learner: Any, rows: dict[str, Any], outputs: Any = None) -> torch.Tensor:
    """Return the loss of the only module on these rows."""
    if outputs is None:
        outputs = learner.module["default_policy"].forward_train(rows)
    loss: torch.Tensor = learner.compute_loss_for_module(
        module_id="default_policy", config=learner.config, batch=rows, fwd_out=outputs
    )
    return loss
