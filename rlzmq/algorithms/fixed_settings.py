"""RLlib's settings that have one possible value here: another one is refused, never ignored."""

from __future__ import annotations

from typing import Any

from rlzmq.core.errors import ConfigurationError

__all__ = ["FIXED_SETTINGS", "check_fixed"]

# name: (the values that say what is done anyway, what to do instead of the others)
FIXED_SETTINGS: dict[str, tuple[tuple[Any, ...], str]] = {
    "clip_rewards": (
        (None, False),
        "wrap the environment: gymnasium.wrappers.ClipReward or TransformReward.",
    ),
    "is_atari": ((None,), "wrap the environment: gymnasium.wrappers.AtariPreprocessing."),
    "render_env": ((False,), "give environment(env_config={'render_mode': 'human'})."),
    "action_mask_key": (("action_mask",), "name that part of the observation space 'action_mask'."),
    "create_local_env_runner": (
        (True, False),
        "",
    ),  # the driver has a runner exactly if there are no others
    "create_env_on_local_worker": ((False,), "with runner processes the driver has no runner of its own."),
    "num_cpus_per_env_runner": ((1,), "processes are not bound to CPUs; see learners(torch_num_threads=…)."),
    "num_gpus_per_env_runner": ((0,), "env runners act on the CPU."),
    "custom_resources_per_env_runner": (({},), "name each runner's machine in the cluster file instead."),
    "validate_env_runners_after_construction": (
        (True,),
        "a runner that cannot be made always fails at once.",
    ),
    "max_requests_in_flight_per_env_runner": (
        (1,),
        "the broker leases out the whole batch, so no runner waits for a request.",
    ),
    "broadcast_env_runner_states": (
        (True,),
        "set env_runners(merge_env_runner_states=False) to keep them apart.",
    ),
    "compress_observations": ((False,), "observations travel as they are, without a copy."),
    "episodes_to_numpy": ((True,), "sampled episodes are numpy columns from the start."),
    "num_cpus_per_learner": (("auto", 0, 1), "set learners(torch_num_threads=…)."),
    "num_aggregator_actors_per_learner": ((0,), "each learner runs its own pipeline."),
    "max_requests_in_flight_per_learner": ((3,), "an update begins when the one before is committed."),
    "keep_per_episode_custom_metrics": (
        (False,),
        'log with metrics_logger.log_value(key, value, reduce="item_series").',
    ),
    "env_runner_health_probe_timeout_s": (
        (30,),
        "heartbeats find dead runners; fault_tolerance(env_step_timeout_s=…) says when one hangs.",
    ),
    "log_sys_usage": ((False,), "use the system's own tools."),
    "num_cpus_for_main_process": (
        (0, 1),
        "processes are not bound to CPUs; see learners(torch_num_threads=…).",
    ),
    "num_gpus": ((0,), "set learners(num_gpus_per_learner=…)."),
    "placement_strategy": (("PACK",), "a cluster file says what runs on which machine."),
    "extra_python_environs_for_driver": (({},), "set environment variables before Python starts."),
    "extra_python_environs_for_worker": (
        ({},),
        "set environment variables before Python starts: the processes of a run inherit them.",
    ),
    "_use_msgpack_checkpoints": ((False,), "checkpoints are JSON and safetensors."),
    "_torch_grad_scaler_class": (
        (None,),
        "scale losses in compute_gradients of a Learner class of your own.",
    ),
    "_torch_lr_scheduler_classes": (
        (None,),
        "give training(lr=[(0, v0), (t1, v1), …]), or step a scheduler in after_gradient_based_update of a "
        "Learner class of your own.",
    ),
    "torch_compile_worker": ((False,), "runners act through a fused path that needs no compiler."),
}


def check_fixed(name: str, value: Any) -> None:
    """Refuse a value that would be ignored.

    Raises:
        ConfigurationError: Says what the value must be, and what to do instead.
    """
    if name not in FIXED_SETTINGS:
        return
    allowed, instead = FIXED_SETTINGS[name]
    if value not in allowed:
        values = " or ".join(map(repr, allowed))
        raise ConfigurationError(
            f"config.{name}={value!r} is not supported: only {values}, which is how it is here. Instead: {instead}"
        )
