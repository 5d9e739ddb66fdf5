"""OffPolicyConfig: settings of algorithms that train on a replay buffer, and of those on recorded data."""

from __future__ import annotations

import dataclasses
import logging
import math
from dataclasses import replace
from typing import Any, ClassVar, Self

import gymnasium as gym

from rlzmq.algorithms.algorithm_config import AlgorithmConfig
from rlzmq.config.groups import TrainingSettings
from rlzmq.config.settings import Fraction, NonNegativeInt, Positive, PositiveInt, setting, settings, takes
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.synonyms import did_you_mean
from rlzmq.core.update_plan import Schedule, UpdatePlan
from rlzmq.envs.registry import resolve_env
from rlzmq.replay import ReplayBuffer, buffer_class

__all__ = ["OffPolicyConfig", "OffPolicySettings", "OfflineActorCriticConfig", "OfflineConfig", "check_no_lr"]

_logger = logging.getLogger(__name__)

# An update is committed as a whole, and nothing is sampled during it.
_MOST_BATCHES = 10_000
_SMOOTHING = "metrics_num_episodes_for_smoothing"


@settings
class OffPolicySettings(TrainingSettings):
    """Settings of replay buffers and target networks, in addition to those of `AlgorithmConfig.training`.

    Args:
        n_step: Number of rewards summed in a target, or a range ``(least, most)``, inclusive, from which the number
            is drawn for each row.
        replay_buffer_config: ``{"type": …, "capacity": …, "alpha": …, "beta": …}``; missing keys keep their defaults.
            The type is "EpisodeReplayBuffer" (uniform), "PrioritizedEpisodeReplayBuffer" (arXiv:1511.05952), whose
            beta may be a schedule over lifetime env steps, e.g. ``[(0, 0.4), (1_000_000, 1.0)]``,
            "HindsightEpisodeReplayBuffer" (arXiv:1707.01495) or your own subclass of `ReplayBuffer`; multi-agent runs
            use the variants "MultiAgent…", also under the single-agent name. The capacity is in env steps (multi-agent:
            in agent steps of each module) for all learners together. Other keys are arguments of the class, e.g.
            "metrics_num_episodes_for_smoothing", the number of newest samples over which results have the mean
            ``actual_n_step``.
        num_steps_sampled_before_learning_starts: Number of env steps sampled before the first update trains.
        training_intensity: Trained env steps, counting repetitions, per sampled env step; None: one batch for each
            round of `rollout_fragment_length` steps of all environments.
        target_network_update_freq: Number of sampled env steps between updates of the target networks; 0: an update
            after every minibatch.
        tau: Fraction in [0, 1] by which an update moves the target networks towards the trained ones.
    """

    n_step: PositiveInt | tuple[PositiveInt, PositiveInt] = 1
    replay_buffer_config: dict[str, Any] = setting(default={})
    num_steps_sampled_before_learning_starts: NonNegativeInt = 1000
    training_intensity: Positive | None = None
    target_network_update_freq: NonNegativeInt = 500
    tau: Fraction = 1.0


class OffPolicyConfig(AlgorithmConfig, OffPolicySettings):
    """Settings of an algorithm that trains on a replay buffer."""

    _defaults: ClassVar[dict[str, Any]] = {
        "replay_buffer_config": {
            "type": "PrioritizedEpisodeReplayBuffer",
            "capacity": 50_000,
            "alpha": 0.6,
            "beta": 0.4,
        },
        "min_sample_timesteps_per_iteration": 1000,
    }

    @takes(OffPolicySettings)
    def training(self) -> Self:
        """Set the training hyperparameters; see `OffPolicySettings`."""
        return self

    @property
    def replay_buffer_config(self) -> dict[str, Any]:  # type: ignore[override]
        """The replay buffer's settings: the defaults, overridden by the user's."""
        return {**self._defaults["replay_buffer_config"], **vars(self)["replay_buffer_config"]}

    @property
    def replay_buffer_class(self) -> type[ReplayBuffer]:
        """The class of the replay buffers.

        Raises:
            ConfigurationError: `replay_buffer_config` has no suitable type.
        """
        kind = self.replay_buffer_config["type"]
        try:
            return buffer_class(kind, self)
        except ValueError as error:
            raise ConfigurationError(f"config.replay_buffer_config['type']={kind!r}: {error}.") from None

    @property
    def n_step_range(self) -> tuple[int, int]:
        """The smallest and the largest n of the n-step targets."""
        n = self.n_step
        return (n, n) if isinstance(n, int) else n

    @property
    def train_ratio(self) -> float:
        """Trained env steps, counting repetitions, per sampled env step."""
        return self.training_intensity or self.total_train_batch_size / self._round_steps

    @property
    def _trains_sequences(self) -> bool:
        """Whether the model's settings define a stateful module."""
        model = self.model_config
        return bool(model.get("use_lstm")) or "max_seq_len" in model

    @property
    def _round_steps(self) -> int:
        """Number of env steps in one fragment from every environment."""
        num_envs = self.num_envs_per_env_runner * max(self.num_env_runners, 1)
        return self.get_rollout_fragment_length() * num_envs

    def get_rollout_fragment_length(self, worker_index: int = 0) -> int:
        """Return `rollout_fragment_length`; if it is "auto", the largest n of the n-step targets."""
        length = self.rollout_fragment_length
        return self.n_step_range[1] if length == "auto" else int(length)

    def build_notes(self) -> list[str]:
        notes = super().build_notes()
        if self.num_env_runners > 1 and self.training_intensity is None:
            notes.append(
                f"{self.num_env_runners} env runners: a batch is trained for every {self._round_steps} env steps, "
                f"{self.train_ratio:g} trained per sampled one, with one runner "
                f"{self.train_ratio * self.num_env_runners:g}. Set training_intensity="
                f"{self.train_ratio * self.num_env_runners:g} to keep that."
            )
        return notes

    def update_plan(self) -> UpdatePlan:
        """Return the plan: an update receives one round of fragments, and trains the batches due by `train_ratio`."""
        plan = super().update_plan()
        return dataclasses.replace(
            plan,
            env_steps_per_rank=-(-self._round_steps // plan.num_ranks),
            max_policy_lag=-1 if self.max_policy_lag is None else self.max_policy_lag,
            train_ratio=self.train_ratio,
            warm_up=self.num_steps_sampled_before_learning_starts,
            keeps_episodes=self.n_step_range[1] > 1 or self._trains_sequences,
        )

    def _check_own_settings(self) -> None:
        super()._check_own_settings()
        if self.num_epochs != 1 or self.minibatch_size is not None:
            raise ConfigurationError(
                f"config.num_epochs={self.num_epochs}, config.minibatch_size={self.minibatch_size}: each batch drawn "
                "from the replay buffer is one gradient step. Leave num_epochs at 1 and minibatch_size at None; set "
                "train_batch_size_per_learner, and training_intensity to train more."
            )
        check_no_compiled_update(self)
        self._check_buffer()

    def _check_buffer(self) -> None:
        given, defaults = self.replay_buffer_config, self._defaults["replay_buffer_config"]
        known = [*defaults, *self.replay_buffer_class.settings()]
        for name, value in given.items():
            where = f"config.replay_buffer_config[{name!r}]"
            if name not in known:
                raise ConfigurationError(f"{where}: no such key.{did_you_mean(name, known)}")
            if name in ("capacity", _SMOOTHING) and (not isinstance(value, int) or value < 1):
                what = "env steps" if name == "capacity" else "samples"
                raise ConfigurationError(f"{where}: expected a number of {what} >= 1, got {value!r}.")
            if name in ("alpha", "beta"):
                values = Schedule(value, where).values if name == "beta" else [value]
                if not all(isinstance(x, int | float) and 0.0 <= x < math.inf for x in values):
                    raise ConfigurationError(f"{where}: expected a number >= 0, got {value!r}.")
        least, most = self.n_step_range
        if least > most:
            raise ConfigurationError(
                f"config.n_step={self.n_step}: expected (least, most), got least > most."
            )
        ranks = max(self.num_learners, 1)
        capacity, batch = given["capacity"] // ranks, self.train_batch_size_per_learner
        share = f"replay_buffer_config['capacity']={given['capacity']}" + (
            f" leaves {capacity} env steps for each of {ranks} learners" if ranks > 1 else ""
        )
        if capacity < batch:
            raise ConfigurationError(
                f"config.{share}, fewer than train_batch_size_per_learner={batch}. Raise the capacity to "
                f"{batch * ranks} or more."
            )
        if most > capacity // 4:
            # Stretches of episodes have at most a quarter of the capacity.
            raise ConfigurationError(
                f"config.n_step={self.n_step}: config.{share}, and a sum of rewards may span a quarter of a buffer, "
                f"{capacity // 4} env steps. Raise the capacity to {4 * most * ranks} or more, or lower n_step."
            )
        longest = self._max_episode_steps()
        if longest is not None and most > longest:
            raise ConfigurationError(
                f"config.n_step={self.n_step}: an episode of {self.env} ends after at most {longest} steps "
                f"(max_episode_steps), so no sum has that many rewards. Lower n_step to {longest} or less."
            )
        total = self.total_train_batch_size
        due = self.train_ratio * self._round_steps / total
        if due > _MOST_BATCHES:
            raise ConfigurationError(
                f"config.training_intensity={self.training_intensity}: an update that takes in {self._round_steps} env "
                f"steps would train {due:.0f} batches of {total} env steps, at most {_MOST_BATCHES} fit. Lower "
                "training_intensity or rollout_fragment_length, or raise train_batch_size_per_learner."
            )

    def _max_episode_steps(self) -> int | None:
        """Return Gymnasium's limit on the length of episodes; None: there is none, or it is unknown."""
        gym_id = None if self.env is None else resolve_env(self.env).gym_id
        if gym_id is None:
            return None
        settings: dict[str, Any] = self.env_config or {}
        limit: int | None = settings.get("max_episode_steps", gym.spec(gym_id).max_episode_steps)
        return None if limit is None or limit < 0 else limit


def check_no_compiled_update(config: AlgorithmConfig) -> None:
    """Check that complete updates are not compiled, for algorithms with target networks.

    Raises:
        ConfigurationError: They are compiled.
    """
    if config.torch_compile_learner and config.torch_compile_learner_what_to_compile == "complete_update":
        raise ConfigurationError(
            "config.torch_compile_learner_what_to_compile='complete_update': priorities and target networks "
            "follow each step outside of torch. Use 'forward_train'."
        )


def check_no_lr(config: AlgorithmConfig, instead: str) -> None:
    """Check that `lr` is not set, for algorithms with several optimizers.

    Raises:
        ConfigurationError: It is set.
    """
    if config.lr is not None:
        raise ConfigurationError(
            f"config.lr={config.lr!r} has no effect: {config._algorithm} has several optimizers. Set {instead}."
        )


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
        if self.offline_evaluation_interval is not None and self.get_held_out_input() == self.input_:
            _logger.warning(
                "The evaluation on recorded data reads the data that are trained on, so it does not show how well the "
                "policy does elsewhere: set .evaluation(evaluation_config={'input_': 'data/held-out'})."
            )

    def get_held_out_input(self) -> str | list[str]:
        """Return the directory, or the files, of the recorded data for evaluation: those of training if it has none."""
        held_out: str | list[str] | None = self.get_evaluation_config_object().input_ or self.input_
        assert held_out is not None  # checked at build
        return held_out


class OfflineActorCriticConfig(OfflineConfig):
    """Settings of an offline algorithm with critics of actions, target networks and a squashed policy (CQL, IQL)."""

    _defaults: ClassVar[dict[str, Any]] = {"adam_epsilon": 1e-7}
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
