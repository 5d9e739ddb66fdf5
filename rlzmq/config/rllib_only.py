"""Arguments of RLlib's setters that are no settings here: which of them are ignored, and what to do instead."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.synonyms import did_you_mean, instead_of, renamed

__all__ = [
    "RLLIB_ONLY",
    "RLlibOnly",
    "accept_rllib_only",
    "find_rllib_only",
    "no_such_setting",
    "warn_ignored",
]

_logger = logging.getLogger("rlzmq.config")
_EVERY_CONFIG = "BaseConfig"


@dataclass(frozen=True)
class RLlibOnly:
    """An argument of one of RLlib's setters that is no setting here.

    Attributes:
        setter: Name of the setter that takes it in RLlib.
        config: Name of the config class that has it, also in classes that inherit from it.
        name: Its name.
        instead: What to do instead of setting it.
        accepted: The values that agree with what this library does, without a warning; None: all values, with one, as
            none changes what is learned.
        to: The setting here that takes the value; "": none, it is ignored.
    """

    setter: str
    config: str
    name: str
    instead: str
    accepted: tuple[Any, ...] | None = None
    to: str = ""


_SHARDS = (
    "data are shards of whole episodes: rlzmq.replay.write_shard(directory, episodes), or `rlzmq record`."
)
_NO_RAY_DATA = "learners map the shards into memory and build batches ahead of the updates."
_OWN_LEARNER_CODE = (
    "give your code as training(learner_connector=…), or write shards that hold what it returns."
)
_QUEUES = "env runners, broker and learners wait for each other without polling."
_NO_AGGREGATORS = "there are no aggregators: each learner runs its own connector pipeline."
_RESTARTS = (
    "a process that died is restarted after 0.1 s, doubled up to 30 s; the run ends after 10 restarts of one process "
    "in a row without useful work."
)
_STALENESS = "training(staleness=…) sets how many updates the env runners may sample ahead."
_NETWORKS = "set the networks with rl_module(model_config=…)."
_ON_DATA = "a learner computes its own loss on recorded data: evaluation(offline_evaluation_interval=…)."


def _only(value: object, instead: str) -> dict[str, Any]:
    """Return the fields for RLlib's default, the only value that agrees with what this library does."""
    return {"instead": instead, "accepted": (value,)}


def _renamed(to: str) -> dict[str, Any]:
    return {"instead": f"set {to}.", "to": to}


_ROWS: dict[tuple[str, str], dict[str, str | dict[str, Any]]] = {
    (_EVERY_CONFIG, "env_runners"): {
        "use_env_runner_state_server env_runner_state_server_max_concurrency": (
            "env runners receive new weights from the broker, one copy for each machine."
        ),
        "exploration_config": "modules explore in forward_exploration; DQN has training(epsilon=…).",
        "create_local_env_runner create_env_on_local_worker": (
            "the driver has an env runner only if there are no others."
        ),
        "num_cpus_per_env_runner": "processes are not bound to CPUs; see learners(torch_num_threads=…).",
        "num_gpus_per_env_runner": "env runners act on the CPU.",
        "custom_resources_per_env_runner": "name each runner's machine in the cluster file.",
        "validate_env_runners_after_construction": (
            "an env runner that cannot be constructed always fails at once."
        ),
        "max_requests_in_flight_per_env_runner": (
            "the broker assigns the whole batch in advance, so no env runner waits for a request."
        ),
        "compress_observations": "observations are sent uncompressed and without a copy.",
        "episodes_to_numpy": "sampled episodes always consist of numpy arrays.",
        "observation_filter": _only(
            "NoFilter", "env_runners(env_to_module_connector=lambda env, spaces, device: MeanStdFilter())."
        ),
        "broadcast_env_runner_states": _only(
            True, "set env_runners(merge_env_runner_states=False) to keep them apart."
        ),
    },
    (_EVERY_CONFIG, "environment"): {
        "action_mask_key": "name that part of the observation space 'action_mask'.",
        "render_env": _only(False, "give environment(env_config={'render_mode': 'human'})."),
    },
    (_EVERY_CONFIG, "learners"): {
        "num_cpus_per_learner": "set learners(torch_num_threads=…).",
        "max_requests_in_flight_per_learner": "an update begins when the previous one is committed.",
        "num_aggregator_actors_per_learner max_requests_in_flight_per_aggregator_actor": _NO_AGGREGATORS,
        "custom_resources_per_learner": "name each learner's machine in the cluster file.",
    },
    (_EVERY_CONFIG, "framework"): {
        "torch_compile_worker": "env runners use a fused inference path that needs no compiler.",
        "torch_ddp_kwargs": "learners average gradients in one exchange, without DistributedDataParallel.",
        "torch_skip_nan_gradients": "steps with non-finite gradients are always skipped and counted.",
        "framework": _only("torch", "PyTorch is the only one."),
    },
    (_EVERY_CONFIG, "checkpointing"): {
        "export_native_model_files": "modules are always stored as safetensors files.",
    },
    (_EVERY_CONFIG, "resources"): {
        "num_cpus_for_main_process": "processes are not bound to CPUs; see learners(torch_num_threads=…).",
        "placement_strategy": "set in a cluster file which process runs on which machine.",
        "num_gpus": _only(0, "set learners(num_gpus_per_learner=…)."),
    },
    (_EVERY_CONFIG, "training"): {
        "num_aggregator_actors_per_learner max_requests_in_flight_per_aggregator_actor": _NO_AGGREGATORS,
        "lr_schedule": _only(None, "give training(lr=[(0, v0), (t1, v1), …])."),
        "num_sgd_iter": _renamed("num_epochs"),
        "sgd_minibatch_size": _renamed("minibatch_size"),
        "model": _renamed("model_config"),
    },
    (_EVERY_CONFIG, "evaluation"): {
        (
            "num_offline_eval_runners num_cpus_per_offline_eval_runner num_gpus_per_offline_eval_runner "
            "custom_resources_per_offline_eval_runner offline_evaluation_timeout_s "
            "offline_eval_rl_module_inference_only ope_split_batch_by_episode"
        ): _ON_DATA,
        "offline_loss_for_module_fn offline_eval_runner_class": _only(None, _ON_DATA),
        "off_policy_estimation_methods": _only({}, _ON_DATA),
    },
    ("IMPALAConfig", "training"): {
        "broadcast_interval": f"new weights are sent after every update; {_STALENESS}",
        "learner_queue_size": _STALENESS,
        "num_aggregation_workers": _NO_AGGREGATORS,
        "num_gpu_loader_threads timeout_s_sampler_manager timeout_s_aggregator_manager learner_queue_timeout": _QUEUES,
        "opt_type decay momentum epsilon _separate_vf_optimizer _lr_vf": (
            "the optimizer is Adam; override configure_optimizers_for_module in your own Learner class."
        ),
        "num_multi_gpu_tower_stacks minibatch_buffer_size replay_buffer_num_slots": (
            "learners(num_learners=…, num_gpus_per_learner=…) trains on several GPUs; APPO has a circular buffer."
        ),
        "replay_proportion": _only(0.0, "use APPO, whose circular buffer trains on batches several times."),
        "entropy_coeff_schedule": _only(None, "give training(entropy_coeff=[(0, v0), (t1, v1), …])."),
    },
    ("APPOConfig", "training"): {
        "simple_queue_size": _STALENESS,
        "use_gae lambda_ target_worker_clipping": (
            "advantages are V-trace's; training(clip_param=…, vtrace_clip_rho_threshold=…) bounds the ratios."
        ),
        "use_critic": _only(True, "APPO always trains a value function."),
        "target_update_frequency": _renamed("target_network_update_freq"),
    },
    ("DQNConfig", "training"): {
        "hiddens": "set the heads' layers with rl_module(model_config={'head_fcnet_hiddens': […]}).",
        "before_learn_on_batch": "change batches in a piece of training(learner_connector=…).",
        "categorical_distribution_temperature": "explore with training(epsilon=…).",
    },
    ("SACConfig", "training"): {
        "q_model_config policy_model_config": _NETWORKS,
        "optimization_config": "set training(actor_lr=…, critic_lr=…, alpha_lr=…).",
        "_deterministic_loss _use_beta_distribution": (
            "policies are squashed Gaussians; a module with another action distribution is your own class."
        ),
        "clip_actions": _only(False, "set environment(clip_actions=…) instead."),
    },
    (_EVERY_CONFIG, "offline_data"): {
        "input_read_episodes input_read_sample_batches": "a file's columns tell what it holds.",
        (
            "materialize_data materialize_mapped_data input_read_method_kwargs input_read_batch_size "
            "map_batches_kwargs iter_batches_kwargs prelearner_buffer_kwargs prelearner_module_synch_period "
            "shuffle_buffer_size offline_sampling"
        ): _NO_RAY_DATA,
        "postprocess_inputs": "MARWIL's learner computes returns of whole episodes with the current values.",
        "input_config input_compress_columns": _SHARDS,
        "input_filesystem_kwargs output_filesystem_kwargs": (
            "shards are in directories: mount or copy the files."
        ),
        "ignore_final_observation": "episodes are recorded with their last observation.",
        "output_write_method_kwargs output_compress_columns output_config": (
            "episodes are written as shards, uncompressed, with a checksum."
        ),
        "output_max_file_size": "set offline_data(output_max_rows_per_file=…).",
        "input_read_method": _only(None, _SHARDS),
        "input_read_schema": _only({}, _SHARDS),
        "input_filesystem output_filesystem": _only(
            None, "shards are in directories: mount or copy the files."
        ),
        "offline_data_class prelearner_class prelearner_buffer_class": _only(None, _OWN_LEARNER_CODE),
        "prelearner_use_recorded_module_states": _only(
            False, "sequences begin with the module's initial state."
        ),
        "output_write_episodes": _only(
            True, "episodes are written as shards, which `rlzmq inspect` and rlzmq.replay read."
        ),
        "output_write_method": _only(
            "write_parquet", "episodes are written as shards, which `rlzmq inspect` and rlzmq.replay read."
        ),
    },
    (_EVERY_CONFIG, "reporting"): {
        "keep_per_episode_custom_metrics": _only(
            False, 'log with metrics_logger.log_value(key, value, reduce="item_series").'
        ),
    },
    (_EVERY_CONFIG, "fault_tolerance"): {
        "env_runner_health_probe_timeout_s": (
            "heartbeats detect dead env runners; fault_tolerance(env_step_timeout_s=…) detects hung ones."
        ),
        "max_num_env_runner_restarts": _RESTARTS,
        "delay_between_env_runner_restarts_s": _RESTARTS,
        "env_runner_restore_timeout_s": (
            "fault_tolerance(process_start_timeout_s=…, env_reset_timeout_s=…) limit each start, also the first."
        ),
    },
    (_EVERY_CONFIG, "debugging"): {
        "log_sys_usage": _only(False, "use the tools of the operating system."),
        "logger_config": "iterations are logged to RunConfig(log='tb'), or `rlzmq train --log tb`.",
    },
    (_EVERY_CONFIG, "python_environment"): {
        "extra_python_environs_for_driver extra_python_environs_for_worker": _only(
            {}, "set environment variables before Python starts: the processes of a run inherit them."
        ),
    },
    (_EVERY_CONFIG, "experimental"): {
        "_use_msgpack_checkpoints": _only(False, "checkpoints are JSON and safetensors."),
        "_torch_grad_scaler_class": _only(
            None, "set framework(torch_amp_dtype='bfloat16'), which needs no scaling of losses."
        ),
        "_torch_lr_scheduler_classes": _only(
            None,
            (
                "give training(lr=[(0, v0), (t1, v1), …]), or step a scheduler in after_gradient_based_update of your "
                "own Learner class."
            ),
        ),
    },
    ("IMPALAConfig", "debugging"): {
        "_env_runners_only _skip_learners": _only(
            False,
            "results name the limit of a run under 'bottleneck', and debugging(trace=…) shows where time goes.",
        ),
    },
    ("OffPolicyConfig", "training"): {
        "store_buffer_in_checkpoints": _only(False, "set checkpointing(checkpoint_replay=True)."),
    },
    ("CQLConfig", "training"): {
        "lagrangian": _only(False, "set min_q_weight."),
        "lagrangian_thresh": _only(5.0, "set min_q_weight."),
        "n_step": _only(1, "targets have one reward."),
        "replay_buffer_config": _only(
            {}, "batches are drawn from the recorded data: offline_data(input_=…)."
        ),
        "num_steps_sampled_before_learning_starts": _only(0, "nothing is sampled."),
        "training_intensity": _only(None, "set offline_data(dataset_num_iters_per_learner=…)."),
    },
    ("BCConfig", "training"): {
        "beta": _only(0.0, "use MARWILConfig, which weights steps by their advantages."),
    },
    (_EVERY_CONFIG, "rl_module"): {
        "model_config_dict": _renamed("model_config"),
    },
}
"""(Config class, setter) -> names -> what to do instead. Those with a text alone are ignored: RLlib does not read them,
or they cannot change what is learned."""

RLLIB_ONLY: tuple[RLlibOnly, ...] = tuple(
    RLlibOnly(setter, config, name, **({"instead": row} if isinstance(row, str) else row))
    for (config, setter), rows in _ROWS.items()
    for names, row in rows.items()
    for name in names.split()
)
"""Every such argument; the first row that fits a config counts."""

_warned: set[tuple[str, str]] = set()


def find_rllib_only(config_class: type, name: str, setter: str | None = None) -> RLlibOnly | None:
    """Return the row of a setting that RLlib's config of this name has (in any setter, or this one), or None."""
    classes = {base.__name__ for base in config_class.__mro__}
    for row in RLLIB_ONLY:
        if row.name == name and row.config in classes and setter in (None, row.setter):
            return row
    return None


def accept_rllib_only(config: object, name: str, value: object, setter: str | None = None) -> bool:
    """Ignore or translate a setting of RLlib's with one warning in this process. Return False if there is none.

    Raises:
        ConfigurationError: The value asks for what this library does not do; the text says what to do instead.
    """
    row = find_rllib_only(type(config), name, setter)
    if row is None:
        return False
    if row.accepted is not None and value not in row.accepted:
        raise ConfigurationError(
            f"{row.setter}({name}={value!r}): RLlib's setting {name!r} is not supported, except for "
            f"{' or '.join(map(repr, row.accepted))}. Instead: {row.instead}"
        )
    if row.to:
        setattr(config, row.to, value)
    if row.accepted is None:
        warn_ignored(row.setter, name, row.instead, taken=bool(row.to))
    return True


def warn_ignored(setter: str, name: str, instead: str, *, taken: bool = False) -> None:
    """Warn, once in this process, that the value of a setting of RLlib's is ignored, or taken under another name."""
    if (setter, name) not in _warned:
        _warned.add((setter, name))
        what = "taken as RLlib's name" if taken else "a setting of RLlib's and ignored"
        _logger.warning("%s(%s=…) is %s: %s", setter, name, what, instead)


def no_such_setting(config_class: Any, name: str, valid: Iterable[object], setter: str | None = None) -> str:
    """Return the error text about an unknown setting (of a setter): what to write instead, or the closest name."""
    where = f"{config_class.__name__}{'' if setter is None else f'.{setter}()'}"
    fields = config_class._fields
    if row := find_rllib_only(config_class, name):
        hint = f" It is RLlib's; instead: {row.instead}"
    elif (here := name if name in fields else renamed(name, fields)) and fields[here].group:
        hint = f" Instead: .{fields[here].group}({here}=…)."
    elif instead := instead_of(name):
        hint = f" Instead: {instead}."
    else:
        hint = did_you_mean(name, valid)
    return f"{where} has no setting {name!r}.{hint}"
