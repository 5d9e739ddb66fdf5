"""Settings of environments, sampling, recorded data, modules and evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from rlzmq.config.settings import (
    Connector,
    NonNegative,
    NonNegativeInt,
    PositiveInt,
    fixed,
    ignored,
    setting,
    settings,
)

__all__ = [
    "EnvRunnersSettings",
    "EnvironmentSettings",
    "EvaluationSettings",
    "MultiAgentSettings",
    "OfflineDataSettings",
    "RLModuleSettings",
    "StateSettings",
]


@settings
class EnvironmentSettings:
    """The environment.

    Args:
        env: A Gymnasium id, a name registered with `register_env`, an Env class or a callable that takes the
            env config, ``"package.module:Class"``, or ``"envpool/Task-v1"``.
        env_config: Passed to the env's constructor (as an `EnvContext`).
        wrappers: Wrappers of each single env, the first innermost: names in ``gymnasium.wrappers`` or
            ``"package.module:Class"``, with arguments as in ``"TimeLimit(max_episode_steps=200)"``; or callables.
        observation_space: Overrides the observation space of a single env.
        action_space: Overrides the action space of a single env.
        clip_rewards: Bound of the rewards' magnitude (True: 1), after all wrappers; None, False: no bound.
        normalize_actions: Whether modules act in [-1, 1] and bounded Box actions are rescaled for the env. A Box
            without some of its bounds is not rescaled, but clipped to the bounds that it has.
        clip_actions: Whether to clip Box actions to the bounds of the space (if not normalized).
        disable_env_checking: Whether to skip the check of the env's spaces and types at its creation.
        is_atari: Whether to apply the usual Atari preprocessing before `wrappers`: no-ops after a reset, every 4th
            frame, grey, 84×84, 4 frames stacked. None: no.
        render_env: Must be False: give ``env_config={"render_mode": "human"}`` instead.
        action_mask_key: Ignored: the key of the mask in Dict observations is "action_mask".
    """

    env: Any = setting(default=None, kw_only=False)
    env_config: dict[str, Any] = setting(default={})
    wrappers: list[Any] = setting(default=[])
    observation_space: Any = None
    action_space: Any = None
    clip_rewards: bool | float | None = None
    normalize_actions: bool = True
    clip_actions: bool = False
    disable_env_checking: bool = False
    is_atari: bool | None = None
    render_env: bool = fixed(default=False, instead="give environment(env_config={'render_mode': 'human'}).")
    action_mask_key: str = ignored(
        default="action_mask", instead="name that part of the observation space 'action_mask'."
    )


@settings
class EnvRunnersSettings:
    """Env runners: their number, their environments, and the connectors between env and module.

    Args:
        env_runner_cls: The EnvRunner class (None: the single- or multi-agent one, depending on the config).
        num_env_runners: Number of sampling processes; 0: the driver's process samples.
        create_local_env_runner: Has no effect; accepted for compatibility with RLlib. The driver has an env runner
            only if there are no others.
        create_env_on_local_worker: Has no effect; see `create_local_env_runner`.
        num_envs_per_env_runner: Number of vectorized envs in each env runner.
        gym_env_vectorize_mode: How envs are vectorized: "sync": stepped in turn; "async": one process per env;
            "vector_entry_point": the native vector version of the env.
        num_cpus_per_env_runner: Ignored: processes are not bound to CPUs.
        num_gpus_per_env_runner: Ignored: runners act on the CPU.
        custom_resources_per_env_runner: Ignored: a cluster file sets which machine has which env runners.
        validate_env_runners_after_construction: Ignored: an env runner that cannot be constructed fails at once.
        sample_timeout_s: Seconds without progress after which the work of an env runner is given to a free one, with
            a warning. No data is lost.
        max_requests_in_flight_per_env_runner: Ignored: the broker assigns the whole batch in advance, so env runners
            are always busy.
        env_to_module_connector: Callable ``(env, spaces, device)`` that returns a connector piece or a list of them.
        module_to_env_connector: Callable ``(env, spaces)`` that returns a connector piece or a list of them.
        add_default_connectors_to_env_to_module_pipeline: Whether the default connector pieces follow those of
            `env_to_module_connector`.
        add_default_connectors_to_module_to_env_pipeline: Whether the default connector pieces surround those of
            `module_to_env_connector`.
        episode_lookback_horizon: Number of past steps that each episode chunk keeps.
        merge_env_runner_states: Whether to merge the connector states of all env runners.
        broadcast_env_runner_states: Must be True: merged connector states are sent back to all env runners.
        compress_observations: Ignored: observations are sent uncompressed.
        rollout_fragment_length: Vector steps per fragment; "auto": derived from the batch size.
        batch_mode: "truncate_episodes": fragments may end within an episode; "complete_episodes": they may not.
        explore: Whether actions are sampled from the action distribution (otherwise its mode is used).
        episodes_to_numpy: Ignored: sampled episodes always consist of numpy arrays.
        max_policy_lag: Data that is more than this many weights versions old is dropped; None: `staleness`.
    """

    env_runner_cls: type | None = None
    num_env_runners: NonNegativeInt = 0
    create_local_env_runner: bool = fixed(default=True, others=(False,))
    create_env_on_local_worker: bool = fixed(default=False, others=(True,))
    num_envs_per_env_runner: PositiveInt = 1
    gym_env_vectorize_mode: Literal["sync", "async", "vector_entry_point"] = "sync"
    num_cpus_per_env_runner: NonNegative = ignored(
        default=1, instead="processes are not bound to CPUs; see learners(torch_num_threads=…)."
    )
    num_gpus_per_env_runner: NonNegative = ignored(default=0, instead="env runners act on the CPU.")
    custom_resources_per_env_runner: dict[str, float] = ignored(
        default={}, instead="name each runner's machine in the cluster file."
    )
    validate_env_runners_after_construction: bool = ignored(
        default=True, instead="an env runner that cannot be constructed always fails at once."
    )
    sample_timeout_s: NonNegative | None = 60.0
    max_requests_in_flight_per_env_runner: PositiveInt = ignored(
        default=1,
        instead="the broker assigns the whole batch in advance, so no env runner waits for a request.",
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
    compress_observations: bool = ignored(
        default=False, instead="observations are sent uncompressed and without a copy."
    )
    rollout_fragment_length: PositiveInt | Literal["auto"] = "auto"
    batch_mode: Literal["truncate_episodes", "complete_episodes"] = "truncate_episodes"
    explore: bool = True
    episodes_to_numpy: bool = ignored(
        default=True, instead="sampled episodes always consist of numpy arrays."
    )
    max_policy_lag: NonNegativeInt | None = None


@settings
class _PerModuleSettings:
    """Settings that differ between modules.

    Args:
        algorithm_config_overrides_per_module: ``{module id: {setting: value}}``.
    """

    algorithm_config_overrides_per_module: dict[str, Any] = setting(default={})


@settings
class MultiAgentSettings(_PerModuleSettings):
    """Which module acts for which agent.

    Args:
        policies: Module ids: a set, list or tuple, or a dict from id to RLModuleSpec (or None).
        policy_mapping_fn: ``(agent_id, episode) -> module id``, called once per agent and episode.
        policies_to_train: Ids of the modules to train (None: all), or ``fn(module_id, batch) -> bool``.
        count_steps_by: Unit of the batch sizes.
    """

    policies: Any = None
    policy_mapping_fn: Callable[..., Any] | None = None
    policies_to_train: Any = None
    count_steps_by: Literal["env_steps", "agent_steps"] = "env_steps"


@settings
class RLModuleSettings(_PerModuleSettings):
    """The neural networks.

    Args:
        model_config: A dict or `DefaultModelConfig` that overrides the algorithm's defaults.
        rl_module_spec: An RLModuleSpec or MultiRLModuleSpec; fields that are None are those of the default.
    """

    model_config: Any = setting(default={})
    rl_module_spec: Any = None


@settings
class EvaluationSettings:
    """Evaluation of the current weights: when, for how long, and with which settings.

    Args:
        evaluation_interval: Number of iterations between evaluations; None: no automatic evaluation.
        evaluation_duration: Episodes or timesteps per evaluation round over all evaluation runners. "auto": as long
            as the parallel training steps take, which needs `evaluation_parallel_to_training`.
        evaluation_duration_unit: The unit of `evaluation_duration`, unless that is "auto".
        evaluation_parallel_to_training: Whether to evaluate during an iteration, with the weights from its beginning,
            instead of after it; needs `evaluation_num_env_runners`.
        evaluation_num_env_runners: Number of evaluation processes; 0: the driver's process evaluates.
        evaluation_config: Settings that differ in evaluation, e.g. ``{"explore": False}``, or a whole config.
        evaluation_sample_timeout_s: Seconds after which a warning is logged that a round takes long; None: no warning.
        evaluation_auto_duration_min_env_steps_per_sample: With duration "auto", the minimum number of env steps in
            one sample call of an evaluation runner.
        evaluation_auto_duration_max_env_steps_per_sample: With duration "auto", the maximum number of env steps in
            one sample call of an evaluation runner.
        evaluation_force_reset_envs_before_iteration: Whether each round begins with new episodes.
        offline_evaluation_interval: Number of iterations between evaluations of an offline algorithm on recorded data
            that it does not train on; None: none. The data are ``evaluation_config={"input_": directory}``.
        offline_evaluation_type: "eval_loss" (or None): the loss of the current weights. "is", "pdis": estimates of the
            policy's discounted return by importance sampling of whole episodes, or per decision; the data need the
            column ``action_logp``.
        offline_evaluation_duration: Number of times that an evaluation reads
            `dataset_num_iters_per_offline_eval_runner` batches.
        offline_eval_batch_size_per_runner: Env steps per batch; with whole episodes, a lower bound of their mean.
        dataset_num_iters_per_offline_eval_runner: Number of batches; None: all of the data, once. The same batches are
            read in each evaluation.
        custom_evaluation_function: ``(algorithm, eval_env_runner_group) -> (results, env_steps,
            agent_steps)``, called instead of the built-in round.
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
    offline_evaluation_interval: PositiveInt | None = None
    offline_evaluation_type: Literal["eval_loss", "is", "pdis"] | None = None
    offline_evaluation_duration: PositiveInt = 1
    offline_eval_batch_size_per_runner: PositiveInt = 256
    dataset_num_iters_per_offline_eval_runner: PositiveInt | None = 1
    custom_evaluation_function: Callable[..., Any] | None = None


@settings
class StateSettings:
    """Settings that the library sets.

    Args:
        in_evaluation: Whether this is the config of evaluation runners.
    """

    in_evaluation: bool = False


_WRITE = "write the data as shards: rlzmq.replay.write_shard(directory, episodes), or `rlzmq record`."


@settings
class OfflineDataSettings:
    """Recorded data for offline algorithms, and recording of sampled episodes.

    Args:
        input_: Directory with shards or Parquet files at any depth, or a list of directories and files, on each
            learner's machine.
            Required by offline algorithms (BC, MARWIL, CQL, IQL), and only for these.
        dataset_num_iters_per_learner: Batches that each learner trains in an update; None: one epoch.
        input_read_method: Must be None: data are shards.
        input_read_episodes: Has no effect; accepted for compatibility with RLlib. A file's columns tell what it holds.
        input_read_sample_batches: Has no effect; see `input_read_episodes`.
        materialize_data: Has no effect; accepted for compatibility with RLlib. Files are mapped into memory.
        materialize_mapped_data: Has no effect; accepted for compatibility with RLlib. Batches are built for each
            update, with the current weights.
        output: Directory into which env runners write their sampled episodes as shards (`rlzmq inspect` shows them).
            Several runs may write into one. None: nothing is recorded.
        output_max_rows_per_file: Number of env steps after which an env runner writes a shard. Unfinished episodes
            are left for the next one.
        output_write_remaining_data: Whether to write episodes that are unfinished when an env runner ends, too.
    """

    input_: str | list[str] | None = None
    dataset_num_iters_per_learner: PositiveInt | None = None
    input_read_method: Any = fixed(default=None, instead=_WRITE)
    input_read_episodes: bool = fixed(default=True, others=(False,))
    input_read_sample_batches: bool = fixed(default=False, others=(True,))
    materialize_data: bool = fixed(default=False, others=(True,))
    materialize_mapped_data: bool = fixed(default=False, others=(True,))
    output: str | None = None
    output_max_rows_per_file: PositiveInt = 10_000
    output_write_remaining_data: bool = False
