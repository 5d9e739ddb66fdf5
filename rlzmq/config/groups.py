"""The settings of `AlgorithmConfig` by group: environments and sampling, learners and training, the run as a whole.

Settings that exist only in RLlib are rows of `rlzmq.config.rllib_only`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from rlzmq.config.settings import (
    Connector,
    Fits,
    Fraction,
    LearningRate,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    setting,
    settings,
)

__all__ = [
    "AllSettings",
    "CallbacksSettings",
    "CheckpointingSettings",
    "DebuggingSettings",
    "EnvRunnersSettings",
    "EnvironmentSettings",
    "EvaluationSettings",
    "ExperimentalSettings",
    "FaultToleranceSettings",
    "FrameworkSettings",
    "LearnersSettings",
    "MultiAgentSettings",
    "NetworkingSettings",
    "OfflineDataSettings",
    "RLModuleSettings",
    "RaySettings",
    "ReportingSettings",
    "StateSettings",
    "TrainingSettings",
]


def _is_derived_from(name: str) -> Callable[[Any], bool]:
    """Return a test for subclasses of a class, by its name: importing it would import torch."""
    return lambda value: (
        value is None or (isinstance(value, type) and any(base.__name__ == name for base in value.__mro__))
    )


def _is_table(value: object) -> bool:
    if not isinstance(value, Mapping):
        return value is None or (hasattr(value, "to_dict") and not isinstance(value, type))
    return all(isinstance(key, str) for key in value)


def _is_ids(value: Any) -> bool:
    is_collection = isinstance(value, Collection) and not isinstance(value, bytes)
    return value is None or (is_collection and all(isinstance(item, str) for item in value))


def _is_hooked(value: object) -> bool:
    items = value if isinstance(value, list | tuple) else [value]
    return all(item is None or callable(item) or hasattr(item, "on_train_result") for item in items)


Space = Annotated[
    Any, Fits(lambda value: value is None or hasattr(value, "contains"), "a gymnasium.spaces.Space or None")
]
ModuleIds = Annotated[Any, Fits(_is_ids, "module ids (a set, list or dict with names) or None")]
Table = Annotated[Any, Fits(_is_table, "a dict of settings by name, an object with to_dict(), or None")]


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
        clip_rewards: Bound of the magnitude of rewards, of each agent's (True: 1), after all wrappers; None, False: no
            bound.
        normalize_actions: Whether modules act in [-1, 1] and bounded Box actions are rescaled for the env. A Box
            without some of its bounds is not rescaled, but clipped to the bounds that it has.
        clip_actions: Whether to clip Box actions to the bounds of the space (if not normalized).
        disable_env_checking: Whether to skip the check of the env's spaces and types at its creation.
        is_atari: Whether to apply the usual Atari preprocessing before `wrappers`: no-ops after a reset, every 4th
            frame, grey, 84×84, 4 frames stacked. None: no.
    """

    env: Any = setting(default=None, kw_only=False)
    env_config: dict[str, Any] = setting(default={})
    wrappers: list[Any] = setting(default=[])
    observation_space: Space = None
    action_space: Space = None
    clip_rewards: bool | NonNegative | None = None
    normalize_actions: bool = True
    clip_actions: bool = False
    disable_env_checking: bool = False
    is_atari: bool | None = None


@settings
class EnvRunnersSettings:
    """Env runners: their number, their environments, and the connectors between env and module.

    Args:
        env_runner_cls: The EnvRunner class (None: the single- or multi-agent one, depending on the config).
        num_env_runners: Number of sampling processes; 0: the driver's process samples.
        num_envs_per_env_runner: Number of vectorized envs in each env runner.
        gym_env_vectorize_mode: How envs are vectorized: "sync": stepped in turn; "async": one process per env;
            "vector_entry_point": the native vector version of the env.
        sample_timeout_s: Seconds without progress after which the work of an env runner is given to a free one, with
            a warning. No data is lost.
        env_to_module_connector: Callable ``(env, spaces, device)`` that returns a connector piece or a list of them.
        module_to_env_connector: Callable ``(env, spaces)`` that returns a connector piece or a list of them.
        add_default_connectors_to_env_to_module_pipeline: Whether the default connector pieces follow those of
            `env_to_module_connector`.
        add_default_connectors_to_module_to_env_pipeline: Whether the default connector pieces surround those of
            `module_to_env_connector`.
        episode_lookback_horizon: Number of past steps that each episode chunk keeps.
        merge_env_runner_states: Whether to merge the connector states of all env runners.
        rollout_fragment_length: Vector steps per fragment; "auto": derived from the batch size.
        batch_mode: "truncate_episodes": fragments may end within an episode; "complete_episodes": they may not.
        explore: Whether actions are sampled from the action distribution (otherwise its mode is used).
        max_policy_lag: Data that is more than this many weights versions old is dropped; None: `staleness`.
    """

    env_runner_cls: Annotated[Any, Fits(_is_derived_from("EnvRunner"), "a subclass of EnvRunner or None")] = (
        None
    )
    num_env_runners: NonNegativeInt = 0
    num_envs_per_env_runner: PositiveInt = 1
    gym_env_vectorize_mode: Literal["sync", "async", "vector_entry_point"] = "sync"
    sample_timeout_s: NonNegative | None = 60.0
    env_to_module_connector: Connector = None
    module_to_env_connector: Connector = None
    add_default_connectors_to_env_to_module_pipeline: bool = True
    add_default_connectors_to_module_to_env_pipeline: bool = True
    episode_lookback_horizon: NonNegativeInt = 1
    merge_env_runner_states: bool | Literal["training_only"] = "training_only"
    rollout_fragment_length: PositiveInt | Literal["auto"] = "auto"
    batch_mode: Literal["truncate_episodes", "complete_episodes"] = "truncate_episodes"
    explore: bool = True
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

    policies: ModuleIds = None
    policy_mapping_fn: Callable[..., Any] | None = None
    policies_to_train: Callable[..., Any] | ModuleIds = None
    count_steps_by: Literal["env_steps", "agent_steps"] = "env_steps"


@settings
class RLModuleSettings(_PerModuleSettings):
    """The neural networks.

    Args:
        model_config: A dict or `DefaultModelConfig` that overrides the algorithm's defaults.
        rl_module_spec: An RLModuleSpec or MultiRLModuleSpec; fields that are None are those of the default.
    """

    model_config: Table = setting(default={})
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
    evaluation_config: Table = None
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


@settings
class OfflineDataSettings:
    """Recorded data for offline algorithms, and recording of sampled episodes.

    Args:
        input_: Directory with shards or Parquet files at any depth, or a list of directories and files, on each
            learner's machine.
            Required by offline algorithms (BC, MARWIL, CQL, IQL), and only for these.
        dataset_num_iters_per_learner: Batches that each learner trains in an update; None: one epoch.
        actions_in_input_normalized: Whether actions of Parquet files are those of a policy in [-1, 1], some of them
            beyond (an environment clips them). False: an action outside of [-1, 1] is an error if actions are
            normalized here. Shards tell by themselves.
        output: Directory into which env runners write their sampled episodes as shards (`rlzmq inspect` shows them).
            Several runs may write into one. None: nothing is recorded.
        output_max_rows_per_file: Number of env steps after which an env runner writes a shard. Unfinished episodes
            are left for the next one.
        output_write_remaining_data: Whether to write episodes that are unfinished when an env runner ends, too.
    """

    input_: str | list[str] | None = None
    dataset_num_iters_per_learner: PositiveInt | None = None
    actions_in_input_normalized: bool = False
    output: str | None = None
    output_max_rows_per_file: PositiveInt = 10_000
    output_write_remaining_data: bool = False


def _amp_dtype(value: object) -> object:
    """Return the name of a torch dtype."""
    name = str(value).removeprefix("torch.")
    if name in ("float16", "half"):
        raise PydanticCustomError(
            "float16",
            "losses in float16 have to be scaled, which learners do not do; bfloat16 has the range of float32 and "
            "needs no scaling",
        )
    return name if str(value).startswith("torch.") else value


AmpDtype = Annotated[Literal["bfloat16"], BeforeValidator(_amp_dtype)]


@settings
class _LearnerCodeSettings:
    """User code that learners run.

    Args:
        learner_class: The Learner class (None: the algorithm's default).
        learner_connector: Callable ``(observation_space, action_space)`` that returns a connector piece or a list of
            pieces.
        add_default_connectors_to_learner_pipeline: Whether the default connector pieces follow those of
            `learner_connector`.
        learner_config_dict: Free-form settings for custom learners, read as ``self.config.learner_config_dict``.
    """

    learner_class: Annotated[Any, Fits(_is_derived_from("Learner"), "a subclass of Learner or None")] = None
    learner_connector: Connector = None
    add_default_connectors_to_learner_pipeline: bool = True
    learner_config_dict: dict[str, Any] = setting(default={})


@settings
class LearnersSettings(_LearnerCodeSettings):
    """Learner processes.

    Args:
        num_learners: Number of learner processes, which average their gradients; 0: the driver's process trains.
        num_gpus_per_learner: GPUs per learner; more than 0 selects CUDA and NCCL. "auto": a GPU each if this machine
            has one for every learner, otherwise none.
        local_gpu_idx: Index of the GPU that a learner in the driver's process uses.
        torch_num_threads: Number of torch threads in each runner and learner process. "auto": 1; but a learner on the
            CPU whose modules have convolutions trains with up to 8: its share of the cores, less one for each env
            runner if they sample meanwhile (`staleness` >= 1).
    """

    num_learners: NonNegativeInt = 0
    num_gpus_per_learner: NonNegative | Literal["auto"] = 0.0
    local_gpu_idx: NonNegativeInt = 0
    torch_num_threads: PositiveInt | Literal["auto"] = "auto"


@settings
class TrainingSettings(_LearnerCodeSettings):
    """Training hyperparameters. Each algorithm adds its own.

    Args:
        gamma: Discount factor in [0, 1].
        lr: Learning rate, or a schedule ``[(0, v0), (t1, v1), …]`` over lifetime env steps.
        grad_clip: Gradient clipping threshold (None: no clipping).
        grad_clip_by: The quantity that `grad_clip` limits: each value, the norm of each tensor, or the global norm.
        adam_epsilon: Added to the denominator of Adam's steps; larger values make steps of small gradients smaller.
        train_batch_size: Env steps per update over all learners.
        train_batch_size_per_learner: Env steps per update and learner; takes precedence over `train_batch_size`.
        num_epochs: Number of passes over each train batch.
        minibatch_size: Rows per gradient step (None: the whole batch).
        shuffle_batch_per_epoch: Whether the rows are reshuffled before each epoch.
        staleness: Number of updates that the env runners may sample ahead of training. With 0, each update trains
            only on data sampled with the weights it starts from; otherwise no trained step is more than this many
            weights versions old.
    """

    gamma: Fraction = 0.99
    lr: LearningRate = 0.001
    grad_clip: NonNegative | None = None
    grad_clip_by: Literal["value", "norm", "global_norm"] = "global_norm"
    adam_epsilon: Positive = 1e-8
    train_batch_size: PositiveInt = 32
    train_batch_size_per_learner: PositiveInt | None = None
    num_epochs: PositiveInt = 1
    minibatch_size: PositiveInt | None = None
    shuffle_batch_per_epoch: bool = False
    staleness: NonNegativeInt = 0


@settings
class FrameworkSettings:
    """Torch options.

    Args:
        framework: "torch", the only choice.
        torch_amp_dtype: Data type in which learners run networks' forward and backward passes, by ``torch.autocast``:
            "bfloat16" (mixed precision); None: float32. Weights, gradients, optimizers, losses, and the last layer of
            the default models' heads stay float32, and so does acting. On GPUs it needs compute capability 8.0
            (Ampere). "float16" is not supported: its losses have to be scaled.
        torch_compile_learner: Compile parts of the learner with ``torch.compile``; the first updates then take
            seconds to minutes longer.
        torch_compile_learner_what_to_compile: "forward_train": the training forward pass of each module;
            "complete_update": forward pass, losses and their gradients on a minibatch, with a single learner only.
        torch_compile_learner_dynamo_backend: "inductor" (needs a C++ compiler on the CPU, Triton on a
            GPU), "aot_eager", "eager", …
        torch_compile_learner_dynamo_mode: Mode of the backend, e.g. "reduce-overhead" (None: its default).
    """

    framework: Literal["torch"] = setting(default="torch", kw_only=False)
    torch_amp_dtype: AmpDtype | None = None
    torch_compile_learner: bool = False
    torch_compile_learner_what_to_compile: Literal["forward_train", "complete_update"] = "forward_train"
    torch_compile_learner_dynamo_backend: str = "inductor"
    torch_compile_learner_dynamo_mode: str | None = None


@settings
class ReportingSettings:
    """Length of an iteration and contents of its result.

    Args:
        metrics_num_episodes_for_smoothing: Number of episodes over which returns and lengths are averaged.
        min_time_s_per_iteration: Minimum duration of an iteration in seconds; `train()` repeats updates until then.
        min_sample_timesteps_per_iteration: Minimum number of env steps to sample in an iteration.
        min_train_timesteps_per_iteration: Minimum number of env steps to train in an iteration.
        log_gradients: Whether to report the global norm of the gradients.
        connector_timers: Whether to time each connector piece (slows sampling down).
        custom_stats_cls_lookup: Dict from name to subclass of `StatsBase`, for
            ``metrics_logger.log_value(key, value, reduce="name")`` in every process.
    """

    metrics_num_episodes_for_smoothing: PositiveInt = 100
    min_time_s_per_iteration: NonNegative | None = None
    min_sample_timesteps_per_iteration: NonNegativeInt | None = 0
    min_train_timesteps_per_iteration: NonNegativeInt | None = 0
    log_gradients: bool = True
    connector_timers: bool = False
    custom_stats_cls_lookup: dict[str, Any] = setting(default={})


@settings
class CallbacksSettings:
    """User code that is called at the events of the run.

    Args:
        callbacks_class: A `Callback` subclass, or a list of them; called before the functions.
        callbacks_hooks: Dict from hook name to functions.
    """

    callbacks_class: Annotated[Any, Fits(_is_hooked, "a Callback class, or a list of them, or None")] = None
    callbacks_hooks: dict[str, Any] = setting(default={})


@settings
class FaultToleranceSettings:
    """Handling of processes and environments that die or hang.

    Args:
        restart_failed_env_runners: Whether to replace an env runner process that died.
        ignore_env_runner_failures: Whether to continue without env runners that died instead of replacing them.
        restart_failed_sub_environments: Whether to recreate a single environment that raised an error, and continue.
        num_consecutive_env_runner_failures_tolerance: Number of errors of an env runner's environments, without a
            finished episode in between, after which the run stops.
        env_failures_per_minute_tolerance: Number of environments of one env runner that may raise errors within 60 s.
            One more stops the run with an error that contains the seed and actions to reproduce it. None: no limit.
        restart_failed_learners: Whether to replace a learner rank that died.
        min_learners: Minimum number of learner ranks; with fewer survivors the run stops.
        restart_failed_broker: Whether to replace a broker that died.
        env_step_timeout_s: Maximum duration of a vector step in seconds; a slower env runner is considered hung and
            is replaced. None: max(30 s, 5 × its slowest recent step), and `env_reset_timeout_s` for the first step.
        env_reset_timeout_s: Maximum duration in seconds of creating and resetting the environments of an env runner.
        slow_call_warning_s: Seconds after which a call of your code that has not returned (env, callback, evaluation
            function, …) is named in the log, with its stack; again after twice the time, and so on. 0: never.
        driver_call_timeout_s: Maximum duration of such a call in the driver's process (also of an env's reset or step
            there), after which the run ends: with a last checkpoint if possible, and with exit code 70. None: no limit.
        quarantine_dir: Directory for fragments that are unusable for training or crash learners (None: in the run
            directory).
        env_runner_memory_limit_bytes: Limit of the private memory of an env runner process; a process that exceeds
            it, e.g. because its env leaks memory, ends and is replaced. None: no limit.
        learner_memory_limit_bytes: The same for learner processes.
        broker_memory_limit_bytes: The same for the broker's process. None: half of the machine's memory if the run
            listens for others (`listen`), else no limit.
        process_start_timeout_s: Maximum time in seconds for a process to start, import its code, and build its
            learner or its connectors and module; env runners have another env_reset_timeout_s for their environments.
            0: no limit.
        learner_timeout_s: Seconds without progress after which a collective operation of the learners fails.
        learner_snapshot_every_s: Most seconds between copies of the learner state to the driver's memory, from which
            the run continues if all learners die at once. Each copy transfers the weights and optimizer state of rank 0
            between two iterations; if that is fast, there is one a second, else they take 1 % of the time. None: no
            copies; the run is rolled back to the last checkpoint.
    """

    restart_failed_env_runners: bool = True
    ignore_env_runner_failures: bool = False
    restart_failed_sub_environments: bool = True
    num_consecutive_env_runner_failures_tolerance: NonNegativeInt = 100
    env_failures_per_minute_tolerance: NonNegativeInt | None = 4
    restart_failed_learners: bool = True
    min_learners: PositiveInt = 1
    restart_failed_broker: bool = True
    env_step_timeout_s: NonNegative | None = None
    env_reset_timeout_s: NonNegative = 300.0
    slow_call_warning_s: NonNegative = 60.0
    driver_call_timeout_s: NonNegative | None = None
    quarantine_dir: str | None = None
    env_runner_memory_limit_bytes: PositiveInt | None = None
    learner_memory_limit_bytes: PositiveInt | None = None
    broker_memory_limit_bytes: PositiveInt | None = None
    process_start_timeout_s: NonNegative = 300.0
    learner_timeout_s: NonNegative = 60.0
    learner_snapshot_every_s: NonNegative | None = 60.0


@settings
class NetworkingSettings:
    """Encrypted, authenticated connections from processes on other machines or in other terminals.

    Args:
        listen: ``"tcp://HOST:PORT"``, where the broker also listens, with CURVE keys generated for this run: on PORT
            for data, on PORT + 1 for weights (0: any free ports). HOST is the address of one interface, never a
            wildcard. ``rlzmq runner --join FILE`` then adds env runners at any time; with num_env_runners=0 there are
            no others. None: no network access.
        advertise: Host name or address at which other machines reach HOST, if it differs.
        join_file: Path of the join file for env runners (mode 0600; removed at the end of the run); learners join
            with ``*.learner.toml`` next to it. None: in the run's private directory.
        num_remote_learners: Number of the num_learners learners that join with ``rlzmq learner --join FILE`` instead
            of being started here; all of them, or 0.
    """

    listen: str | None = None
    advertise: str | None = None
    join_file: str | None = None
    num_remote_learners: NonNegativeInt = 0


@settings
class CheckpointingSettings:
    """Automatic checkpoints: how often they are written and how many are kept.

    Args:
        checkpoint_every_s: Seconds between checkpoints of `rlzmq train` and `Algorithm.keep_checkpoints`, from the
            first iteration on; None: only at the end.
        checkpoint_keep: Number of newest checkpoints to keep, besides the one with the best mean return.
        checkpoint_replay: Whether checkpoints contain every learner's replay buffer, and its position in recorded
            episodes (RLlib's store_buffer_in_checkpoints). Training waits while the buffers are copied, and the
            driver then holds two copies of all of them. False: a resumed run fills empty buffers by sampling.
    """

    checkpoint_every_s: NonNegative | None = 60.0
    checkpoint_keep: PositiveInt = 3
    checkpoint_replay: bool = False


@settings
class DebuggingSettings:
    """Seed, logging, and records of the training.

    Args:
        seed: Seed from which all random streams of the run are derived; None: drawn when the algorithm is built.
        log_level: Level of the ``rlzmq`` loggers in driver, runners and learners; None: unchanged.
        record_dir: Directory in which the learner records the training data of each update and a digest of the
            resulting weights, for `rlzmq replay` (``rlzmq train --record``: in the run directory). Needs a single
            learner and at least one process besides the driver's. None: nothing is recorded.
        trace: File for a trace of what each process did over time, for ui.perfetto.dev. "auto":
            trace.json in the run directory (`rlzmq train`), or in a trial's. None: no trace.
    """

    seed: NonNegativeInt | None = None
    log_level: Literal["DEBUG", "INFO", "WARN", "WARNING", "ERROR"] = "WARNING"
    record_dir: str | None = None
    trace: str | None = None


@settings
class RaySettings:
    """Settings of Ray, which are ignored or refused: see `rlzmq.config.rllib_only`."""


@settings
class ExperimentalSettings:
    """RLlib's experimental settings.

    Args:
        _validate_config: Whether `validate` checks that settings are consistent, e.g. when an Algorithm is built.
    """

    _validate_config: bool = True


class AllSettings(
    EnvironmentSettings,
    EnvRunnersSettings,
    LearnersSettings,
    TrainingSettings,
    EvaluationSettings,
    ReportingSettings,
    MultiAgentSettings,
    RLModuleSettings,
    CallbacksSettings,
    FaultToleranceSettings,
    NetworkingSettings,
    CheckpointingSettings,
    DebuggingSettings,
    OfflineDataSettings,
    FrameworkSettings,
    ExperimentalSettings,
    StateSettings,
):
    """The settings of every algorithm."""
