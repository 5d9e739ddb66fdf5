"""Mix-in classes for optional RLModule features that learners need.

A module lists them as further base classes, ``class MyModule(TorchRLModule, ValueFunctionAPI)``; a
learner declares those it needs and reports a missing one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor

from rlzmq.config.base_config import BaseConfig

__all__ = [
    "InferenceOnlyAPI",
    "QNetAPI",
    "SelfSupervisedLossAPI",
    "TargetNetworkAPI",
    "ValueFunctionAPI",
]


class ValueFunctionAPI(ABC):
    """A module with state values: PPO, IMPALA, APPO and MARWIL need one."""

    @abstractmethod
    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> Tensor:
        """Return the state values of a train batch.

        Args:
            batch: The train batch, at least ``obs`` (and ``state_in`` if stateful).
            embeddings: What the module's own forward pass put under ``embeddings``; saves computing
                it again.

        Returns:
            Float ``[B]`` (``[B, T]`` if stateful), without a trailing dimension of 1.
        """


class InferenceOnlyAPI(ABC):
    """A module with parts that only learners need: env runners build and receive it without them."""

    @abstractmethod
    def get_non_inference_attributes(self) -> list[str]:
        """Return attributes that acting does not need, dotted paths allowed: ``["vf", "encoder.critic"]``.

        They are deleted after ``setup()`` if ``inference_only``, and left out of
        ``get_state(inference_only=True)``. Names that do not exist (yet) are ignored.
        """


class TargetNetworkAPI(ABC):
    """A module with target networks: DQN, SAC, APPO need one."""

    @abstractmethod
    def make_target_networks(self) -> None:
        """Create the target networks as copies. The learner calls it once, after building the module."""

    @abstractmethod
    def get_target_network_pairs(self) -> list[tuple[Any, Any]]:
        """Return pairs ``(main network, target network)`` of the same architecture."""

    @abstractmethod
    def forward_target(self, batch: dict[str, Any], **kwargs: Any) -> Any:
        """Compute the target networks' outputs on a train batch, without gradients."""


class QNetAPI(ABC):
    """A module with action values: DQN needs one."""

    @abstractmethod
    def compute_q_values(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Return the action values of a batch, at least ``obs`` (and ``state_in`` if stateful).

        Returns:
            ``"qf_preds"``: float ``[B, num_actions]``; distributional modules add ``"atoms"``
            ``[num_atoms]``, ``"qf_logits"`` and ``"qf_probs"`` ``[B, num_actions, num_atoms]``. Of stateful modules
            these have a time axis after B, and ``state_out`` comes with them.
        """

    def compute_advantage_distribution(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Return the advantage stream's outputs of a dueling module, keys as in ``compute_q_values``."""
        raise NotImplementedError(f"{type(self).__name__} has no advantage stream")


class SelfSupervisedLossAPI(ABC):
    """A module that defines its loss, e.g. a curiosity model; the learner uses it instead of its own."""

    @abstractmethod
    def compute_self_supervised_loss(
        self,
        *,
        learner: Any,
        module_id: str,
        config: BaseConfig,
        batch: dict[str, Any],
        fwd_out: dict[str, Any],
    ) -> Any:
        """Compute the loss of one minibatch.

        Args:
            learner: The calling Learner.
            module_id: This module's id.
            config: The AlgorithmConfig with this module's overrides.
            batch: The module's minibatch.
            fwd_out: What ``forward_train`` returned for it.

        Returns:
            A scalar tensor, or a dict of named scalar tensors whose ``total_loss`` is differentiated.
        """
