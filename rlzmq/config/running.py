"""Settings of a run as a whole: results, callbacks, failures, other machines, checkpoints, logging."""

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
    """Your code at the run's events.

    Args:
        callbacks_class: A `Callback` subclass, or a list of them; called before the functions.
        callbacks_hooks: Hook -> functions.
    """

    callbacks_class: Any = None
    callbacks_hooks: dict[str, Any] = setting(default={})


@settings
class FaultToleranceSettings:
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

    restart_failed_env_runners: bool = True
    ignore_env_runner_failures: bool = False
    max_num_env_runner_restarts: NonNegativeInt = 1000
    delay_between_env_runner_restarts_s: NonNegative = 0.1
    restart_failed_sub_environments: bool = True
    num_consecutive_env_runner_failures_tolerance: NonNegativeInt = 100
    env_failures_per_minute_tolerance: NonNegativeInt | None = 4
    env_runner_health_probe_timeout_s: NonNegative = fixed(
        default=30,
        instead="heartbeats find dead runners; fault_tolerance(env_step_timeout_s=…) says when one hangs.",
    )
    env_runner_restore_timeout_s: NonNegative = 1800.0
    restart_failed_learners: bool = True
    min_learners: PositiveInt = 1
    restart_failed_broker: bool = True
    env_step_timeout_s: NonNegative | None = None
    env_reset_timeout_s: NonNegative = 300.0
    quarantine_dir: str | None = None
    durability: Literal["memory", "journal"] = "memory"
    journal_dir: str | None = None
    env_runner_memory_limit_bytes: PositiveInt | None = None
    learner_memory_limit_bytes: PositiveInt | None = None
    process_start_timeout_s: NonNegative = 300.0
    learner_timeout_s: NonNegative = 60.0
    learner_snapshot_every_s: NonNegative | None = 60.0


@settings
class NetworkingSettings:
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

    listen: str | None = None
    advertise: str | None = None
    join_file: str | None = None
    broker: str | None = None
    num_remote_learners: NonNegativeInt = 0


@settings
class CheckpointingSettings:
    """When checkpoints are written by themselves and how many are kept.

    Args:
        export_native_model_files: Kept for RLlib's sake: modules are always plain safetensors files.
        checkpoint_every_s: Seconds between checkpoints of `rlzmq train` and `Algorithm.keep_checkpoints`;
            None: only at the end.
        checkpoint_keep: How many of the newest are kept; the best by mean return is kept beside them.
    """

    export_native_model_files: bool = False
    checkpoint_every_s: NonNegative | None = 60.0
    checkpoint_keep: PositiveInt = 3


@settings
class DebuggingSettings:
    """Seed, logging, and the record of what was trained.

    Args:
        seed: The run's one seed, from which every random stream derives; None: drawn at build.
        log_level: Of the ``rlzmq`` loggers in driver, runners and learners, once it is given.
        log_sys_usage: Only False.
        record_dir: Where the learner writes what each update was trained on, and a digest of the weights that it
            made, for `rlzmq replay` (``rlzmq train --record``: in the run directory). One learner, at least one
            process beside the driver's. None: nothing is recorded.
    """

    seed: NonNegativeInt | None = None
    log_level: Literal["DEBUG", "INFO", "WARN", "WARNING", "ERROR"] = "WARNING"
    log_sys_usage: bool = fixed(default=False, instead="use the system's own tools.")
    record_dir: str | None = None
