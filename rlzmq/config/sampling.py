"""Settings of environments, sampling, modules and evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from rlzmq.config.settings import (
    Connector,
    NonNegative,
    NonNegativeInt,
    PositiveInt,
    fixed,
    setting,
    settings,
)

__all__ = [
    "EnvRunnersSettings",
    "EnvironmentSettings",
    "EvaluationSettings",
    "MultiAgentSettings",
    "RLModuleSettings",
    "StateSettings",
]


@settings
class EnvironmentSettings:
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

    env: Any = setting(default=None, kw_only=False)
    env_config: dict[str, Any] = setting(default={})
    observation_space: Any = None
    action_space: Any = None
    clip_rewards: bool | float | None = fixed(
        default=None,
        others=(False,),
        instead="wrap the environment: gymnasium.wrappers.ClipReward or TransformReward.",
    )
    normalize_actions: bool = True
    clip_actions: bool = False
    disable_env_checking: bool = False
    is_atari: bool | None = fixed(
        default=None, instead="wrap the environment: gymnasium.wrappers.AtariPreprocessing."
    )
    render_env: bool = fixed(default=False, instead="give environment(env_config={'render_mode': 'human'}).")
    action_mask_key: str = fixed(
        default="action_mask", instead="name that part of the observation space 'action_mask'."
    )


@settings
class EnvRunnersSettings:
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

    env_runner_cls: type | None = None
    num_env_runners: NonNegativeInt = 0
    create_local_env_runner: bool = fixed(default=True, others=(False,))
    create_env_on_local_worker: bool = fixed(
        default=False, instead="with runner processes the driver has no runner of its own."
    )
    num_envs_per_env_runner: PositiveInt = 1
    gym_env_vectorize_mode: Literal["sync", "async", "vector_entry_point"] = "sync"
    num_cpus_per_env_runner: NonNegative = fixed(
        default=1, instead="processes are not bound to CPUs; see learners(torch_num_threads=…)."
    )
    num_gpus_per_env_runner: NonNegative = fixed(default=0, instead="env runners act on the CPU.")
    custom_resources_per_env_runner: dict[str, float] = fixed(
        default={}, instead="name each runner's machine in the cluster file instead."
    )
    validate_env_runners_after_construction: bool = fixed(
        default=True, instead="a runner that cannot be made always fails at once."
    )
    sample_timeout_s: NonNegative | None = 60.0
    max_requests_in_flight_per_env_runner: PositiveInt = fixed(
        default=1, instead="the broker leases out the whole batch, so no runner waits for a request."
    )
    env_to_module_connector: Connector = None
    module_to_env_connector: Connector = None
    add_default_connectors_to_env_to_module_pipeline: bool = True
    add_default_connectors_to_module_to_env_pipeline: bool = True
    episode_lookback_horizon: NonNegativeInt = 1
    merge_env_runner_states: bool | Literal["training_only"] = "training_only"
    broadcast_env_runner_states: bool = fixed(
        default=True, instead="set env_runners(merge_env_runner_states=False) to keep them apart."
    )
    compress_observations: bool = fixed(
        default=False, instead="observations travel as they are, without a copy."
    )
    rollout_fragment_length: PositiveInt | Literal["auto"] = "auto"
    batch_mode: Literal["truncate_episodes", "complete_episodes"] = "truncate_episodes"
    explore: bool = True
    episodes_to_numpy: bool = fixed(
        default=True, instead="sampled episodes are numpy columns from the start."
    )
    max_policy_lag: NonNegativeInt | None = None


@settings
class _PerModuleSettings:
    """What is set otherwise for single modules.

    Args:
        algorithm_config_overrides_per_module: ``{module id: {setting: value}}``.
    """

    algorithm_config_overrides_per_module: dict[str, Any] = setting(default={})


@settings
class MultiAgentSettings(_PerModuleSettings):
    """Which module acts for which agent.

    Args:
        policies: Module ids: a set, list or tuple, or a dict from id to RLModuleSpec (or None).
        policy_mapping_fn: ``(agent_id, episode) -> module id``, asked once per agent and episode.
        policies_to_train: Module ids that are updated (None: all), or ``fn(module_id, batch) -> bool``.
        count_steps_by: What batch sizes count.
    """

    policies: Any = None
    policy_mapping_fn: Callable[..., Any] | None = None
    policies_to_train: Any = None
    count_steps_by: Literal["env_steps", "agent_steps"] = "env_steps"


@settings
class RLModuleSettings(_PerModuleSettings):
    """The neural networks.

    Args:
        model_config: A dict or `DefaultModelConfig`, over the algorithm's own defaults.
        rl_module_spec: An RLModuleSpec or MultiRLModuleSpec with what differs from the default.
    """

    model_config: Any = setting(default={})
    rl_module_spec: Any = None


@settings
class EvaluationSettings:
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

    evaluation_interval: PositiveInt | None = None
    evaluation_duration: PositiveInt | Literal["auto"] = 10
    evaluation_duration_unit: Literal["episodes", "timesteps"] = "episodes"
    evaluation_parallel_to_training: bool = False
    evaluation_num_env_runners: NonNegativeInt = 0
    evaluation_config: Any = None
    evaluation_sample_timeout_s: NonNegative | None = 120.0
    evaluation_auto_duration_min_env_steps_per_sample: PositiveInt = 100
    evaluation_auto_duration_max_env_steps_per_sample: PositiveInt = 2000
    evaluation_force_reset_envs_before_iteration: bool = True
    custom_evaluation_function: Callable[..., Any] | None = None


@settings
class StateSettings:
    """What the library sets itself.

    Args:
        in_evaluation: Whether this is the config of evaluation runners.
    """

    in_evaluation: bool = False
