"""TrainingSettings: the settings of `AlgorithmConfig.training` as a type, for the algorithms that add to them."""

from __future__ import annotations

from typing import Literal, TypedDict

from rlzmq.algorithms.settings import (
    Connector,
    Fraction,
    NonNegative,
    NonNegativeInt,
    PositiveInt,
    Schedule,
)

__all__ = ["TrainingSettings"]


class TrainingSettings(TypedDict, total=False):
    """What a subclass's ``training(…, **inherited: Unpack[TrainingSettings])`` takes, so that editors and type
    checkers know it. The settings are explained there."""

    gamma: Fraction
    lr: Schedule
    grad_clip: NonNegative | None
    grad_clip_by: Literal["value", "norm", "global_norm"]
    train_batch_size: PositiveInt
    train_batch_size_per_learner: PositiveInt | None
    num_epochs: PositiveInt
    minibatch_size: PositiveInt | None
    shuffle_batch_per_epoch: bool
    staleness: NonNegativeInt
    learner_class: type | None
    learner_connector: Connector
