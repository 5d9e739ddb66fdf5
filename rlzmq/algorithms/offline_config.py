"""OfflineConfig: base class of the configs of algorithms that train on recorded data."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from rlzmq.algorithms.algorithm_config import AlgorithmConfig
from rlzmq.algorithms.off_policy import check_no_compiled_update, check_no_lr
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.update_plan import UpdatePlan

__all__ = ["OfflineActorCriticConfig", "OfflineConfig"]


class OfflineConfig(AlgorithmConfig):
    """Settings of a run that does not sample. Its learners read shards from `offline_data(input_=…)`."""

    def update_plan(self) -> UpdatePlan:
        """Return a plan without fresh env steps, one update at a time."""
        return replace(
            super().update_plan(), env_steps_per_rank=0, staleness=0, max_policy_lag=0, open_updates=1
        )

    def _check_own_settings(self) -> None:
        super()._check_own_settings()
        name = type(self).__name__
        if self.is_multi_agent:
            raise ConfigurationError(
                f"config.policies={self.module_ids}: {name} trains on recorded data, which is of single-agent "
                "environments only."
            )
        if self.input_ is None:
            raise ConfigurationError(
                f"config.input_ is None: {name} trains on recorded data. Set the directory of its shards: "
                ".offline_data(input_='data/expert'). `rlzmq record CHECKPOINT --output data/expert` makes one."
            )
        if self.num_env_runners:
            raise ConfigurationError(
                f"config.num_env_runners={self.num_env_runners}: {name} trains on recorded data and samples nothing. "
                "Set it to 0; .evaluation(evaluation_num_env_runners=…) evaluates in other processes."
            )
        if self.min_sample_timesteps_per_iteration:
            raise ConfigurationError(
                f"config.min_sample_timesteps_per_iteration={self.min_sample_timesteps_per_iteration}: {name} samples "
                "nothing, so an iteration would never end. Leave it at 0, and set min_train_timesteps_per_iteration."
            )
        if self.offline_evaluation_interval is not None:
            self.get_held_out_input()

    def get_held_out_input(self) -> str | list[str]:
        """Return the directory, or the files, of the recorded data for evaluation.

        Raises:
            ConfigurationError: There are none, or they are the data to train on.
        """
        held_out: str | list[str] | None = self.get_evaluation_config_object().input_
        if held_out is None or held_out == self.input_:
            raise ConfigurationError(
                f"config.evaluation_config={self.evaluation_config!r}: an evaluation on recorded data needs data that "
                f"are not trained on, got input_={held_out!r}. Set .evaluation(evaluation_config={{'input_': "
                "'data/held-out'})."
            )
        return held_out


class OfflineActorCriticConfig(OfflineConfig):
    """Settings of an offline algorithm with critics of actions, target networks and a squashed policy (CQL, IQL)."""

    _learning_rates: ClassVar[str]
    """Names of the three learning rates, for error messages."""

    def _check_own_settings(self) -> None:
        super()._check_own_settings()
        check_no_compiled_update(self)
        check_no_lr(self, self._learning_rates)
        if not self.normalize_actions:
            raise ConfigurationError(
                f"config.normalize_actions=False: {self._algorithm}'s actions lie in (-1, 1) and are scaled to the "
                "bounds of the action space. Leave it at True, and record or import the data with it."
            )
