"""Mix-in classes for optional RLModule features that learners need.

A module lists them as additional base classes, ``class MyModule(TorchRLModule, ValueFunctionAPI)``. A learner declares
the ones that it needs and reports a missing one.
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
    """A module with state values, for PPO, IMPALA, APPO and MARWIL."""

    @abstractmethod
    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> Tensor:
        """Return the state values of a train batch.

        Args:
            batch: The train batch, with at least ``obs`` (and ``state_in`` if stateful).
            embeddings: The column ``embeddings`` of the module's own forward pass, which saves computing it again.

        Returns:
            Float ``[B]`` (``[B, T]`` if stateful), without a trailing dimension of 1.
        """


class InferenceOnlyAPI(ABC):
    """A module with parts that only learners need. Env runners build and receive it without them."""

    @abstractmethod
    def get_non_inference_attributes(self) -> list[str]:
        """Return attributes that acting does not need; dotted paths are allowed: ``["vf", "encoder.critic"]``.

        They are deleted after ``setup()`` if ``inference_only``, and left out of ``get_state(inference_only=True)``.
        Names that do not exist (yet) are ignored.
        """


class TargetNetworkAPI(ABC):
    """A module with target networks, for DQN, SAC and APPO."""

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
    """A module with action values, for DQN."""

    @abstractmethod
    def compute_q_values(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Return the action values of a batch with at least ``obs`` (and ``state_in`` if stateful).

        Returns:
            ``"qf_preds"``: float ``[B, num_actions]``; distributional modules add ``"atoms"``
            ``[num_atoms]``, ``"qf_logits"`` and ``"qf_probs"`` ``[B, num_actions, num_atoms]``. For stateful modules
            these have a time axis after B, and ``state_out`` is included.
        """

    def rank_actions(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Return outputs whose ``qf_preds`` rank each row's actions as their values do; by default the values.

        A module may leave out what all actions of a row share.
        """
        return self.compute_q_values(batch)

    def compute_advantage_distribution(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Return the outputs of a dueling module's advantage stream, with the keys of ``compute_q_values``."""
        raise NotImplementedError(f"{type(self).__name__} has no advantage stream")


class SelfSupervisedLossAPI(ABC):
    """A module that defines its own loss, e.g. a curiosity model. The learner uses it instead of the learner's loss."""

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
            fwd_out: The output of ``forward_train`` for the minibatch.

        Returns:
            A scalar tensor, or a dict of named scalar tensors whose ``total_loss`` is differentiated.
        """
