"""Settings of a run as a whole: results, callbacks, fault tolerance, networking, checkpoints, logging."""

from __future__ import annotations

from typing import Any, Literal

from rlzmq.config.settings import NonNegative, NonNegativeInt, PositiveInt, fixed, setting, settings

__all__ = [
    "CallbacksSettings",
    "CheckpointingSettings",
    "DebuggingSettings",
    "FaultToleranceSettings",
    "NetworkingSettings",
    "ReportingSettings",
]


@settings
class ReportingSettings:
    """Length of an iteration and contents of its result.

    Args:
        metrics_num_episodes_for_smoothing: Number of episodes over which returns and lengths are averaged.
        min_time_s_per_iteration: Minimum duration of an iteration in seconds; `train()` repeats updates until then.
        min_sample_timesteps_per_iteration: Minimum number of env steps to sample in an iteration.
        min_train_timesteps_per_iteration: Minimum number of env steps to train in an iteration.
        keep_per_episode_custom_metrics: Must be False: log with ``reduce="item_series"`` to get lists.
        log_gradients: Whether to report the global norm of the gradients.
        connector_timers: Whether to time each connector piece (slows sampling down).
        custom_stats_cls_lookup: Dict from name to subclass of `StatsBase`, for
            ``metrics_logger.log_value(key, value, reduce="name")`` in every process.
    """

    metrics_num_episodes_for_smoothing: PositiveInt = 100
    min_time_s_per_iteration: NonNegative | None = None
    min_sample_timesteps_per_iteration: NonNegativeInt | None = 0
    min_train_timesteps_per_iteration: NonNegativeInt | None = 0
    keep_per_episode_custom_metrics: bool = fixed(
        default=False, instead='log with metrics_logger.log_value(key, value, reduce="item_series").'
    )
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

    callbacks_class: Any = None
    callbacks_hooks: dict[str, Any] = setting(default={})


@settings
class FaultToleranceSettings:
    """Handling of processes and environments that die or hang.

    Args:
        restart_failed_env_runners: Whether to replace an env runner process that died.
        ignore_env_runner_failures: Whether to continue without env runners that died instead of replacing them.
        max_num_env_runner_restarts: Maximum number of restarts of all env runners over the run.
        delay_between_env_runner_restarts_s: Seconds before the first restart; doubled with each further one, up to 30.
        restart_failed_sub_environments: Whether to recreate a single environment that raised an error, and continue.
        num_consecutive_env_runner_failures_tolerance: Number of consecutive failures after which the run stops.
        env_failures_per_minute_tolerance: Number of environments of one env runner that may raise errors within 60 s.
            One more stops the run with an error that contains the seed and actions to reproduce it. None: no limit.
        env_runner_health_probe_timeout_s: Must be 30; has no effect. Heartbeats detect dead env runners,
            env_step_timeout_s detects hung ones.
        env_runner_restore_timeout_s: Seconds within which a restarted env runner must be ready.
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
        learner_snapshot_every_s: Seconds between copies of the learner state to the driver's memory, from which the
            run continues if all learners die at once. Each copy transfers the weights and optimizer state of rank 0
            between two iterations. None: no copies; the run is rolled back to the last checkpoint.
    """

    restart_failed_env_runners: bool = True
    ignore_env_runner_failures: bool = False
    max_num_env_runner_restarts: NonNegativeInt = 1000
    delay_between_env_runner_restarts_s: NonNegative = 0.1
    restart_failed_sub_environments: bool = True
    num_consecutive_env_runner_failures_tolerance: NonNegativeInt = 100
    env_failures_per_minute_tolerance: NonNegativeInt | None = 4
    env_runner_health_probe_timeout_s: NonNegative = fixed(
        default=30,
        instead="heartbeats detect dead env runners; fault_tolerance(env_step_timeout_s=…) detects hung ones.",
    )
    env_runner_restore_timeout_s: NonNegative = 1800.0
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
        export_native_model_files: Has no effect; accepted for compatibility with RLlib. Modules are always stored as
            safetensors files.
        checkpoint_every_s: Seconds between checkpoints of `rlzmq train` and `Algorithm.keep_checkpoints`, from the
            first iteration on; None: only at the end.
        checkpoint_keep: Number of newest checkpoints to keep, besides the one with the best mean return.
        checkpoint_replay: Whether checkpoints contain every learner's replay buffer, and its position in recorded
            episodes (RLlib's store_buffer_in_checkpoints). Training waits while the buffers are copied, and the
            driver then holds two copies of all of them. False: a resumed run fills empty buffers by sampling.
    """

    export_native_model_files: bool = False
    checkpoint_every_s: NonNegative | None = 60.0
    checkpoint_keep: PositiveInt = 3
    checkpoint_replay: bool = False


@settings
class DebuggingSettings:
    """Seed, logging, and records of the training.

    Args:
        seed: Seed from which all random streams of the run are derived; None: drawn when the algorithm is built.
        log_level: Level of the ``rlzmq`` loggers in driver, runners and learners; None: unchanged.
        log_sys_usage: Must be False.
        record_dir: Directory in which the learner records the training data of each update and a digest of the
            resulting weights, for `rlzmq replay` (``rlzmq train --record``: in the run directory). Needs a single
            learner and at least one process besides the driver's. None: nothing is recorded.
        trace: File for a trace of what each process did over time, for ui.perfetto.dev. "auto":
            trace.json in the run directory (`rlzmq train`), or in a trial's. None: no trace.
    """

    seed: NonNegativeInt | None = None
    log_level: Literal["DEBUG", "INFO", "WARN", "WARNING", "ERROR"] = "WARNING"
    log_sys_usage: bool = fixed(default=False, instead="use the tools of the operating system.")
    record_dir: str | None = None
    trace: str | None = None
