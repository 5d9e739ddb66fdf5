"""Setters that RLlib has for Ray's sake or for what is in the making there."""

from __future__ import annotations

from typing import Any, Literal, Self

from rlzmq.algorithms.settings import NonNegative, NotProvided, setter
from rlzmq.core.errors import ConfigurationError

__all__ = ["RAY_DEFAULTS", "RaySettings"]

RAY_DEFAULTS: dict[str, Any] = {
    # resources
    "num_cpus_for_main_process": 1, "num_gpus": 0, "placement_strategy": "PACK",
    # python_environment
    "extra_python_environs_for_driver": {}, "extra_python_environs_for_worker": {},
    # experimental
    "_validate_config": True, "_use_msgpack_checkpoints": False, "_torch_grad_scaler_class": None,
    "_torch_lr_scheduler_classes": None,
}  # fmt: skip


class RaySettings:
    """The part of AlgorithmConfig that takes Ray's settings; nearly all have one possible value here."""

    @setter
    def resources(
        self,
        *,
        num_cpus_for_main_process: NonNegative = NotProvided,
        num_gpus: NonNegative = NotProvided,
        placement_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = NotProvided,
    ) -> Self:
        """Kept for RLlib's sake: what learners and runners take is set in `learners()` and `env_runners()`.

        Args:
            num_cpus_for_main_process: Only 0 or 1: processes are not bound to CPUs.
            num_gpus: Only 0: see num_gpus_per_learner.
            placement_strategy: Only "PACK": a cluster file says what runs on which machine.
        """
        return self

    @setter
    def python_environment(
        self,
        *,
        extra_python_environs_for_driver: dict[str, str] = NotProvided,
        extra_python_environs_for_worker: dict[str, str] = NotProvided,
    ) -> Self:
        """Kept for RLlib's sake: every process has the environment variables that the driver was started with.

        Args:
            extra_python_environs_for_driver: Only {}: set them before Python starts.
            extra_python_environs_for_worker: Only {}, likewise.
        """
        return self

    @setter
    def experimental(
        self,
        *,
        _validate_config: bool = NotProvided,
        _use_msgpack_checkpoints: bool = NotProvided,
        _torch_grad_scaler_class: Any = NotProvided,
        _torch_lr_scheduler_classes: Any = NotProvided,
    ) -> Self:
        """What RLlib has not settled.

        Args:
            _validate_config: Whether `validate` checks how settings fit together, e.g. when an Algorithm is built.
            _use_msgpack_checkpoints: Only False: checkpoints are JSON and safetensors.
            _torch_grad_scaler_class: Only None: learners compute in float32.
            _torch_lr_scheduler_classes: Only None: lr takes a schedule.
        """
        return self

    def api_stack(
        self, enable_rl_module_and_learner: bool = True, enable_env_runner_and_connector_v2: bool = True
    ) -> Self:
        """Kept for RLlib's sake: there is one API stack, the new one."""
        if not (enable_rl_module_and_learner and enable_env_runner_and_connector_v2):
            raise ConfigurationError("api_stack(): only the new API stack exists here; leave both True.")
        return self
