"""Settings that exist for compatibility with RLlib; most accept only their default."""

from __future__ import annotations

from typing import Any, Literal

from rlzmq.config.settings import NonNegative, fixed, ignored, settings

__all__ = ["ExperimentalSettings", "PythonEnvironmentSettings", "ResourcesSettings"]


@settings
class ResourcesSettings:
    """Ray's resources, accepted for compatibility with RLlib; see `learners()` and `env_runners()`.

    Args:
        num_cpus_for_main_process: Ignored: processes are not bound to CPUs.
        num_gpus: Must be 0: see num_gpus_per_learner.
        placement_strategy: Ignored: a cluster file sets which process runs on which machine.
    """

    num_cpus_for_main_process: NonNegative = ignored(
        default=1, others=(0,), instead="processes are not bound to CPUs; see learners(torch_num_threads=…)."
    )
    num_gpus: NonNegative = fixed(default=0, instead="set learners(num_gpus_per_learner=…).")
    placement_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = ignored(
        default="PACK", instead="set in a cluster file which process runs on which machine."
    )


@settings
class PythonEnvironmentSettings:
    """Environment variables, accepted for compatibility with RLlib. Every process inherits the driver's variables.

    Args:
        extra_python_environs_for_driver: Must be {}: set them before Python starts.
        extra_python_environs_for_worker: Must be {}; see above.
    """

    extra_python_environs_for_driver: dict[str, str] = fixed(
        default={}, instead="set environment variables before Python starts."
    )
    extra_python_environs_for_worker: dict[str, str] = fixed(
        default={},
        instead="set environment variables before Python starts: the processes of a run inherit them.",
    )


@settings
class ExperimentalSettings:
    """RLlib's experimental settings.

    Args:
        _validate_config: Whether `validate` checks that settings are consistent, e.g. when an Algorithm is built.
        _use_msgpack_checkpoints: Must be False: checkpoints are JSON and safetensors.
        _torch_grad_scaler_class: Must be None: framework(torch_amp_dtype="bfloat16") needs no scaling.
        _torch_lr_scheduler_classes: Must be None: set lr to a schedule instead.
    """

    _validate_config: bool = True
    _use_msgpack_checkpoints: bool = fixed(default=False, instead="checkpoints are JSON and safetensors.")
    _torch_grad_scaler_class: Any = fixed(
        default=None, instead="set framework(torch_amp_dtype='bfloat16'), which needs no scaling of losses."
    )
    _torch_lr_scheduler_classes: Any = fixed(
        default=None,
        instead="give training(lr=[(0, v0), (t1, v1), …]), or step a scheduler in after_gradient_based_update of "
        "your own Learner class.",
    )
