"""AlgorithmConfig: every setting of a run, with its type, default and meaning."""

from __future__ import annotations

import copy as copy_module
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, Unpack

from rlzmq.algorithms.config_builders import ConfigBuilders
from rlzmq.algorithms.config_copies import copy_value
from rlzmq.algorithms.config_io import ConfigIO
from rlzmq.algorithms.config_overrides import ConfigOverrides
from rlzmq.algorithms.fixed_settings import check_fixed
from rlzmq.algorithms.ray_settings import RAY_DEFAULTS, RaySettings
from rlzmq.algorithms.settings import (
    Connector,
    Field,
    Fraction,
    NonNegative,
    NonNegativeInt,
    NotProvided,
    PositiveInt,
    Schedule,
    collect_fields,
    setter,
)
from rlzmq.core.callbacks import HOOKS, Hooks, check_hook_names
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.metrics_stats import check_stats_cls_lookup
from rlzmq.core.suggest import did_you_mean
from rlzmq.core.update_plan import UpdatePlan
from rlzmq.envs.registry import adopt_registration, registration_of

if TYPE_CHECKING:
    from rlzmq.algorithms.algorithm import Algorithm

__all__ = ["AlgorithmConfig"]


_DEFAULTS: dict[str, Any] = {
    # environment
    "env": None, "env_config": {}, "observation_space": None, "action_space": None,
    "clip_rewards": None, "normalize_actions": True, "clip_actions": False,
    "disable_env_checking": False, "is_atari": None, "render_env": False,
    "action_mask_key": "action_mask",
    # env_runners
    "env_runner_cls": None, "num_env_runners": 0, "create_local_env_runner": True,
    "create_env_on_local_worker": False, "num_envs_per_env_runner": 1, "gym_env_vectorize_mode": "sync",
    "num_cpus_per_env_runner": 1, "num_gpus_per_env_runner": 0.0, "custom_resources_per_env_runner": {},
    "validate_env_runners_after_construction": True, "sample_timeout_s": 60.0,
    "max_requests_in_flight_per_env_runner": 1, "env_to_module_connector": None,
    "module_to_env_connector": None, "add_default_connectors_to_env_to_module_pipeline": True,
    "add_default_connectors_to_module_to_env_pipeline": True, "episode_lookback_horizon": 1,
    "merge_env_runner_states": "training_only", "broadcast_env_runner_states": True,
    "compress_observations": False, "rollout_fragment_length": "auto", "batch_mode": "truncate_episodes",
    "explore": True, "episodes_to_numpy": True, "max_policy_lag": None,
    # learners
    "num_learners": 0, "num_gpus_per_learner": 0.0, "num_cpus_per_learner": "auto",
    "num_aggregator_actors_per_learner": 0, "max_requests_in_flight_per_learner": 3, "local_gpu_idx": 0,
    "learner_class": None, "learner_connector": None, "add_default_connectors_to_learner_pipeline": True,
    "learner_config_dict": {}, "torch_num_threads": 1,
    # training
    "gamma": 0.99, "lr": 0.001, "grad_clip": None, "grad_clip_by": "global_norm", "train_batch_size": 32,
    "train_batch_size_per_learner": None, "staleness": 0, "num_epochs": 1, "minibatch_size": None,
    "shuffle_batch_per_epoch": False,
    # evaluation
    "evaluation_interval": None, "evaluation_duration": 10, "evaluation_duration_unit": "episodes",
    "evaluation_parallel_to_training": False, "evaluation_num_env_runners": 0, "evaluation_config": None,
    "evaluation_sample_timeout_s": 120.0, "evaluation_force_reset_envs_before_iteration": True,
    "evaluation_auto_duration_min_env_steps_per_sample": 100,
    "evaluation_auto_duration_max_env_steps_per_sample": 2000,
    "custom_evaluation_function": None, "in_evaluation": False,
    # reporting
    "metrics_num_episodes_for_smoothing": 100, "min_time_s_per_iteration": None,
    "min_sample_timesteps_per_iteration": 0, "min_train_timesteps_per_iteration": 0,
    "keep_per_episode_custom_metrics": False, "log_gradients": True, "connector_timers": False,
    "custom_stats_cls_lookup": {},
    # multi_agent
    "policies": None, "policy_mapping_fn": None, "policies_to_train": None, "count_steps_by": "env_steps",
    "algorithm_config_overrides_per_module": {},
    # rl_module
    "model_config": {}, "rl_module_spec": None,
    # callbacks
    "callbacks_class": None, "callbacks_hooks": {},
    # fault tolerance
    "restart_failed_env_runners": True, "ignore_env_runner_failures": False,
    "max_num_env_runner_restarts": 1000, "delay_between_env_runner_restarts_s": 0.1,
    "restart_failed_sub_environments": True, "num_consecutive_env_runner_failures_tolerance": 100,
    "env_failures_per_minute_tolerance": 4,
    "env_runner_health_probe_timeout_s": 30.0, "env_runner_restore_timeout_s": 1800.0,
    "restart_failed_learners": True, "min_learners": 1, "restart_failed_broker": True,
    "env_step_timeout_s": None, "env_reset_timeout_s": 300.0, "quarantine_dir": None, "durability": "memory",
    "journal_dir": None, "env_runner_memory_limit_bytes": None, "learner_memory_limit_bytes": None,
    "process_start_timeout_s": 300.0, "learner_timeout_s": 60.0, "learner_snapshot_every_s": 60.0,
    # networking
    "listen": None, "advertise": None, "join_file": None, "broker": None,
    "num_remote_learners": 0,
    # checkpointing
    "export_native_model_files": False, "checkpoint_every_s": 60.0, "checkpoint_keep": 3,
    # debugging
    "seed": None, "log_level": "WARNING", "log_sys_usage": False,
    # framework
    "framework": "torch", "torch_skip_nan_gradients": False, "torch_ddp_kwargs": {},
    "torch_compile_learner": False, "torch_compile_learner_what_to_compile": "forward_train",
    "torch_compile_learner_dynamo_backend": "inductor", "torch_compile_learner_dynamo_mode": None,
    "torch_compile_worker": False,
    **RAY_DEFAULTS,
}  # fmt: skip


class _DeclaresSettings(type):
    """What a subclass's ``__init__`` assigns are its settings and their defaults, as in RLlib.

    Once it has run, the names are fixed.
    """

    if not TYPE_CHECKING:  # to a type checker, calling a class gives an instance of that class

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            config = super().__call__(*args, **kwargs)
            object.__setattr__(config, "_is_declared", True)
            return config


class AlgorithmConfig(RaySettings, ConfigBuilders, ConfigOverrides, ConfigIO, metaclass=_DeclaresSettings):
    """The settings of a run: set fluently, checked at once, frozen when an Algorithm is built.

    Every setter returns the config itself. An unknown key, a value of the wrong type or out of
    range is refused at the call, with the closest valid name. Settings read as attributes.

    Example:
        >>> config = (
        ...     PPOConfig()
        ...     .environment("CartPole-v1")
        ...     .env_runners(num_env_runners=2, num_envs_per_env_runner=8)
        ...     .training(lr=3e-4, train_batch_size_per_learner=2000)
        ... )
        >>> config.lr
        0.0003
    """

    _fields: ClassVar[dict[str, Field]] = {}

    def __init__(self, algo_class: type[Algorithm] | None = None) -> None:
        object.__setattr__(self, "_is_declared", False)
        object.__setattr__(self, "_values", copy_module.deepcopy(_DEFAULTS))
        object.__setattr__(self, "_frozen", False)
        object.__setattr__(self, "_algo_class", algo_class)
        object.__setattr__(self, "_given", set())

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._fields = collect_fields(cls)

    # -- access ---------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("_values", {})
        if name in values:
            return values[name]
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"{type(self).__name__} has no setting {name!r}.{did_you_mean(name, values)}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._values and self._is_declared:
            raise AttributeError(
                f"{type(self).__name__} has no setting {name!r}.{did_you_mean(name, self._values)}"
            )
        if self._frozen:
            raise AttributeError(
                f"config.{name} cannot be set: this config is frozen, because an Algorithm was built from "
                "it. Change a copy: config.copy(copy_frozen=False)."
            )
        field = self._fields.get(name)
        value = value if field is None else field.check(value)
        check_fixed(name, value)
        self._values[name] = value
        if self._is_declared:
            self._given.add(name)

    def _default(self, **values: Any) -> None:
        """Set defaults of a subclass (unchecked, and not counted as given by the user)."""
        self._values.update(values)

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self, name)
        except AttributeError as error:
            raise KeyError(str(error)) from None

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def get(self, name: str, default: Any = None) -> Any:
        """The setting's value, or `default` where there is no such setting."""
        return getattr(self, name) if name in self else default

    def keys(self) -> list[str]:
        """The names of all settings."""
        return list(self._values)

    def items(self) -> Iterator[tuple[str, Any]]:
        """(name, value) of all settings."""
        return ((name, getattr(self, name)) for name in self._values)

    def diff(self) -> dict[str, Any]:
        """The settings that differ from this class's defaults."""
        defaults = type(self)()._values
        return {name: value for name, value in self._values.items() if not _same(value, defaults.get(name))}

    def given(self) -> dict[str, Any]:
        """The settings that were set explicitly, also those set to their default."""
        return {name: self._values[name] for name in self._given}

    def copy(self, copy_frozen: bool | None = None) -> Self:
        """A deep copy; frozen as the original is, unless `copy_frozen` says otherwise."""
        new = type(self)()
        object.__setattr__(new, "_values", copy_value(self._values))
        object.__setattr__(new, "_given", set(self._given))
        object.__setattr__(new, "_algo_class", self._algo_class)
        object.__setattr__(new, "_frozen", self._frozen if copy_frozen is None else copy_frozen)
        evaluation = new._values["evaluation_config"]
        if isinstance(evaluation, AlgorithmConfig) and copy_frozen is not None:
            object.__setattr__(evaluation, "_frozen", copy_frozen)
        return new

    def freeze(self) -> None:
        """From now on every assignment raises AttributeError; also to a config in `evaluation_config`."""
        object.__setattr__(self, "_frozen", True)
        if isinstance(self.evaluation_config, AlgorithmConfig):
            self.evaluation_config.freeze()

    @property
    def is_frozen(self) -> bool:
        """Whether this config belongs to a built Algorithm and cannot be changed."""
        return bool(self._frozen)

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.diff().items())
        return f"{type(self).__name__}({given})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_registration": registration_of(self._values["env"])}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        adopt_registration(state.pop("_registration", None))  # a copy in another process knows the env too
        for name, value in state.items():
            object.__setattr__(self, name, value)

    # -- setters --------------------------------------------------------------------------------

    @setter
    def environment(
        self,
        env: Any = NotProvided,
        *,
        env_config: dict[str, Any] = NotProvided,
        observation_space: Any = NotProvided,
        action_space: Any = NotProvided,
        clip_rewards: bool | float | None = NotProvided,
        normalize_actions: bool = NotProvided,
        clip_actions: bool = NotProvided,
        disable_env_checking: bool = NotProvided,
        is_atari: bool | None = NotProvided,
        render_env: bool = NotProvided,
        action_mask_key: str = NotProvided,
    ) -> Self:
        """What to learn in.

        Args:
            env: A Gymnasium id, a name given to `register_env`, an Env class or callable taking the
                env config, or ``"package.module:Class"``.
            env_config: Passed to the env's constructor (as an `EnvContext`).
            observation_space: Overrides the env's own single-env space.
            action_space: Overrides the env's own single-env space.
            clip_rewards: Only None or False: wrap the env instead (``gymnasium.wrappers.ClipReward``).
            normalize_actions: Modules act in [-1, 1]; bounded Box actions are scaled for the env.
            clip_actions: Clip Box actions to the space's bounds (when not normalised).
            disable_env_checking: Skip the check of the env's spaces and types when it is made.
            is_atari: Only None: wrap the env instead (``gymnasium.wrappers.AtariPreprocessing``).
            render_env: Only False: give ``env_config={"render_mode": "human"}`` instead.
            action_mask_key: Only "action_mask", the key of the mask in Dict observations.
        """
        return self

    @setter
    def env_runners(
        self,
        *,
        env_runner_cls: type | None = NotProvided,
        num_env_runners: NonNegativeInt = NotProvided,
        create_local_env_runner: bool = NotProvided,
        create_env_on_local_worker: bool = NotProvided,
        num_envs_per_env_runner: PositiveInt = NotProvided,
        gym_env_vectorize_mode: Literal["sync", "async", "vector_entry_point"] = NotProvided,
        num_cpus_per_env_runner: NonNegative = NotProvided,
        num_gpus_per_env_runner: NonNegative = NotProvided,
        custom_resources_per_env_runner: dict[str, float] = NotProvided,
        validate_env_runners_after_construction: bool = NotProvided,
        sample_timeout_s: NonNegative | None = NotProvided,
        max_requests_in_flight_per_env_runner: PositiveInt = NotProvided,
        env_to_module_connector: Connector = NotProvided,
        module_to_env_connector: Connector = NotProvided,
        add_default_connectors_to_env_to_module_pipeline: bool = NotProvided,
        add_default_connectors_to_module_to_env_pipeline: bool = NotProvided,
        episode_lookback_horizon: NonNegativeInt = NotProvided,
        merge_env_runner_states: bool | Literal["training_only"] = NotProvided,
        broadcast_env_runner_states: bool = NotProvided,
        compress_observations: bool = NotProvided,
        rollout_fragment_length: PositiveInt | Literal["auto"] = NotProvided,
        batch_mode: Literal["truncate_episodes", "complete_episodes"] = NotProvided,
        explore: bool = NotProvided,
        episodes_to_numpy: bool = NotProvided,
        max_policy_lag: NonNegativeInt | None = NotProvided,
    ) -> Self:
        """Who samples, how many envs each, and what lies between env and module.

        Args:
            env_runner_cls: The EnvRunner class (None: single- or multi-agent, by the config).
            num_env_runners: Sampling processes; 0 samples in the driver's own process.
            create_local_env_runner: Kept for RLlib's sake: the driver has a runner only if there are no others.
            create_env_on_local_worker: Only False, likewise.
            num_envs_per_env_runner: Vectorised envs in each runner.
            gym_env_vectorize_mode: How they are vectorised: in turn, a process each, or the env's own
                native vector form.
            num_cpus_per_env_runner: Only 1: processes are not bound to CPUs.
            num_gpus_per_env_runner: Only 0: runners act on the CPU.
            custom_resources_per_env_runner: Only {}: a cluster file says which machine has which runners.
            validate_env_runners_after_construction: Only True: a runner that cannot be made fails at once.
            sample_timeout_s: After so many seconds without progress another runner, if one is free, samples what
                this one should have; a warning names it. No data is lost by it.
            max_requests_in_flight_per_env_runner: Only 1: leases keep runners busy.
            env_to_module_connector: Callable ``(env, spaces, device)`` giving one piece or a list.
            module_to_env_connector: Callable ``(env, spaces)`` giving one piece or a list.
            add_default_connectors_to_env_to_module_pipeline: Whether the default pieces follow.
            add_default_connectors_to_module_to_env_pipeline: Whether the default pieces surround.
            episode_lookback_horizon: Steps of the past that each episode chunk carries along.
            merge_env_runner_states: Merge the connector states of all runners.
            broadcast_env_runner_states: Only True: merged connector states go back to all runners.
            compress_observations: Only False: observations travel uncompressed.
            rollout_fragment_length: Vector steps of one lease; "auto" sizes leases to the batch.
            batch_mode: Whether fragments may end inside an episode.
            explore: Whether sampling draws from the action distribution (else its mode).
            episodes_to_numpy: Only True: sampled episodes are always on numpy columns.
            max_policy_lag: Drop data that is more weights versions old than this; None: `staleness`.
        """
        return self

    @setter
    def learners(
        self,
        *,
        num_learners: NonNegativeInt = NotProvided,
        num_gpus_per_learner: NonNegative = NotProvided,
        num_cpus_per_learner: NonNegative | Literal["auto"] = NotProvided,
        num_aggregator_actors_per_learner: NonNegativeInt = NotProvided,
        max_requests_in_flight_per_learner: PositiveInt = NotProvided,
        local_gpu_idx: NonNegativeInt = NotProvided,
        learner_class: type | None = NotProvided,
        learner_connector: Connector = NotProvided,
        add_default_connectors_to_learner_pipeline: bool = NotProvided,
        learner_config_dict: dict[str, Any] = NotProvided,
        torch_num_threads: PositiveInt = NotProvided,
    ) -> Self:
        """Who learns.

        Args:
            num_learners: Learner processes (DDP ranks); 0 learns in the driver's own process.
            num_gpus_per_learner: GPUs of each learner; more than 0 means CUDA and NCCL.
            num_cpus_per_learner: Only "auto", 0 or 1, all the same; see torch_num_threads.
            num_aggregator_actors_per_learner: Only 0: each learner runs its own pipeline.
            max_requests_in_flight_per_learner: Only 3, without a meaning here: updates follow each other.
            local_gpu_idx: Which GPU a learner in the driver's process takes.
            learner_class: The Learner class (None: the algorithm's own).
            learner_connector: Callable ``(observation_space, action_space)`` giving one piece or a list.
            add_default_connectors_to_learner_pipeline: Whether the default pieces follow.
            learner_config_dict: Free-form settings for custom learners: ``self.config.learner_config_dict``.
            torch_num_threads: Torch threads of each runner and learner process.
        """
        return self

    @setter
    def training(
        self,
        *,
        gamma: Fraction = NotProvided,
        lr: Schedule = NotProvided,
        grad_clip: NonNegative | None = NotProvided,
        grad_clip_by: Literal["value", "norm", "global_norm"] = NotProvided,
        train_batch_size: PositiveInt = NotProvided,
        train_batch_size_per_learner: PositiveInt | None = NotProvided,
        num_epochs: PositiveInt = NotProvided,
        minibatch_size: PositiveInt | None = NotProvided,
        shuffle_batch_per_epoch: bool = NotProvided,
        staleness: NonNegativeInt = NotProvided,
        learner_class: type | None = NotProvided,
        learner_connector: Connector = NotProvided,
    ) -> Self:
        """How to learn (each algorithm adds its own settings here).

        Args:
            gamma: Discount factor in [0, 1].
            lr: Learning rate, or ``[(0, v0), (t1, v1), …]`` over lifetime env steps.
            grad_clip: Gradient clipping threshold; None: no clipping.
            grad_clip_by: What the threshold bounds: each value, each tensor's norm, the global norm.
            train_batch_size: Env steps of one update over all learners.
            train_batch_size_per_learner: Env steps of one update of each learner (wins over the other).
            num_epochs: Passes over each train batch.
            minibatch_size: Rows of one gradient step; None: the whole batch.
            shuffle_batch_per_epoch: Whether rows are shuffled anew for each epoch.
            learner_class, learner_connector: As in `learners()`.
        """
        return self

    @setter
    def evaluation(
        self,
        *,
        evaluation_interval: PositiveInt | None = NotProvided,
        evaluation_duration: PositiveInt | Literal["auto"] = NotProvided,
        evaluation_duration_unit: Literal["episodes", "timesteps"] = NotProvided,
        evaluation_parallel_to_training: bool = NotProvided,
        evaluation_num_env_runners: NonNegativeInt = NotProvided,
        evaluation_config: Any = NotProvided,
        evaluation_sample_timeout_s: NonNegative | None = NotProvided,
        evaluation_auto_duration_min_env_steps_per_sample: PositiveInt = NotProvided,
        evaluation_auto_duration_max_env_steps_per_sample: PositiveInt = NotProvided,
        evaluation_force_reset_envs_before_iteration: bool = NotProvided,
        custom_evaluation_function: Callable[..., Any] | None = NotProvided,
    ) -> Self:
        """When, how long and with what settings the current weights are evaluated.

        Args:
            evaluation_interval: Evaluate after every so many iterations; None: never by itself.
            evaluation_duration: Episodes or timesteps of one round over all evaluation runners; "auto": as long
                as the training steps beside it take, which needs `evaluation_parallel_to_training`.
            evaluation_duration_unit: The unit of `evaluation_duration`, unless that is "auto".
            evaluation_parallel_to_training: Evaluate the weights from before an iteration while that trains,
                not those from after it between two iterations; needs `evaluation_num_env_runners`.
            evaluation_num_env_runners: Processes for evaluation; 0 evaluates in the driver.
            evaluation_config: Settings that differ in evaluation, e.g. ``{"explore": False}``, or a whole config.
            evaluation_sample_timeout_s: A round that took longer than these seconds is warned of; None: never.
            evaluation_auto_duration_min_env_steps_per_sample: With "auto": a runner's one sample call takes so
                many env steps at least, …
            evaluation_auto_duration_max_env_steps_per_sample: … and so many at most.
            evaluation_force_reset_envs_before_iteration: Begin each round with fresh episodes.
            custom_evaluation_function: ``(algorithm, eval_env_runner_group) -> (results, env_steps,
                agent_steps)`` in place of the built-in round.
        """
        return self

    @setter
    def reporting(
        self,
        *,
        metrics_num_episodes_for_smoothing: PositiveInt = NotProvided,
        min_time_s_per_iteration: NonNegative | None = NotProvided,
        min_sample_timesteps_per_iteration: NonNegativeInt | None = NotProvided,
        min_train_timesteps_per_iteration: NonNegativeInt | None = NotProvided,
        keep_per_episode_custom_metrics: bool = NotProvided,
        log_gradients: bool = NotProvided,
        connector_timers: bool = NotProvided,
        custom_stats_cls_lookup: dict[str, Any] = NotProvided,
    ) -> Self:
        """What an iteration is and what its result says.

        Args:
            metrics_num_episodes_for_smoothing: Episodes in the windows of return and length.
            min_time_s_per_iteration: `train()` repeats updates until this many seconds have passed.
            min_sample_timesteps_per_iteration: … until so many env steps were sampled.
            min_train_timesteps_per_iteration: … until so many env steps were trained.
            keep_per_episode_custom_metrics: Only False: log with ``reduce="item_series"`` for lists.
            log_gradients: Report the global norm of gradients.
            connector_timers: Time every connector piece (costs sampling speed).
            custom_stats_cls_lookup: Names with subclasses of `StatsBase`, for
                ``metrics_logger.log_value(key, value, reduce="name")`` in every process.
        """
        return self

    @setter
    def multi_agent(
        self,
        *,
        policies: Any = NotProvided,
        policy_mapping_fn: Callable[..., Any] | None = NotProvided,
        policies_to_train: Any = NotProvided,
        count_steps_by: Literal["env_steps", "agent_steps"] = NotProvided,
        algorithm_config_overrides_per_module: dict[str, Any] = NotProvided,
    ) -> Self:
        """Which module acts for which agent.

        Args:
            policies: Module ids: a set, list or tuple, or a dict from id to RLModuleSpec (or None).
            policy_mapping_fn: ``(agent_id, episode) -> module id``, asked once per agent and episode.
            policies_to_train: Module ids that are updated (None: all), or ``fn(module_id, batch) -> bool``.
            count_steps_by: What batch sizes count.
            algorithm_config_overrides_per_module: ``{module id: {setting: value}}``.
        """
        return self

    @setter
    def rl_module(
        self,
        *,
        model_config: Any = NotProvided,
        rl_module_spec: Any = NotProvided,
        algorithm_config_overrides_per_module: dict[str, Any] = NotProvided,
    ) -> Self:
        """The neural networks.

        Args:
            model_config: A dict or `DefaultModelConfig`, over the algorithm's own defaults.
            rl_module_spec: An RLModuleSpec or MultiRLModuleSpec with what differs from the default.
            algorithm_config_overrides_per_module: As in `multi_agent()`.
        """
        return self

    def callbacks(self, callbacks_class: Any = NotProvided, **hooks: Unpack[Hooks]) -> Self:
        """Your code at the run's events.

        Args:
            callbacks_class: A `Callback` subclass, or a list of them; called before the functions.
            hooks: ``on_train_result=fn`` (or a list of functions) for any hook of `Callback`.
        """
        for name, functions in hooks.items():
            if name not in HOOKS:
                raise TypeError(f"callbacks() has no hook {name!r}.{did_you_mean(name, HOOKS)}")
            listed = list(functions) if isinstance(functions, list | tuple) else [functions]
            if not all(callable(fn) for fn in listed):
                raise ConfigurationError(f"callbacks({name}=…): expected callables, got {functions!r}.")
            setattr(self, "callbacks_hooks", {**self._values["callbacks_hooks"], name: listed})  # noqa: B010
        if callbacks_class is not NotProvided:
            for item in callbacks_class if isinstance(callbacks_class, list | tuple) else [callbacks_class]:
                check_hook_names(item)
            setattr(self, "callbacks_class", callbacks_class)  # noqa: B010
        return self

    @setter
    def fault_tolerance(
        self,
        *,
        restart_failed_env_runners: bool = NotProvided,
        ignore_env_runner_failures: bool = NotProvided,
        max_num_env_runner_restarts: NonNegativeInt = NotProvided,
        delay_between_env_runner_restarts_s: NonNegative = NotProvided,
        restart_failed_sub_environments: bool = NotProvided,
        num_consecutive_env_runner_failures_tolerance: NonNegativeInt = NotProvided,
        env_failures_per_minute_tolerance: NonNegativeInt | None = NotProvided,
        env_runner_health_probe_timeout_s: NonNegative = NotProvided,
        env_runner_restore_timeout_s: NonNegative = NotProvided,
        restart_failed_learners: bool = NotProvided,
        min_learners: PositiveInt = NotProvided,
        restart_failed_broker: bool = NotProvided,
        env_step_timeout_s: NonNegative | None = NotProvided,
        env_reset_timeout_s: NonNegative = NotProvided,
        quarantine_dir: str | None = NotProvided,
        durability: Literal["memory", "journal"] = NotProvided,
        journal_dir: str | None = NotProvided,
        env_runner_memory_limit_bytes: PositiveInt | None = NotProvided,
        learner_memory_limit_bytes: PositiveInt | None = NotProvided,
        process_start_timeout_s: NonNegative = NotProvided,
        learner_timeout_s: NonNegative = NotProvided,
        learner_snapshot_every_s: NonNegative | None = NotProvided,
    ) -> Self:
        """What happens when something dies or hangs.

        Args:
            restart_failed_env_runners: Replace a runner process that died.
            ignore_env_runner_failures: Go on without it instead.
            max_num_env_runner_restarts: Restarts over the run, all runners together.
            delay_between_env_runner_restarts_s: Seconds before the first restart; doubles up to 30.
            restart_failed_sub_environments: Recreate one env that raised, and go on.
            num_consecutive_env_runner_failures_tolerance: Failures in a row before the run stops.
            env_failures_per_minute_tolerance: How many of a runner's envs may raise within 60 s; one more stops
                the run, with seed and actions to reproduce it. None: any number.
            env_runner_health_probe_timeout_s: Only 30, without a meaning here: heartbeats find dead runners,
                env_step_timeout_s hung ones.
            env_runner_restore_timeout_s: Seconds that a restarted runner has to be ready.
            restart_failed_learners: Replace a learner rank that died.
            min_learners: Ranks below which the run stops instead of going on with the survivors.
            restart_failed_broker: Replace a broker that died.
            env_step_timeout_s: Seconds that a vector step may take; a runner whose step takes longer hangs and is
                replaced (None: max(30 s, 20 × its slowest usual step), and `env_reset_timeout_s` for the first).
            env_reset_timeout_s: The same for making and resetting a runner's environments.
            quarantine_dir: Where fragments go that poison or kill (None: in the run directory).
            durability: Where accepted fragments live until trained: "memory": in two processes' memory;
                "journal": in a journal on disk too, for a run that is resumed after all of it was killed.
            journal_dir: Where that journal is (`rlzmq train`: in the run directory).
            env_runner_memory_limit_bytes: Private memory beyond which a runner process (an env that leaks, say)
                ends and is replaced; None: no limit.
            learner_memory_limit_bytes: The same for a learner process.
            process_start_timeout_s: Seconds that a process of the run may take to start: to be made, to import, to
                build its learner or its connectors and module. An env runner has env_reset_timeout_s beside it, for
                its environments. 0: no limit.
            learner_timeout_s: Seconds after which a silent collective of the learners fails.
            learner_snapshot_every_s: Seconds between copies of the learners' state in the driver's memory,
                to go back to should all learners die at once; each costs the transfer of weights and
                optimizer state from rank 0, between two iterations. None: only what checkpoints leave.
        """
        return self

    @setter
    def networking(
        self,
        *,
        listen: str | None = NotProvided,
        advertise: str | None = NotProvided,
        join_file: str | None = NotProvided,
        broker: str | None = NotProvided,
        num_remote_learners: NonNegativeInt = NotProvided,
    ) -> Self:
        """Lets roles on other machines (or in other terminals) take part, encrypted and by key.

        Args:
            listen: ``"tcp://HOST:PORT"``: the broker also listens there with CURVE keys made for this run,
                for data on PORT and for weights on PORT + 1 (0: any free ports). HOST is one interface's
                address, never a wildcard. ``rlzmq runner --join FILE`` then adds runners at any time; with
                num_env_runners=0 they are the only ones. None: no network at all.
            advertise: The host name or address that other machines reach HOST by, where that differs.
            join_file: Where the file that lets runners in is written (mode 0600; removed at the end); its
                neighbour ``*.learner.toml`` lets learners in. None: into the run's private directory.
            broker: The ``*.driver.toml`` of a broker that ``rlzmq broker`` runs; None: the run has its own.
            num_remote_learners: How many of num_learners are not started here but come by
                ``rlzmq learner --join FILE``; all of them, or 0.
        """
        return self

    @setter
    def checkpointing(
        self,
        *,
        export_native_model_files: bool = NotProvided,
        checkpoint_every_s: NonNegative | None = NotProvided,
        checkpoint_keep: PositiveInt = NotProvided,
    ) -> Self:
        """When checkpoints are written by themselves and how many are kept.

        Args:
            export_native_model_files: Kept for RLlib's sake: modules are always plain safetensors files.
            checkpoint_every_s: Seconds between checkpoints of `rlzmq train` and `Algorithm.keep_checkpoints`;
                None: only at the end.
            checkpoint_keep: How many of the newest are kept; the best by mean return is kept beside them.
        """
        return self

    @setter
    def debugging(
        self,
        *,
        seed: NonNegativeInt | None = NotProvided,
        log_level: Literal["DEBUG", "INFO", "WARN", "WARNING", "ERROR"] = NotProvided,
        log_sys_usage: bool = NotProvided,
    ) -> Self:
        """Seed and logging.

        Args:
            seed: The run's one seed, from which every random stream derives; None: drawn at build.
            log_level: Of the ``rlzmq`` loggers in driver, runners and learners, once it is given.
            log_sys_usage: Only False.
        """
        return self

    @setter
    def framework(
        self,
        framework: Literal["torch"] = NotProvided,
        *,
        torch_skip_nan_gradients: bool = NotProvided,
        torch_ddp_kwargs: dict[str, Any] = NotProvided,
        torch_compile_learner: bool = NotProvided,
        torch_compile_learner_what_to_compile: Literal["forward_train", "complete_update"] = NotProvided,
        torch_compile_learner_dynamo_backend: str = NotProvided,
        torch_compile_learner_dynamo_mode: str | None = NotProvided,
        torch_compile_worker: bool = NotProvided,
    ) -> Self:
        """Torch's settings.

        Args:
            framework: "torch", the only one.
            torch_skip_nan_gradients: Kept for RLlib's sake: steps with non-finite gradients are
                always skipped and counted.
            torch_ddp_kwargs: Further arguments of DistributedDataParallel.
            torch_compile_learner: Compile parts of the learner with ``torch.compile``: the first updates take
                seconds to minutes longer.
            torch_compile_learner_what_to_compile: The modules' training forward passes, or the whole step on a
                minibatch (forward pass, losses, gradients, optimizers; one learner only).
            torch_compile_learner_dynamo_backend: "inductor" (needs a C++ compiler on the CPU, Triton on a
                GPU), "aot_eager", "eager", …
            torch_compile_learner_dynamo_mode: Inductor's mode, e.g. "reduce-overhead"; None: its default.
            torch_compile_worker: Only False: runners act through a fused path without a compiler.
        """
        return self

    # -- derived values -------------------------------------------------------------------------

    @property
    def train_batch_size_per_learner(self) -> int:
        """Env steps of one update of each learner."""
        size = self._values["train_batch_size_per_learner"]
        return int(size) if size else int(self.train_batch_size) // max(self.num_learners, 1)

    @property
    def total_train_batch_size(self) -> int:
        """Env steps of one update over all learners."""
        return int(self.train_batch_size_per_learner * max(self.num_learners, 1))

    @property
    def framework_str(self) -> str:
        """ "torch": the same as `framework`, which is also the name of a setter."""
        return str(self._values["framework"])

    @property
    def is_online(self) -> bool:
        """Whether runners sample what is trained; True, since there are no offline algorithms."""
        return True

    @property
    def is_offline(self) -> bool:
        """The opposite of `is_online`."""
        return not self.is_online

    @property
    def is_multi_agent(self) -> bool:
        """Whether there is more than the one default policy, learner-only modules beside it not counted."""
        ids = self.module_ids
        if self.policies is None and self.policy_mapping_fn is None and "default_policy" in ids:
            specs = getattr(self.rl_module_spec, "rl_module_specs", None) or {}
            ids = [
                module_id for module_id in ids if module_id not in specs or not specs[module_id].learner_only
            ]
        return len(ids) > 1 or "default_policy" not in ids

    @property
    def module_ids(self) -> list[str]:
        """The ids of all modules, in the order given (of a set: sorted)."""
        policies = self.policies
        if policies is None:
            spec = self.rl_module_spec
            specs = getattr(spec, "rl_module_specs", None)
            return list(specs) if isinstance(specs, dict) and specs else ["default_policy"]
        ordered = sorted(policies) if isinstance(policies, set | frozenset) else policies
        return [str(module_id) for module_id in ordered]

    def get_rollout_fragment_length(self, worker_index: int = 0) -> int:
        """Vector steps of a full lease of one runner.

        Args:
            worker_index: 1-based index of the runner (0: the local one); with "auto" the first
                runners take the remainder of an uneven division.
        """
        if self.rollout_fragment_length != "auto":
            return int(self.rollout_fragment_length)
        runners = max(self.num_env_runners, 1)
        per_runner, remainder = divmod(self.total_train_batch_size, self.num_envs_per_env_runner * runners)
        extra = remainder / self.num_envs_per_env_runner
        return int(per_runner) + (1 if max(worker_index, 1) - 1 < extra else 0)

    def update_plan(self) -> UpdatePlan:
        """What each update trains on. Algorithms override this where they train otherwise."""
        staleness = self.staleness
        return UpdatePlan(
            env_steps_per_rank=self.train_batch_size_per_learner,
            num_ranks=max(self.num_learners, 1),
            fragment_length=self.get_rollout_fragment_length(),
            staleness=staleness,
            max_policy_lag=staleness if self.max_policy_lag is None else self.max_policy_lag,
            open_updates=staleness + 1,
        )

    def should_update(self, module_id: str, batch: Any = None) -> bool:
        """Whether the module is one of `policies_to_train`; a function there is asked, with `batch`."""
        trained = self.policies_to_train
        if trained is None:
            return True
        return bool(trained(module_id, batch)) if callable(trained) else module_id in trained

    def validate(self) -> None:
        """Check what single settings cannot show: how they fit together.

        Raises:
            ConfigurationError: Names the settings, what was expected and what came.
        """
        if not self._validate_config:
            return
        if self.env is None and self.observation_space is None:
            raise ConfigurationError(
                "config.env is None: say what to learn in, e.g. .environment('CartPole-v1'), or give both "
                "observation_space and action_space."
            )
        learners = max(self.num_learners, 1)
        if not self._values["train_batch_size_per_learner"] and self.train_batch_size % learners:
            near = max(self.train_batch_size // learners, 1) * learners
            raise ConfigurationError(
                f"config.train_batch_size={self.train_batch_size} cannot be shared equally by "
                f"num_learners={self.num_learners}. Nearest that can: {near} or {near + learners}; or set "
                "train_batch_size_per_learner."
            )
        per_learner, minibatch = self.train_batch_size_per_learner, self.minibatch_size
        if minibatch is not None and minibatch > per_learner:
            raise ConfigurationError(
                f"config.minibatch_size={minibatch} is more than train_batch_size_per_learner={per_learner}. "
                f"Largest valid: {per_learner}."
            )
        fragment = self.rollout_fragment_length
        if fragment != "auto" and not self.staleness:
            whole = fragment * self.num_envs_per_env_runner * max(self.num_env_runners, 1)
            if whole > self.total_train_batch_size * 1.1:
                fitting = self.total_train_batch_size // (
                    self.num_envs_per_env_runner * max(self.num_env_runners, 1)
                )
                raise ConfigurationError(
                    f"config.rollout_fragment_length={fragment} × {self.num_envs_per_env_runner} envs × "
                    f"{max(self.num_env_runners, 1)} runners = {whole} env steps, more than the batch of "
                    f"{self.total_train_batch_size}. Largest that fits: {max(fitting, 1)}, or 'auto'."
                )
        self._validate_networking()
        self._validate_journal()
        self._validate_overrides()
        if callable(self.policies_to_train) or self.policies_to_train is None:
            unknown: list[str] = []
        else:
            unknown = [mid for mid in self.policies_to_train if mid not in self.module_ids]
        if unknown:
            raise ConfigurationError(
                f"config.policies_to_train names {unknown[0]!r}, which is no module id."
                + did_you_mean(unknown[0], self.module_ids)
            )
        if self.is_multi_agent and self.policy_mapping_fn is None:
            raise ConfigurationError(
                f"config.policies has the module ids {self.module_ids}, but config.policy_mapping_fn is None: "
                "give .multi_agent(policy_mapping_fn=lambda agent_id, episode: …)."
            )
        try:
            check_stats_cls_lookup(self.custom_stats_cls_lookup)
        except TypeError as error:
            raise ConfigurationError(f"config.{error}") from None
        for name in ("lr", "entropy_coeff"):
            _check_schedule(name, self.get(name))
        self._validate_evaluation()
        if self.torch_compile_learner_what_to_compile == "complete_update" and self.num_learners > 1:
            raise ConfigurationError(
                f"config.torch_compile_learner_what_to_compile='complete_update' with num_learners="
                f"{self.num_learners}: the ranks agree on each step outside of torch. Use 'forward_train'."
            )

    def _validate_evaluation(self) -> None:
        if self.evaluation_parallel_to_training and not self.evaluation_num_env_runners:
            raise ConfigurationError(
                "config.evaluation_parallel_to_training=True needs runners that evaluate while others train, but "
                "config.evaluation_num_env_runners=0. Set evaluation(evaluation_num_env_runners=1) or more."
            )
        if self.evaluation_duration == "auto" and not self.evaluation_parallel_to_training:
            raise ConfigurationError(
                "config.evaluation_duration='auto' means as long as the training steps beside it take: set "
                "evaluation(evaluation_parallel_to_training=True, evaluation_num_env_runners=1), or give a number."
            )
        least = self.evaluation_auto_duration_min_env_steps_per_sample
        most = self.evaluation_auto_duration_max_env_steps_per_sample
        if least > most:
            raise ConfigurationError(
                f"config.evaluation_auto_duration_min_env_steps_per_sample={least} is more than "
                f"evaluation_auto_duration_max_env_steps_per_sample={most}."
            )

    def _validate_journal(self) -> None:
        if self.durability == "journal":
            if self.journal_dir is None:
                raise ConfigurationError(
                    "config.durability='journal' needs config.journal_dir, e.g. 'runs/mine/journal'."
                )
            if self.broker is not None or not (self.num_env_runners or self.num_learners or self.listen):
                raise ConfigurationError(
                    "config.durability='journal' is kept by the run's own broker: set num_env_runners or "
                    "num_learners, and leave config.broker at None."
                )

    def _validate_networking(self) -> None:
        if self.listen is not None:
            from rlzmq.net.addresses import check_bind_address, split_tcp

            check_bind_address(self.listen, has_keys=True)
            split_tcp(self.listen)  # nothing but TCP
        for name in ("advertise", "join_file"):
            if self.get(name) is not None and self.listen is None:
                raise ConfigurationError(f"config.{name} needs config.listen, e.g. 'tcp://10.0.0.5:5555'.")
        if self.broker is not None and self.listen is not None:
            raise ConfigurationError("config.broker listens by itself: leave config.listen at None.")
        remote, total = self.num_remote_learners, self.num_learners
        if remote and (remote != total or self.listen is None):
            raise ConfigurationError(
                f"config.num_remote_learners={remote} with num_learners={total} and listen={self.listen!r}: "
                "learners are all remote (equal numbers, and listen set), or all local (0)."
            )


def _check_schedule(name: str, value: Any) -> None:
    if not isinstance(value, list):
        return
    times = [point[0] for point in value]
    if len(value) < 2 or times[0] != 0 or any(b <= a for a, b in itertools.pairwise(times)):
        raise ConfigurationError(
            f"config.{name}={value!r}: a schedule is a list of at least two (env steps, value) points that "
            "begins at 0 and rises, e.g. [(0, 0.001), (100000, 0.0001)]."
        )


def _same(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except (ValueError, TypeError):
        return a is b


AlgorithmConfig._fields = collect_fields(AlgorithmConfig)
